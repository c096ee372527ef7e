# SPDX-License-Identifier: Apache-2.0
"""Activation oracles offline: LoRA adapters with injected rows in one batch; the examples of the page on vllm-lens."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.runner import blocks_of
from tests.engine.conftest import close
from tests.peers.adapters import merged
from tests.peers.conftest import steered_states
from tests.peers.test_vllm_lens import injecting
from vllm_steer.peers import vllm_lens
from vllm_steer.peers.vllm_lens import LLM, offline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[Any]:
    # One slot more than there are adapters: see tests/engine/test_lora.py.
    llm = LLM(
        str(model_path), enforce_eager=True, dtype="float32", max_model_len=128, max_num_seqs=16,
        max_num_batched_tokens=16, enable_lora=True, max_loras=3, max_lora_rank=8, seed=0,
    )  # fmt: skip
    yield llm
    close(llm)


def test_oracles_in_one_batch(llm: Any, adapters: dict[str, Path], model_path: Path) -> None:
    """Catches an adapter or injected rows of another request, and positions that count from a chunk of the prefill."""
    from vllm.lora.request import LoRARequest

    prompt, positions = "what do ? ? mean, and what does ? mean here?", [8, 10, 32]
    rows = torch.randn(4, 1, 3, 64, generator=torch.Generator().manual_seed(3))
    names = ["oracle", "other", None, "oracle"]
    params = [injecting(each, positions, [0, 1, 2]) for each in rows]
    loras = [name and LoRARequest(name, 1 + list(adapters).index(name), str(adapters[name])) for name in names]
    outputs = llm.generate([prompt] * 4, params, lora_request=loras, use_tqdm=False)
    for name, each, output in zip(names, rows, outputs, strict=True):
        hf = merged(model_path, None if name is None else adapters[name])
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        states = steered_states(hf, tokens, 1, dict(zip(positions, each[0], strict=True)), norm_match=True)
        found = output.activations["residual_stream"]
        torch.testing.assert_close(found, torch.stack(states[1:4]), atol=1e-3, rtol=1e-3)


def test_the_page_runs(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches examples of docs/peers/vllm-lens.md that no longer run, or show another shape."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.code for block in blocks_of("docs/peers/vllm-lens.md", "python")))
    monkeypatch.setattr(offline, "LLM", lambda model: llm)
    shown = runpy.run_path(str(script))
    assert vllm_lens.LLM is not LLM
    assert shown["stream"].shape == (2, len("Once upon a time") + 3, 64)
    assert shown["answer"]
