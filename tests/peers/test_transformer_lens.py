# SPDX-License-Identifier: Apache-2.0
"""The interface of TransformerLens, compared with HF Transformers on the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.peers.conftest import hidden_states, hooked, logits_of
from vllm_steer import Edit, SteeringError
from vllm_steer.peers.transformer_lens import (
    ActivationCache,
    HookedTransformer,
    SteeringDriver,
    TransformerBridge,
    get_act_name,
)
from vllm_steer.peers.transformer_lens.cache import HOOKS, hook_name
from vllm_steer.site_names import site


@pytest.mark.parametrize("point", HOOKS)
def test_names_are_read_back(point: Any) -> None:
    """Catches a name that means another point to the parser."""
    assert site(hook_name(point, 3)) == (point, 3)
    assert get_act_name(HOOKS[point], 3) == hook_name(point, 3)


def test_a_cache_has_one_tensor_per_site() -> None:
    """Catches negative layers off by one, and names that are found without being cached."""
    cache = ActivationCache({f"blocks.{i}.hook_resid_post": torch.full((1, 2, 3), float(i)) for i in range(3)}, 3)
    assert cache["resid_post", -1] is cache["blocks.2.hook_resid_post"] is cache["layers_output[2]"]
    assert cache.stack_activation("resid_post").shape == (3, 1, 2, 3)
    assert cache.stack_activation("resid_post", 2)[:, 0, 0, 0].tolist() == [0.0, 1.0]
    assert cache.remove_batch_dim()["resid_post", 1].shape == (2, 3)
    assert "blocks.1.hook_resid_pre" not in cache
    for key in (("resid_post", 3), "blocks.1.hook_mlp_out", "nonsense", ("nonsense", 1)):
        with pytest.raises(KeyError):
            cache[key]


@pytest.fixture(scope="module")
def model(engine: Any) -> HookedTransformer:
    return HookedTransformer(engine)


@pytest.mark.slow
def test_run_with_cache(model: HookedTransformer, hf: Any) -> None:
    """Catches rows of another hook or prompt, and log-probabilities of another token."""
    prompts = ["the cat", "the dog"]
    logits, cache = model.run_with_cache(prompts)
    assert len(cache) == len(model.hook_names) == 4 * len(HOOKS)
    for i, prompt in enumerate(prompts):
        tokens = model.to_tokens(prompt)
        states = hidden_states(hf, tokens[0].tolist())
        for layer in range(4):
            torch.testing.assert_close(cache["resid_pre", layer][i], states[layer], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(cache["resid_post", 1][i], states[2], atol=1e-3, rtol=1e-3)
        middle = cache["resid_pre", 1] + cache["attn_out", 1]
        torch.testing.assert_close(cache["resid_mid", 1], middle, atol=1e-3, rtol=1e-3)
        expected = logits_of(hf, tokens)[0, -1].log_softmax(-1)
        assert logits is not None
        torch.testing.assert_close(logits[i, 0], expected, atol=1e-2, rtol=1e-3)


@pytest.mark.slow
def test_the_readme_of_transformer_lens(engine: Any) -> None:
    """Catches ways to load a model that fail or accept weights that are changed, and arguments without a reason."""
    bridge = TransformerBridge.boot_transformers(engine, device="cpu", fold_ln=False)
    logits, activations = bridge.run_with_cache("Hello World")
    assert logits is not None
    assert logits.shape == (1, 1, bridge.cfg.d_vocab)
    assert len(activations) == len(bridge.hook_names)
    for name, value in (("fold_ln", True), ("device", "cuda"), ("hf_model", bridge), ("seed", 1)):
        with pytest.raises(SteeringError) as caught:
            HookedTransformer.from_pretrained(engine, **{name: value})
        assert caught.value.field == name
    for call in (
        lambda: bridge.run_with_cache("one", incl_bwd=True),
        lambda: bridge.run_with_hooks("one", bwd_hooks=[(HALVED, print)]),
    ):
        with pytest.raises(SteeringError, match="no backward pass"):
            call()


@pytest.mark.slow
def test_filters_and_edits(model: HookedTransformer, hf: Any) -> None:
    """Catches filters without effect, and edits that the cache does not show."""
    edit = Edit(kind="add", point="blocks.1.hook_resid_post", vector=torch.ones(64), tokens=[-1])
    names = ["blocks.1.hook_resid_post", "layers_output[2]"]
    logits, cache = model.run_with_cache("one", names_filter=names, return_type=None, edits=[edit])
    assert (logits, list(cache)) == (None, ["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"])
    state = hidden_states(hf, model.to_tokens("one")[0].tolist())[2]
    torch.testing.assert_close(cache["resid_post", 1][0, -1], state[-1] + 1, atol=1e-3, rtol=1e-3)
    for filter_ in (lambda name: False, "blocks.9.hook_resid_post", "blocks.1.attn.hook_q"):
        with pytest.raises(SteeringError):
            model.run_with_cache("one", names_filter=filter_)
    with pytest.raises(SteeringError, match="different numbers of tokens"):
        model.run_with_cache(["a", "bb"])
    with pytest.raises(SteeringError, match="run_with_edits"):
        model.add_hook("blocks.1.hook_resid_post", print)


HALVED = "blocks.1.hook_resid_post"


def in_hf(hf: Any, tokens: torch.Tensor, layer: int, change: Any) -> torch.Tensor:
    """Return HF's log-probabilities ``[batch, tokens, vocab]`` with changed outputs of a layer."""
    with hooked(hf.model.layers[layer], change):
        return logits_of(hf, tokens).log_softmax(-1)


@pytest.mark.slow
def test_functions_run_at_hooks(model: HookedTransformer, hf: Any) -> None:
    """Catches functions at another hook, rows of several prompts, and errors that are not raised."""
    tokens = torch.tensor([[5, 9, 17, 33], [8, 3, 21, 60]])
    seen = []

    def mix(rows: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append((hook.name, hook.layer(), tuple(rows.shape)))
        rows = rows.clone()
        rows[:, 2] = rows[:, 0] - rows[:, 1]
        return rows

    def halve(rows: torch.Tensor, hook: Any) -> None:
        rows[:, 1] *= 0.5

    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = mix(rows, SimpleNamespace(name="", layer=lambda: 0))
        halve(rows, None)
        return rows

    found = model.run_with_hooks(tokens, fwd_hooks=[("resid_post.1", mix), (lambda name: name == HALVED, halve)])
    assert seen == [(HALVED, 1, (1, 4, 64))] * 2
    torch.testing.assert_close(found[:, 0], in_hf(hf, tokens, 1, change)[:, -1], atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(
        model(tokens)[:, 0], in_hf(hf, tokens, 1, lambda rows: rows)[:, -1], atol=5e-3, rtol=1e-3
    )
    with pytest.raises(RuntimeError, match=r"prompts.0.: steering: the user hook .* IndexError"):
        model.run_with_hooks(tokens, fwd_hooks=[(HALVED, lambda rows, hook: rows[:, 9])])


@pytest.mark.slow
def test_the_driver_of_transformer_lens_4(engine: Any, hf: Any) -> None:
    """Catches an operation at other positions, logits of shifted tokens, and rows of another prompt of the batch."""
    config = SimpleNamespace(n_layers=4, d_model=64, architecture="LlamaForCausalLM")
    tokens = torch.tensor([[5, 9, 17, 33], [8, 3, 21, 60]])
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    driver, full = SteeringDriver(engine, config), SteeringDriver(engine, config, sequence_logits=True)
    name, factors = "blocks.1.hook_resid_post", torch.tensor([1.0, 0.5, 1.0, 0.5])[None, :, None]
    for spec, change in (
        ({"op": "suppress", "pos": 2}, lambda rows: rows * torch.tensor([1.0, 1.0, 0.0, 1.0])[None, :, None]),
        ({"op": "scale", "factor": 0.5, "pos": [1, -1]}, lambda rows: rows * factors),
        ({"op": "add", "value": vector}, lambda rows: rows + vector),
        ({"op": "set", "value": 0.25}, lambda rows: torch.full_like(rows, 0.25)),
    ):
        right = in_hf(hf, tokens, 1, change)
        result = full.forward(tokens, capture=(name, "blocks.0.hook_attn_out"), intervene={name: spec})
        torch.testing.assert_close(result.logits, right, atol=5e-3, rtol=1e-3)
        assert result.captured["blocks.0.hook_attn_out"].shape == (2, 4, 64)
        state = torch.stack([hidden_states(hf, row.tolist())[2] for row in tokens])
        torch.testing.assert_close(result.captured[name], change(state), atol=1e-3, rtol=1e-3)
        last = driver.forward(tokens, intervene={name: spec}, max_new_tokens=2, output_attentions=True)
        torch.testing.assert_close(last.logits[:, -1], right[:, -1], atol=5e-3, rtol=1e-3)
        assert torch.isinf(last.logits[:, :-1]).all()
        assert last.new_tokens.shape == (2, 2)
    refused: list[dict[str, Any]] = [
        {"intervene": {name: lambda rows: rows}},
        {"intervene": {name: {"op": "add", "value": vector, "scale": 2}}},
        {"intervene": {name: {"op": "add", "value": vector[:3]}}},
        {"intervene": {name: {"op": "add", "value": 1.0, "pos": "last"}}},
        {"intervene": {"blocks.1.attn.hook_q": {"op": "suppress"}}},
        {"capture": ("hook_embed",)},
        {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
        {"past_key_values": 1},
    ]
    for arguments in refused:
        with pytest.raises(SteeringError):
            driver.forward(tokens, **arguments)
    with pytest.raises(SteeringError, match="n_layers=5"):
        SteeringDriver(engine, SimpleNamespace(n_layers=5))
