# SPDX-License-Identifier: Apache-2.0
"""What an operator can set, and how it reaches the engine.

The settings travel in vLLM's ``additional_config["steering"]``, which vLLM hashes into its compile-cache keys
(``config/vllm.py``, ``VllmConfig.compute_hash``): sizes shape the traced graph or the tables that it reads, so an
artifact compiled without steering, or with other tables, is never loaded into a steered engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from vllm_steer._version import __version__
from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.points import OPTIONAL_POINTS, POINTS_FLAG

WORKER_CLS = "vllm_steer.engine.worker.SteeringWorker"
SCHEDULER_CLS = "vllm_steer.engine.scheduler.make_scheduler"
EXECUTOR_CLS = "vllm_steer.engine.executor.SteeringExecutor"


@dataclass(frozen=True)
class Switch:
    """One yes or no that is settled when the engine starts; the flag turns it to ``not default``."""

    name: str
    flag: str
    default: bool
    help: str


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "allow_unproven",
        "--steering-allow-unproven",
        False,
        "run on a decoder-layer class whose source is not the one that its recipe was proven on, with a warning",
    ),
    Switch(
        "self_check",
        "--steering-skip-self-check",
        True,
        "start without the forward passes that check the taps on the model itself",
    ),
    Switch(
        "plain_code",
        "--steering-plain-code",
        False,
        "compile the model without taps besides, for steps with nothing to do: kernels that the compiler makes of an "
        "addition and the norm behind it stay one there, for a longer start; not yet run on a GPU",
    ),
)


@dataclass(frozen=True)
class Subset:
    """A choice of several names out of a few; the flag takes them with commas between them."""

    name: str
    flag: str
    of: tuple[str, ...]
    help: str


SUBSETS: tuple[Subset, ...] = (
    Subset(
        "points",
        POINTS_FLAG,
        OPTIONAL_POINTS,
        "hook points on the branches, beside those on the stream: a tap and a column of the tables per layer for each",
    ),
)


class SteeringConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the device tables, switches and choices; :data:`LIMITS`, :data:`SWITCHES` and :data:`SUBSETS` say what
    each one means.

    ``capture_policy``: what becomes of a request that would take captured rows beyond ``capture_mib``. ``wait`` admits
    it when others have ended; ``fail`` runs it at once without its capture, whose status is then ``partial``.
    """

    max_rows: int = ENGINE_LIMITS["max_rows"].default
    max_vectors: int = ENGINE_LIMITS["max_vectors"].default
    max_instructions: int = ENGINE_LIMITS["max_instructions"].default
    max_segments: int = ENGINE_LIMITS["max_segments"].default
    capture_rows: int = ENGINE_LIMITS["capture_rows"].default
    graph_sets: int = ENGINE_LIMITS["graph_sets"].default
    capture_mib: int = ENGINE_LIMITS["capture_mib"].default
    queue_timeout: int = ENGINE_LIMITS["queue_timeout"].default
    capture_policy: Literal["wait", "fail"] = "wait"
    allow_unproven: bool = False
    self_check: bool = True
    plain_code: bool = False
    points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for limit in ENGINE_LIMITS.values():
            value = getattr(self, limit.name)
            if not limit.low <= value <= limit.high:
                raise SteeringError(
                    f"steering_config.{limit.name}", f"{value} is outside {limit.low} to {limit.high} ({limit.help})"
                )
        if self.plain_code and self.graph_sets == 1:
            raise SteeringError(
                "steering_config.plain_code", "needs graph_sets of 2 or more: with 1, every step has every tap"
            )
        for subset in SUBSETS:
            given = getattr(self, subset.name)
            sound = isinstance(given, (list, tuple)) and all(name in subset.of for name in given)
            if not sound or any(given.count(name) > 1 for name in given):
                raise SteeringError(
                    f"steering_config.{subset.name}",
                    f"must be a list of some of {', '.join(subset.of)}, each once, not {given!r}",
                )
            # In one order, so that equal settings are equal.
            msgspec.structs.force_setattr(self, subset.name, tuple(name for name in subset.of if name in given))

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
            known = ", ".join(cls.__struct_fields__)
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


def choose_executor(vllm_config: Any) -> None:
    """Under pipeline parallelism on one host, have every stage's captured rows collected.

    Another executor is left as it is, and so is an engine with an encoder-cache connector, which counts answers by the
    executor's name: :func:`rows_of_all_stages` is then False.
    """
    parallel = vllm_config.parallel_config
    if (
        parallel.pipeline_parallel_size > 1
        and parallel.distributed_executor_backend == "mp"
        and vllm_config.ec_transfer_config is None
    ):
        parallel.distributed_executor_backend = EXECUTOR_CLS


def rows_of_all_stages(vllm_config: Any) -> bool:
    """Whether captured rows of every pipeline stage reach the front end."""
    parallel = vllm_config.parallel_config
    return bool(parallel.pipeline_parallel_size == 1 or parallel.distributed_executor_backend == EXECUTOR_CLS)


def from_vllm_config(vllm_config: Any) -> SteeringConfig | None:
    """The steering settings of an engine, or None where steering is not enabled."""
    additional = getattr(vllm_config, "additional_config", None)
    section = additional.get("steering") if isinstance(additional, dict) else None
    if section is None:
        return None
    return SteeringConfig.parse({name: value for name, value in section.items() if name != "version"})
