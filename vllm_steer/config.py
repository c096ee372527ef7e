# SPDX-License-Identifier: Apache-2.0
"""What an operator can set, and how it reaches the engine.

The settings travel in vLLM's ``additional_config["steering"]``, which vLLM hashes into its compile-cache keys
(``config/vllm.py``, ``VllmConfig.compute_hash``): everything here shapes the traced graph or the tables that it reads,
so an artifact compiled without steering, or with other tables, is never loaded into a steered engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from vllm_steer._version import __version__
from vllm_steer.errors import SteeringError

WORKER_CLS = "vllm_steer.engine.worker.SteeringWorker"
SCHEDULER_CLS = "vllm_steer.engine.scheduler.make_scheduler"


@dataclass(frozen=True)
class Limit:
    """One size that is fixed when the engine starts."""

    name: str
    default: int
    low: int
    high: int
    help: str


LIMITS: tuple[Limit, ...] = (
    Limit("max_rows", 1024, 1, 1 << 16, "distinct token programs on the device at one time, over all running requests"),
    Limit(
        "max_vectors", 2048, 1, 1 << 20, "distinct vectors on the device at one time; each takes 4 x hidden size bytes"
    ),
    Limit(
        "max_instructions",
        65536,
        1,
        1 << 24,
        "edit instructions (one per row, site and edit) on the device at one time",
    ),
    Limit("max_segments", 32, 1, 1024, "stretches of differently edited or read positions that one request may have"),
    Limit("capture_rows", 8192, 1, 1 << 24, "captured rows of one step; each takes hidden size x bytes of the dtype"),
    Limit("capture_mib", 4096, 1, 1 << 24, "captured rows of all running requests together, in MiB of host memory"),
)


class SteeringConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the device tables; the rows of :data:`LIMITS` say what each one means and its range.

    ``capture_policy``: what becomes of a request that would take captured rows beyond ``capture_mib``. ``wait`` admits
    it when others have ended; ``fail`` runs it at once without its capture, whose status is then ``partial``.
    """

    max_rows: int = 1024
    max_vectors: int = 2048
    max_instructions: int = 65536
    max_segments: int = 32
    capture_rows: int = 8192
    capture_mib: int = 4096
    capture_policy: Literal["wait", "fail"] = "wait"

    def __post_init__(self) -> None:
        for limit in LIMITS:
            value = getattr(self, limit.name)
            if not limit.low <= value <= limit.high:
                raise SteeringError(
                    f"steering_config.{limit.name}", f"{value} is outside {limit.low} to {limit.high} ({limit.help})"
                )

    @classmethod
    def parse(cls, value: SteeringConfig | dict[str, Any] | None) -> SteeringConfig:
        """A checked config from what a user wrote; raises :class:`SteeringError`."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(limit.name for limit in LIMITS)
            raise SteeringError("steering_config", f"{error}; known settings: {known}") from None


def engine_kwargs(
    steering_config: SteeringConfig | dict[str, Any] | None = None,
    additional_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The three engine arguments that switch steering on, for ``EngineArgs`` or ``AsyncEngineArgs``.

    ``AsyncEngineArgs(model=..., **vllm_steer.engine_kwargs())`` is ``--enable-steering`` spelled in Python.
    """
    config = SteeringConfig.parse(steering_config)
    section = {"version": __version__, **msgspec.to_builtins(config)}
    return {
        "additional_config": {**(additional_config or {}), "steering": section},
        "worker_cls": WORKER_CLS,
        "scheduler_cls": SCHEDULER_CLS,
    }


def from_vllm_config(vllm_config: Any) -> SteeringConfig | None:
    """The steering settings of an engine, or None where steering is not enabled."""
    additional = getattr(vllm_config, "additional_config", None)
    section = additional.get("steering") if isinstance(additional, dict) else None
    if section is None:
        return None
    return SteeringConfig.parse({name: value for name, value in section.items() if name != "version"})
