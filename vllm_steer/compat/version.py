# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this was tested with, and which of its settings steering does not go with. Both refuse with a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TESTED = (0, 32)
TESTED_RANGE = "0.32.x"
OVERRIDE = "VLLM_STEER_ALLOW_UNTESTED_VLLM"


class IncompatibleError(ValueError):
    """Steering cannot run right in this vLLM or with these settings; the message says which and what to do."""


def check_version(version: str | None = None) -> None:
    """Raise :class:`IncompatibleError` unless vLLM is in the tested range or the user overrides."""
    if version is None:
        import vllm

        version = vllm.__version__
    if is_tested(version) or os.environ.get(OVERRIDE) == "1":
        return
    raise IncompatibleError(
        f"vllm-steer is tested with vLLM {TESTED_RANGE}, and in vLLM {version} hook points may be in other places. "
        f"Install a vLLM of that range, or set {OVERRIDE}=1 to run untested."
    )


def is_tested(version: str) -> bool:
    """Whether ``version`` is in the tested range; an unreadable version is not."""
    parts = version.split("+")[0].split(".")
    try:
        return tuple(int(part) for part in parts[:2]) == TESTED
    except ValueError:
        return False


CONNECTORS_BY_BLOCK_HASH = frozenset({"OffloadingConnector", "MooncakeStoreConnector"})
"""KV connectors whose scheduler side takes its keys from ``request.block_hashes``, and from nothing else."""


@dataclass(frozen=True)
class Conflict:
    """A setting of vLLM under which taps would read or edit the wrong tokens, or not run."""

    setting: str
    present: Callable[[Any], bool]
    reason: str


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "--enable-dbo / micro-batching",
        lambda c: bool(c.parallel_config.use_ubatching),
        "a step runs as two slices in two threads, and the second would take the first one's rows",
    ),
    Conflict(
        "--prefill-context-parallel-size > 1",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "each rank holds another part of every prompt",
    ),
    Conflict(
        "--kv-sharing-fast-prefill",
        lambda c: bool(c.cache_config.kv_sharing_fast_prefill),
        "later layers run on the last tokens only, so edits of the others would be lost",
    ),
    Conflict(
        "VLLM_USE_RUST_FRONTEND",
        lambda c: _rust_frontend(),
        "the Rust front end does not know the steering fields and would ignore them",
    ),
    Conflict(
        "--runner pooling",
        lambda c: c.model_config.runner_type != "generate",
        "steering edits generation; pooling requests have no sampling parameters to carry it",
    ),
    Conflict(
        "sequence-parallel mixture of experts",
        lambda c: bool(c.parallel_config.use_sequence_parallel_moe),
        "the residual stream is split over ranks by token, and no recipe handles that yet",
    ),
    Conflict(
        "distributed_executor_backend external_launcher",
        lambda c: c.parallel_config.distributed_executor_backend == "external_launcher",
        "every rank schedules for itself and must decide alike, and a request that waits for room does so by the clock",
    ),
    Conflict(
        "--enable-elastic-ep",
        lambda c: bool(c.parallel_config.enable_elastic_ep),
        "workers and graphs are made anew while requests run, and nothing has shown that taps and tables follow",
    ),
    Conflict(
        "speculative decoding with enable_adaptive_verification",
        lambda c: c.speculative_config is not None and bool(c.speculative_config.enable_adaptive_verification),
        "how many tokens each request has in a step is known on the device alone, and captured rows would be taken for "
        "those of other positions",
    ),
    Conflict(
        "a diffusion language model",
        lambda c: bool(c.model_config.is_diffusion),
        "its tokens have no fixed phase",
    ),
    Conflict(
        "--kv-transfer-config with this connector",
        lambda c: (
            c.kv_transfer_config is not None and c.kv_transfer_config.kv_connector not in CONNECTORS_BY_BLOCK_HASH
        ),
        "it may find blocks by their tokens or by request, and so give keys and values computed under an edit to a "
        f"plain request; {', '.join(sorted(CONNECTORS_BY_BLOCK_HASH))} go by vLLM's block hashes, which hold the edits",
    ),
)


def _rust_frontend() -> bool:
    import vllm.envs as envs

    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def check_settings(vllm_config: Any) -> None:
    """Raise :class:`IncompatibleError` naming every setting of this engine that steering cannot go with."""
    found = [conflict for conflict in CONFLICTS if conflict.present(vllm_config)]
    if found:
        reasons = "; ".join(f"{conflict.setting}: {conflict.reason}" for conflict in found)
        raise IncompatibleError(f"--enable-steering cannot be combined with {reasons}. Leave one of the two out.")
