# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM, and the settings of vLLM that conflict with steering."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_steer.compat.internals import LIST_ALL
from vllm_steer.compat.wraps import file_of
from vllm_steer.errors import IncompatibleError

if TYPE_CHECKING:
    from vllm_steer.compat.sources import SourceTree

TESTED = ((0, 33), (0, 32))
TESTED_RANGE = "0.33.x and 0.32.x"
OVERRIDE = "VLLM_STEER_ALLOW_UNTESTED_VLLM"
_NAMED = 3
"""Number of changed parts that a message names."""


@dataclass(frozen=True)
class VersionCheck:
    """Comparison of an untested version of vLLM with the tested ones.

    Attributes:
        version: The version.
        compared_with: The tested version that is most like it.
        total: Number of seams, the parts of vLLM that this package uses (:mod:`vllm_steer.compat.seams`).
        changed: Seams whose source differs, each with its file.
        problem: Reason why the source could not be compared, or an empty string.
    """

    version: str
    compared_with: str = ""
    total: int = 0
    changed: tuple[str, ...] = ()
    problem: str = ""

    @property
    def unchanged(self) -> bool:
        """Whether everything that this package uses is as in a tested version."""
        return not self.problem and not self.changed

    def __str__(self) -> str:
        if self.problem:
            return f"the source of vLLM {self.version} could not be compared ({self.problem})"
        if not self.changed:
            return (
                f"vLLM {self.version} is not tested; all {self.total} parts of it that vllm-steer uses are as in "
                f"{self.compared_with}"
            )
        more = f" and {len(self.changed) - _NAMED} more" if len(self.changed) > _NAMED else ""
        return (
            f"vLLM {self.version} differs from {self.compared_with} in {len(self.changed)} of the {self.total} parts "
            f"that vllm-steer uses: {', '.join(self.changed[:_NAMED])}{more}"
        )


def check_version(version: str | None = None) -> VersionCheck | None:
    """Check that vLLM is in the tested range, or that everything of it that this package uses is unchanged.

    Returns:
        None if the version is tested, otherwise what was compared, which may differ if the user overrides the check.

    Raises:
        IncompatibleError: The version is not tested and differs; the message names the changed functions and files.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    if is_tested(version):
        return None
    check = compare_installed(version)
    if check.unchanged or os.environ.get(OVERRIDE) == "1":
        return check
    raise IncompatibleError(
        f"vllm-steer supports vLLM {TESTED_RANGE}; {check}. Install a supported version, or set {OVERRIDE}=1 to run "
        f"untested. All differences: {LIST_ALL}"
    )


@cache
def compare_installed(version: str) -> VersionCheck:
    """Compare the source of the installed vLLM, which calls itself ``version``, with the tested versions."""
    from vllm_steer.compat.sources import SourceError, installed_source

    try:
        return compare_with_tested(installed_source(), version)
    except (SourceError, OSError, SyntaxError, ValueError) as error:
        return VersionCheck(version, problem=str(error))


def compare_with_tested(tree: SourceTree, version: str) -> VersionCheck:
    """Compare the source of a version with the record of the tested versions, and return the closest."""
    from vllm_steer.compat.seam_digests import changes, read_seams, recorded

    seams = read_seams(tree)
    changed = {tested: changes(record, seams) for tested, record in recorded().items() if is_tested(tested)}
    closest = min(changed, key=lambda tested: len(changed[tested]))
    places = tuple(
        f"{change.seam.path.partition(':')[2] or 'the module'} in {file_of(change.seam.path)}"
        for change in changed[closest]
    )
    return VersionCheck(version, closest, len(seams), places)


def is_tested(version: str) -> bool:
    """Return whether ``version`` is in the tested range. A version that cannot be parsed is not."""
    return _release(version) in TESTED


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty if it cannot be parsed."""
    try:
        return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return ()


CONNECTORS_BY_BLOCK_HASH = frozenset({"OffloadingConnector", "MooncakeStoreConnector"})
"""KV connectors whose keys depend on ``request.block_hashes`` only."""


@dataclass(frozen=True)
class Conflict:
    """A setting of vLLM with which taps would capture or edit the wrong tokens, or not run.

    Attributes:
        setting: Name of the setting.
        present: Whether an engine's configuration has it.
        reason: Why it is refused, and what to use instead unless the setting can simply be omitted.
        named: Return the setting with its value in an engine, for settings of which some values are supported.
    """

    setting: str
    present: Callable[[Any], bool]
    reason: str
    named: Callable[[Any], str] | None = None

    def describe(self, vllm_config: Any) -> str:
        """Return the setting of this engine and the reason."""
        return f"{self.setting if self.named is None else self.named(vllm_config)}: {self.reason}"


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "--enable-dbo / micro-batching",
        lambda c: bool(c.parallel_config.use_ubatching),
        "a step runs as two slices in two threads, and the second slice would use the rows of the first",
    ),
    Conflict(
        "--prefill-context-parallel-size > 1",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "each rank has a different part of every prompt; use --tensor-parallel-size instead",
    ),
    Conflict(
        "--kv-sharing-fast-prefill",
        lambda c: bool(c.cache_config.kv_sharing_fast_prefill),
        "later layers run on the last tokens only, so edits of other tokens would be lost",
    ),
    Conflict(
        "VLLM_USE_RUST_FRONTEND",
        lambda c: _rust_frontend(),
        "the Rust front end does not know the steering fields and would ignore them; unset the variable",
    ),
    Conflict(
        "--runner pooling",
        lambda c: c.model_config.runner_type != "generate",
        "steering edits generation, and pooling requests have no sampling parameters to carry it; serve pooling models "
        "without --enable-steering",
    ),
    Conflict(
        "sequence-parallel mixture of experts",
        lambda c: bool(c.parallel_config.use_sequence_parallel_moe),
        "each rank has the residual stream of a part of the tokens, and edits and captures need that of all tokens; "
        "omit --enable-expert-parallel, or use --data-parallel-size 1 or --tensor-parallel-size 1",
    ),
    Conflict(
        "distributed_executor_backend external_launcher",
        lambda c: c.parallel_config.distributed_executor_backend == "external_launcher",
        "every rank schedules by itself and must decide alike, but requests that wait for room time out by the clock; "
        "use mp",
    ),
    Conflict(
        "--enable-elastic-ep",
        lambda c: bool(c.parallel_config.enable_elastic_ep),
        "vLLM rebuilds workers and CUDA graphs while requests run; this was not tested with steering; omit it",
    ),
    Conflict(
        "speculative decoding with enable_adaptive_verification",
        lambda c: c.speculative_config is not None and bool(c.speculative_config.enable_adaptive_verification),
        "the number of tokens of a request in a step is known on the device only, so captured rows would get the "
        "wrong positions; set it to false",
    ),
    Conflict(
        "--monokernel",
        # A setting of 0.33.
        lambda c: bool(getattr(c.kernel_config, "monokernel", False)),
        "one kernel runs whole layers, so no value can be edited or captured between them; omit it",
    ),
    Conflict(
        "--additional-config with decode_backend",
        # Kimi K3 and DeepSeek V4.1 in 0.33.
        lambda c: c.additional_config.get("decode_backend", "auto") != "auto",
        "kernels that do not call the layers decode, so edits and captures of generated tokens would be lost; omit it",
    ),
    Conflict(
        "a diffusion language model",
        lambda c: bool(c.model_config.is_diffusion),
        "its tokens are not generated in order; start it without --enable-steering",
    ),
    Conflict(
        "--kv-transfer-config with other connectors",
        lambda c: (
            c.kv_transfer_config is not None and c.kv_transfer_config.kv_connector not in CONNECTORS_BY_BLOCK_HASH
        ),
        "it may look blocks up by tokens or request and give edited keys and values to a plain request; use "
        f"{' or '.join(sorted(CONNECTORS_BY_BLOCK_HASH))}, which use vLLM's block hashes, which include the edits",
        lambda c: f"--kv-transfer-config with the connector {c.kv_transfer_config.kv_connector}",
    ),
)


def _rust_frontend() -> bool:
    from vllm_steer.compat.internals import envs

    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def check_settings(vllm_config: Any) -> None:
    """Raise :class:`IncompatibleError` naming every setting of this engine that conflicts with steering."""
    found = [conflict for conflict in CONFLICTS if conflict.present(vllm_config)]
    if found:
        reasons = ". Nor with ".join(conflict.describe(vllm_config) for conflict in found)
        raise IncompatibleError(
            f"--enable-steering cannot be combined with {reasons}. Change these settings, or start without "
            "--enable-steering."
        )
