# SPDX-License-Identifier: Apache-2.0
"""The version guard and the conflicting settings, each with its sentence."""

from __future__ import annotations

from types import SimpleNamespace as N
from typing import Any

import pytest

from vllm_steer.compat import version


def config(**changes: Any) -> Any:
    """The parts of a VllmConfig that the table looks at, harmless unless changed; ``parallel__x`` names a part."""
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
    )
    for name, value in changes.items():
        part, field = name.split("__")
        setattr(getattr(made, f"{part}_config"), field, value)
    return made


@pytest.mark.feature(
    "micro-batching, context parallelism, fast prefill, elastic experts, pooling (refused)", "steer", "capture"
)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel__use_ubatching": True}, "enable-dbo"),
        ({"parallel__prefill_context_parallel_size": 2}, "prefill-context-parallel"),
        ({"cache__kv_sharing_fast_prefill": True}, "kv-sharing-fast-prefill"),
        ({"model__runner_type": "pooling"}, "pooling"),
        ({"parallel__use_sequence_parallel_moe": True}, "sequence-parallel"),
        ({"parallel__distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"parallel__enable_elastic_ep": True}, "enable-elastic-ep"),
        ({"model__is_diffusion": True}, "diffusion"),
        ({"speculative__enable_adaptive_verification": True}, "adaptive_verification"),
    ],
)
def test_each_conflict_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    """Catches a setting under which taps would silently take the wrong tokens."""
    with pytest.raises(version.IncompatibleError, match=said):
        version.check_settings(config(**changes))
    version.check_settings(config())


@pytest.mark.feature("KV connectors that go by tokens or by request (refused)", "steer", "capture")
def test_connectors_that_find_blocks_by_tokens_are_refused() -> None:
    """Catches keys and values computed under an edit that come back for a plain request from another store."""
    for name in ("ExampleConnector", "LMCacheConnectorV1", "HF3FSKVConnector", "MultiConnector", None):
        found = config()
        found.kv_transfer_config = N(kv_connector=name)
        with pytest.raises(version.IncompatibleError, match="OffloadingConnector"):
            version.check_settings(found)
    for name in version.CONNECTORS_BY_BLOCK_HASH:
        found.kv_transfer_config = N(kv_connector=name)
        version.check_settings(found)


@pytest.mark.feature("vLLM's front end in Rust (refused)", "steer", "capture")
def test_the_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(version.IncompatibleError, match="Rust"):
        version.check_settings(config())


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev", ""])
def test_an_untested_vllm_is_refused_with_range_and_override(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a silent run on a vLLM whose internals have moved."""
    monkeypatch.delenv(version.OVERRIDE, raising=False)
    with pytest.raises(version.IncompatibleError, match=f"{version.TESTED_RANGE}.*{version.OVERRIDE}"):
        version.check_version(version)
    monkeypatch.setenv(version.OVERRIDE, "1")
    version.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1.dev3"])
def test_the_tested_range_passes(version: str) -> None:
    version.check_version(version)
