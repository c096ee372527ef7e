# SPDX-License-Identifier: Apache-2.0
"""Engine settings, and the engine arguments that carry them.

The settings travel in vLLM's ``additional_config["steering"]``, which vLLM hashes into its compile-cache keys
(``config/vllm.py``, ``VllmConfig.compute_hash``). Sizes shape the traced graph and the tables that it reads, so an
artifact compiled without steering or with other tables must not be loaded into a steered engine.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import msgspec

from vllm_steer._version import __version__
from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS, MAX_SAES
from vllm_steer.request.message_parts import read_parts
from vllm_steer.request.references import read_name
from vllm_steer.request.scalars import describe_arguments, did_you_mean, read_choice, shown
from vllm_steer.settings import CAPTURE_POLICIES, CHECKED, MULTI_CHOICES, CapturePolicy

WORKER_CLS = "vllm_steer.engine.worker.SteeringWorker"
SCHEDULER_CLS = "vllm_steer.engine.scheduler.make_scheduler"
EXECUTOR_CLS = "vllm_steer.engine.executor.SteeringExecutor"
RAY_EXECUTOR_CLS = "vllm_steer.engine.ray_executor.SteeringRayExecutor"


class _ConfigMeta(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass that suggests names for unknown arguments. Structs do not call ``__init__``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}{describe_arguments(kwargs, cls.__struct_fields__)}") from None


class SteeringConfig(msgspec.Struct, metaclass=_ConfigMeta, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an engine with steering.

    The page "Limits" of the reference has the default and the range of each field. ``capture_policy`` applies to a
    request whose captured rows would exceed ``capture_mib`` together with those of running requests: ``wait`` delays
    the request, ``fail`` runs it at once and reports its capture as ``partial``.

    Examples:
        >>> from vllm_steer import SteeringConfig
        >>> SteeringConfig(max_rows=64, points=["mlp_out"]).points
        ('mlp_out',)
    """

    max_rows: int = ENGINE_LIMITS["max_rows"].default
    """Table rows: distinct sets of edits and captures that apply to one token."""
    max_vectors: int = ENGINE_LIMITS["max_vectors"].default
    """Distinct vectors of edits and directions of projections on the device."""
    max_instructions: int = ENGINE_LIMITS["max_instructions"].default
    """Instructions on the device: one per table row, site and edit or capture."""
    max_matrix_rows: int = ENGINE_LIMITS["max_matrix_rows"].default
    """Positions of matrices on the device: edits with one row per position."""
    max_segments: int = ENGINE_LIMITS["max_segments"].default
    """Ranges of positions of one request with different edits and captures."""
    capture_rows: int = ENGINE_LIMITS["capture_rows"].default
    """Captured rows of one engine step."""
    graph_sets: int = ENGINE_LIMITS["graph_sets"].default
    """Sets of CUDA graphs that launch different taps."""
    record_columns: int = ENGINE_LIMITS["record_columns"].default
    """Numbers that one token records for readouts, conditions and live strengths."""
    max_conditions: int = ENGINE_LIMITS["max_conditions"].default
    """Conditions of one request, in `when` of its edits and in `stop_on`."""
    capture_mib: int = ENGINE_LIMITS["capture_mib"].default
    """Captured rows of all running requests together, in MiB of host memory."""
    queue_timeout: int = ENGINE_LIMITS["queue_timeout"].default
    """Seconds that a request may wait for room; 0 for no limit."""
    capture_policy: CapturePolicy = "wait"
    """``wait`` or ``fail``, see above."""
    allow_unproven: bool = False
    """Whether to start with a warning on decoder-layer classes that differ from the tested ones, and on untested splits
    over ranks; see ``--steering-allow-unproven``."""
    self_check: bool = True
    """Whether to check the taps on the model when the engine starts."""
    plain_code: bool | None = None
    """Whether to compile the model a second time without taps, for steps without edits and captures; None: on a GPU if
    the model allows it."""
    points: tuple[str, ...] = ()
    """Additional hook points: ``attn_out``, ``mlp_in``, ``mlp_out``."""

    user_hooks: bool = False
    """Whether functions of this process may run at hook points, see `LLM.register_hook`. Servers
    refuse the setting."""

    saes: dict[str, str] = {}
    """Folders of sparse autoencoders by the names that readouts use; see ``--steering-sae``."""

    sae_any_site: bool = False
    """Whether autoencoders are served at other sites, and with other models, than those that their files name."""

    parts: dict[str, tuple[int | str, ...]] = {}
    """Start and end token of parts of conversations, as ids or text; see ``--steering-part``."""
    tool_parser: str = ""
    """Name of vLLM's tool parser, which knows the tokens of tool calls; the server sets it."""
    chat_template: str = ""
    """Chat template, or its file, by which messages of a prompt are found; the server sets it."""

    def __post_init__(self) -> None:
        self._check_saes()
        msgspec.structs.force_setattr(self, "parts", read_parts(self.parts, "steering_config.parts"))
        for name in ("tool_parser", "chat_template"):
            if not isinstance(getattr(self, name), str):
                raise SteeringError(f"steering_config.{name}", f"must be text, not {shown(getattr(self, name))}")
        for setting in CHECKED:
            if (problem := setting.problem(value := getattr(self, setting.name))) is not None:
                raise SteeringError(f"steering_config.{setting.name}", f"{problem}, not {shown(value)}")
        if not isinstance(self.user_hooks, bool):
            raise SteeringError("steering_config.user_hooks", f"must be true or false, not {shown(self.user_hooks)}")
        read_choice(self.capture_policy, CAPTURE_POLICIES, "steering_config.capture_policy")
        if self.plain_code and self.graph_sets == 1:
            raise SteeringError(
                "steering_config.plain_code", "needs graph_sets of 2 or more; with 1, every step runs all taps"
            )
        for choice in MULTI_CHOICES:
            given = getattr(self, choice.name)
            # In a fixed order, so that equal choices compare equal.
            msgspec.structs.force_setattr(self, choice.name, tuple(name for name in choice.choices if name in given))

    def _check_saes(self) -> None:
        field = "steering_config.saes"
        if not isinstance(self.saes, dict) or len(self.saes) > MAX_SAES:
            raise SteeringError(field, f"must be {{name: folder}} with at most {MAX_SAES}, not {shown(self.saes)}")
        for name, folder in self.saes.items():
            if not isinstance(folder, str):
                raise SteeringError(f"{field}.{read_name(name, field)}", f"must be a path, not {shown(folder)}")
            read_name(name, field)

    @classmethod
    def parse(cls, value: SteeringConfig | dict[str, Any] | None) -> SteeringConfig:
        """Return a validated config.

        Args:
            value: A config, a dict of its fields, or None for the defaults.

        Raises:
            SteeringError: A setting is unknown or its value is invalid.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise SteeringError(
                "steering_config", f"must be a SteeringConfig or a dict of settings, not {shown(value)}"
            )
        for name in value:
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__) + did_you_mean(name, cls.__struct_fields__)
                raise SteeringError("steering_config", f"{shown(name)} is not a setting; known settings: {known}")
        return cls(**value)


def engine_kwargs(
    steering_config: SteeringConfig | dict[str, Any] | None = None,
    additional_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the engine arguments that enable steering, for ``EngineArgs`` or ``AsyncEngineArgs``.

    ``AsyncEngineArgs(model=..., **vllm_steer.engine_kwargs())`` is the Python form of ``--enable-steering``.

    Args:
        steering_config: Settings of the engine.
        additional_config: Other entries of vLLM's ``additional_config``.

    Raises:
        SteeringError: A setting is invalid.

    Examples:
        >>> from vllm_steer import engine_kwargs
        >>> sorted(engine_kwargs({"max_rows": 64}))
        ['additional_config', 'scheduler_cls', 'worker_cls']
    """
    config = SteeringConfig.parse(steering_config)
    section = {"version": __version__, **msgspec.to_builtins(config)}
    return {
        "additional_config": {**(additional_config or {}), "steering": section},
        "worker_cls": WORKER_CLS,
        "scheduler_cls": SCHEDULER_CLS,
    }


def choose_executor(vllm_config: Any) -> None:
    """Select the executor that collects captured rows from all pipeline stages.

    Other executors are kept. The executor is also kept if there is an encoder-cache connector, which depends on the
    executor's name. `rows_of_all_stages` is False in these cases. vLLM's earlier executor for Ray, which it uses
    with ``VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0``, returns outputs of the last stage only.
    """
    from vllm_steer.compat.internals import envs

    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    newer_ray = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)  # vLLM 0.33 has no other
    if backend == "ray" and newer_ray and vllm_config.ec_transfer_config is None:
        # The class itself rather than its name, because vLLM reads its attribute `uses_ray`.
        parallel.distributed_executor_backend = pkgutil.resolve_name(RAY_EXECUTOR_CLS)
    if backend == "mp" and parallel.pipeline_parallel_size > 1 and vllm_config.ec_transfer_config is None:
        parallel.distributed_executor_backend = EXECUTOR_CLS


def has_worker_processes(vllm_config: Any) -> bool:
    """Return whether vLLM's multiprocess executor runs each worker in a process of its own."""
    return vllm_config.parallel_config.distributed_executor_backend in ("mp", EXECUTOR_CLS)


def rows_of_all_stages(vllm_config: Any) -> bool:
    """Return whether captured rows of every pipeline stage reach the front end."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    name = f"{backend.__module__}.{backend.__qualname__}" if isinstance(backend, type) else backend
    return bool(parallel.pipeline_parallel_size == 1 or name in (EXECUTOR_CLS, RAY_EXECUTOR_CLS))


def from_vllm_config(vllm_config: Any) -> SteeringConfig | None:
    """Return the steering settings of an engine, or None if steering is not enabled."""
    additional = getattr(vllm_config, "additional_config", None)
    section = additional.get("steering") if isinstance(additional, dict) else None
    if section is None:
        return None
    return SteeringConfig.parse({name: value for name, value in section.items() if name != "version"})
