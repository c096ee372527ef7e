# SPDX-License-Identifier: Apache-2.0
"""Tests of LoRA adapters beside steering and capture in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import save_adapter
from tests.engine import hf
from tests.engine.answers import logprobs_of, params, prompt, tokens_of
from tests.engine.captures import capture, close_to, result
from tests.engine.conftest import opened
from tests.engine.record_cases import check_consistent, reacting
from tests.tiny import HIDDEN, LAYERS, VOCAB, direction

RANK, ALPHA = 8, 16
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, 128), "mlp.down_proj": (128, HIDDEN),
}  # fmt: skip
ADAPTERS = (None, "first", "second")
EDITED = 1
EDITS = (None, {"post_attn": {EDITED: direction(1)}}, {"post_attn": {EDITED: direction(2)}})


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(folder / name, seed, WIDTHS, RANK, ALPHA, layers=LAYERS, scale=0.3)
        for seed, name in enumerate(ADAPTERS) if name
    }  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama, enable_lora=True, max_loras=2, max_lora_rank=RANK, max_num_seqs=16) as engine:
        yield engine


def ask(llm: Any, adapters: dict[str, Path], requests: list[tuple[Any, str | None, Any]]) -> list[Any]:
    """Run ``(prompt, adapter, parameters)`` of each request in one batch."""
    from vllm.lora.request import LoRARequest

    loras = [
        None if name is None else LoRARequest(name, ADAPTERS.index(name), str(adapters[name]))
        for _, name, _ in requests
    ]
    outputs: list[Any] = llm.generate(
        [p for p, _, _ in requests], [wanted for _, _, wanted in requests], lora_request=loras, use_tqdm=False
    )
    return outputs


@pytest.fixture(scope="module")
def batch(llm: Any, adapters: dict[str, Path]) -> tuple[list[tuple[Any, str | None, Any]], list[Any]]:
    """Return requests with every combination of adapter and edit, all with captures."""
    requests = [
        (prompt(*range(10 + i, 30 + i)), adapter, params(capture=capture(), steering_vectors=edit))
        for i, (adapter, edit) in enumerate((adapter, edit) for adapter in ADAPTERS for edit in EDITS)
    ]
    return requests, ask(llm, adapters, requests)


@pytest.mark.feature("LoRA", "steer", "capture")
def test_batched_requests_match_requests_alone(llm: Any, adapters: dict[str, Path], batch: Any) -> None:
    """Catches rows or adapters that are mixed up between requests of a batch."""
    for i, (request, got) in enumerate(zip(*batch, strict=True)):
        alone = ask(llm, adapters, [request])[0]
        assert tokens_of(got) == tokens_of(alone), i
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(alone), atol=1e-3, err_msg=str(i))
        close_to(result(got), result(alone), i)


@pytest.mark.feature("LoRA", "steer", "capture")
def test_matches_merged_weights(tiny_llama: Path, adapters: dict[str, Path], batch: Any) -> None:
    """Catches an edit on the wrong side of an adapter's addition, and a batch without adapters."""
    for adapter in ADAPTERS:
        model = hf.load(tiny_llama)
        if adapter is not None:
            _merge(model, load_file(adapters[adapter] / "adapter_model.safetensors"))
        for i, got in enumerate(batch[1]):
            if batch[0][i][1] == adapter:
                edit = EDITS[i % len(EDITS)]
                hf.agrees(got, model, EDITED, None if edit is None else edit["post_attn"][EDITED])


def _merge(model: Any, adapter: dict[str, torch.Tensor]) -> None:
    for name, weight in adapter.items():
        if ".lora_A." in name:
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight.data += ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ weight


@pytest.mark.feature("LoRA", "steer")
def test_cache_keys_include_adapters_and_edits(llm: Any, adapters: dict[str, Path]) -> None:
    """Catches KV of one adapter or edit served to a request with another."""
    cached = _cached_tokens(llm, adapters, first_token=1)
    # The first request of each combination computes. Requests with an equal adapter and edit hit its cache.
    assert cached[:9] == [0] * 9
    assert min(cached[9:]) >= 256


@pytest.mark.feature("LoRA", "steer")
def test_vllm_keys_alone_ignore_edits(llm: Any, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: vLLM's keys separate adapters only."""
    monkeypatch.setattr("vllm_steer.engine.scheduler.steering_hasher", lambda upstream, *rest: upstream)
    cached = _cached_tokens(llm, adapters, first_token=2)
    assert [hit > 0 for hit in cached[:9]] == [False, True, True] * 3


def _cached_tokens(llm: Any, adapters: dict[str, Path], first_token: int) -> list[int]:
    """Return the cached prompt tokens of all combinations, run twice in sequence."""
    p = prompt(first_token, *np.random.default_rng(8).integers(1, VOCAB, 299).tolist())
    combinations = [(p, adapter, params(1, steering_vectors=edit)) for adapter in ADAPTERS for edit in EDITS]
    return [ask(llm, adapters, [request])[0].num_cached_tokens for request in combinations * 2]


@pytest.mark.feature("LoRA", "react")
def test_gates_and_stops_of_adapters(llm: Any, adapters: dict[str, Path]) -> None:
    """Catches a gate that reads another request's adapter, and state that requests share."""
    requests = [
        (prompt(*range(10 + i, 30 + i)), ADAPTERS[i % 3], params(16, logprobs=None, **reacting())) for i in range(6)
    ]
    outputs = ask(llm, adapters, requests)
    for i, output in enumerate(outputs):
        check_consistent(output.outputs[0], 20)
        (alone,) = ask(llm, adapters, [requests[i]])
        assert tokens_of(output) == tokens_of(alone), i
        np.testing.assert_array_equal(output.outputs[0].steering_trace.gates, alone.outputs[0].steering_trace.gates)
