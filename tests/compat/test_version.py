# SPDX-License-Identifier: Apache-2.0
"""Tests of the version guard and of conflicting settings."""

from __future__ import annotations

import re
from types import SimpleNamespace as N
from typing import Any

import pytest
from vllm import envs

from vllm_steer.compat.sources import SourceTree, installed_source, installed_version
from vllm_steer.compat.version import (
    CONNECTORS_BY_BLOCK_HASH,
    OVERRIDE,
    TESTED_RANGE,
    IncompatibleError,
    VersionCheck,
    check_settings,
    check_version,
    compare_with_tested,
)


def config(**changes: Any) -> Any:
    """Return a VllmConfig without conflicts but for ``changes``; ``parallel__x`` sets ``parallel_config.x``."""
    made = N(
        parallel_config=N(
            use_ubatching=False,
            prefill_context_parallel_size=1,
            use_sequence_parallel_moe=False,
            distributed_executor_backend="mp",
            enable_elastic_ep=False,
        ),
        cache_config=N(kv_sharing_fast_prefill=False),
        model_config=N(runner_type="generate", is_diffusion=False),
        speculative_config=N(enable_adaptive_verification=False),
        kv_transfer_config=None,
        kernel_config=N(),
        additional_config={},
    )
    for name, value in changes.items():
        part, field = name.split("__")
        owner = getattr(made, f"{part}_config")
        (owner if isinstance(owner, dict) else vars(owner))[field] = value
    return made


@pytest.mark.feature(
    "micro-batching, context parallelism, fast prefill, elastic experts, pooling (refused)", "steer", "capture"
)
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"parallel__use_ubatching": True}, "enable-dbo"),
        ({"parallel__prefill_context_parallel_size": 2}, "prefill-context-parallel"),
        ({"cache__kv_sharing_fast_prefill": True}, "kv-sharing-fast-prefill"),
        ({"model__runner_type": "pooling"}, "pooling"),
        ({"parallel__use_sequence_parallel_moe": True}, "sequence-parallel"),
        ({"parallel__distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"parallel__enable_elastic_ep": True}, "enable-elastic-ep"),
        ({"model__is_diffusion": True}, "diffusion"),
        ({"kernel__monokernel": True}, "monokernel"),
        ({"additional__decode_backend": "latency_specialized"}, "decode_backend"),
        ({"speculative__enable_adaptive_verification": True}, "adaptive_verification"),
    ],
)
def test_rejects_each_conflicting_setting(changes: dict[str, Any], setting: str) -> None:
    """Catches a setting under which taps would silently take the wrong tokens."""
    with pytest.raises(IncompatibleError, match=setting):
        check_settings(config(**changes))
    check_settings(config())


@pytest.mark.feature("KV connectors without block hashes (refused)", "steer", "capture")
def test_rejects_connectors_without_block_hashes() -> None:
    """Catches a KV store that returns edited keys and values to a plain request."""
    for name in ("ExampleConnector", "LMCacheConnectorV1", "HF3FSKVConnector", "MultiConnector", None):
        found = config()
        found.kv_transfer_config = N(kv_connector=name)
        with pytest.raises(
            IncompatibleError, match=f"the connector {name}: .* use MooncakeStoreConnector or OffloadingConnector"
        ):
            check_settings(found)
    for name in CONNECTORS_BY_BLOCK_HASH:
        found.kv_transfer_config = N(kv_connector=name)
        check_settings(found)


@pytest.mark.feature("vLLM's front end in Rust (refused)", "steer", "capture")
def test_rejects_the_rust_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a front end that ignores the steering fields."""
    envs.disable_envs_cache()  # an engine in this process has cached all variables
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(IncompatibleError, match="Rust"):
        check_settings(config())


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.32.0", "dev", ""])
def test_rejects_an_untested_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run on a vLLM that changed what we use, and a message without the place or the override."""
    changed = VersionCheck(version, "0.32.0", 9, ("Scheduler.schedule in vllm/v1/core/sched/scheduler.py",))
    monkeypatch.setattr("vllm_steer.compat.version.compare_installed", lambda version: changed)
    monkeypatch.delenv(OVERRIDE, raising=False)
    with pytest.raises(IncompatibleError, match=f"{TESTED_RANGE}.*1 of the 9.*sched/scheduler.py.*{OVERRIDE}"):
        check_version(version)
    monkeypatch.setenv(OVERRIDE, "1")
    assert check_version(version) is changed


def test_starts_an_untested_version_in_which_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a patch release that is refused, and one that starts without a word."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    # The installed source under another name: every seam is as recorded.
    check = check_version("0.99.0")
    assert check is not None
    assert check.unchanged
    assert re.search(r"0\.99\.0 is not tested; all \d+ parts .* as in " + installed_version(), str(check))


def test_an_unreadable_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a vLLM without Python source that counts as unchanged."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr("vllm_steer.compat.version.compare_installed", lambda v: VersionCheck(v, problem="no source"))
    with pytest.raises(IncompatibleError, match="could not be compared \\(no source\\)"):
        check_version("0.99.0")


def test_names_the_changed_function_and_file() -> None:
    """Catches a comparison that misses a changed seam, or names it without its file."""
    source = installed_source()
    path = "vllm/v1/core/sched/scheduler.py"
    files = {"vllm/__init__.py": "", path: "class Scheduler:\n    def schedule(self):\n        return None\n"}
    check = compare_with_tested(SourceTree(files, "0.99.0"), "0.99.0")
    assert f"Scheduler.schedule in {path}" in check.changed
    assert len(check.changed) > 100
    assert compare_with_tested(source, "0.99.0").changed == ()


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1.dev3"])
def test_accepts_the_tested_range(version: str) -> None:
    """Catches a guard that rejects patch releases or local version labels."""
    assert check_version(version) is None
