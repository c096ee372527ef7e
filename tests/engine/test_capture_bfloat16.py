# SPDX-License-Identifier: Apache-2.0
"""Captured rows of a bfloat16 model against HF Transformers, within a bound that separates neighbouring rows.

And what captures and readouts return at an edited site is what the next layer reads, whatever was rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conformance.engine import MODES
from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import capture, result
from tests.engine.conftest import opened
from tests.tiny import BF16_BOUND, BF16_MODEL, LAYERS, save_tiny_llama
from vllm_steer import Edit

POINTS = ("pre_attn", "post_attn", "post_block")
Streams = dict[tuple[str, int], torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("bfloat16"), **BF16_MODEL)


@pytest.fixture(scope="module")
def captured(model: Path) -> Iterator[list[tuple[Any, list[int]]]]:
    """Return each request's capture result and its forwarded tokens."""
    with opened(model, dtype="bfloat16", max_num_batched_tokens=64, max_num_seqs=8) as llm:
        rng = np.random.default_rng(0)
        prompts = [prompt(*rng.integers(1, BF16_MODEL["vocab_size"], n).tolist()) for n in (5, 90, 33, 60)]
        outputs = run(llm, prompts, [params(12, logprobs=None, capture=capture())] * 4)
        found = [
            (result(output), [*each["prompt_token_ids"], *tokens_of(output)][:-1])
            for output, each in zip(outputs, prompts, strict=True)
        ]
        yield found


@pytest.fixture(scope="module")
def streams(model: Path, captured: list[tuple[Any, list[int]]]) -> list[Streams]:
    """Return HF's bfloat16 stream at every point and layer, ``[tokens, hidden]``."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    seen: Streams = {}
    for number, layer in enumerate(reference.model.layers):
        layer.register_forward_hook(
            lambda _, given, out, number=number: seen.update(
                {("pre_attn", number): given[0][0], ("post_block", number): (out[0] if isinstance(out, tuple) else out)}
            )
        )
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, given, number=number: seen.update({("post_attn", number): given[0][0]})
        )
    all_streams = []
    for _, tokens in captured:
        with torch.inference_mode():
            reference(torch.tensor([tokens]), use_cache=False)
        all_streams.append({site: rows.reshape(len(tokens), -1).float() for site, rows in seen.items()})
    return all_streams


def distance(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of each row from the expected one, ``[tokens]``."""
    return (rows.float() - right).norm(dim=1) / right.norm(dim=1)


def test_rows_match_hf_within_the_bound(captured: list[tuple[Any, list[int]]], streams: list[Streams]) -> None:
    """Catches a row of another token, layer or point, and rows that were rounded twice."""
    worst = 0.0
    for (rows, tokens), right in zip(captured, streams, strict=True):
        assert len(rows.sites) == len(POINTS) * LAYERS
        for site in rows.sites:
            assert rows.tensor(*site).dtype == torch.bfloat16
            assert rows.positions(*site).tolist() == list(range(len(tokens)))
            worst = max(worst, float(distance(rows.tensor(*site), right[site]).max()))
    assert worst < BF16_BOUND, worst


def test_neighbouring_rows_exceed_the_bound(captured: list[tuple[Any, list[int]]], streams: list[Streams]) -> None:
    """Negative control: rows of the next token, point and layer are outside of the bound."""
    for (rows, _), right in zip(captured, streams, strict=True):
        for point, layer in rows.sites:
            found = rows.tensor(point, layer)
            others = [right[other, layer] for other in POINTS if other != point]
            others += [right[point, other] for other in range(LAYERS) if other != layer]
            assert min(float(distance(found, other).median()) for other in others) > 2 * BF16_BOUND
            assert float(distance(found[1:], right[point, layer][:-1]).min()) > 2 * BF16_BOUND


LARGE = 1000.0
"""Factor of an MLP's output, like that of the few components of a real model's first token."""


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_an_edited_site_reports_what_the_next_layer_reads(tmp_path: Path, mode: str) -> None:
    """Catches rows and readouts from before the model rounds the sum of two summands, and edits that it rounds away."""
    folder, hidden = save_tiny_llama(tmp_path, **BF16_MODEL), BF16_MODEL["hidden_size"]
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= LARGE
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    vector = np.random.default_rng(3).standard_normal(hidden).astype("f4")
    site: dict[str, Any] = {"point": "post_block", "layers": 1}
    edits: list[Any] = [
        [Edit(kind="replace", vector=vector, **site)],
        [Edit(kind="clamp", vector=vector, low=5.0, high=5.0, **site)],
        [
            Edit(kind="add", vector=vector, strength=2.0, **site),
            Edit(kind="clamp", vector=vector, low=5.0, high=5.0, **site),
        ],
        None,
    ]
    sites = (("post_block", 1), ("pre_attn", 2))
    readouts = {point: {"probe": vector, "point": point, "layer": layer, "positions": "all"} for point, layer in sites}
    spec = {"memory": {"hooks": {point: [layer] for point, layer in sites}, "positions": "all"}}
    options: Any = {} if mode == "eager" else {"enforce_eager": False, **MODES["traced"]}
    with opened(folder, dtype="bfloat16", **options) as llm:
        prompts = [prompt(*range(3, 12))] * len(edits)
        fields: dict[str, Any] = {"logprobs": None, "readouts": readouts, "capture": spec}
        outputs = run(llm, prompts, [params(4, steering=each, **fields) for each in edits])
    for output in outputs:
        here, there = (result(output).tensor(*each) for each in sites)
        assert torch.equal(here, there)
        values = [output.outputs[0].readouts[point].values for point, _ in sites]
        np.testing.assert_array_equal(*values)
        products = there.float().numpy().astype("f8") @ vector
        np.testing.assert_allclose(values[0].reshape(-1), products, rtol=1e-5, atol=1e-2)
    assert torch.equal(result(outputs[0]).tensor(*sites[1]), torch.from_numpy(vector).bfloat16().expand(12, hidden))
    # Negative control: the plain stream is so long that rounding it matters.
    assert float(result(outputs[3]).tensor(*sites[0]).float().norm(dim=1).min()) > 100 * np.linalg.norm(vector)
