# SPDX-License-Identifier: Apache-2.0
"""The interface of nnterp, compared with HF Transformers on the same weights."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tests.peers.conftest import hidden_states, hooked, logits_of, outputs_of, replaced, steered_states
from vllm_steer import SteeringError
from vllm_steer.peers.nnterp import (
    Prompt,
    StandardizedTransformer,
    TargetPrompt,
    collect_token_activations_batched,
    logit_lens,
    patchscope_generate,
    patchscope_lens,
    repeat_prompt,
    run_prompts,
)

PROMPTS = ["one", "two and three", "a long prompt about nothing"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(engine: Any) -> StandardizedTransformer:
    return StandardizedTransformer(engine)


def patched_logits(hf: Any, tokens: list[int], layer: int, position: int, row: torch.Tensor) -> torch.Tensor:
    """Return HF's last logits with one row of a layer's output replaced."""
    with hooked(hf.model.layers[layer], replaced(position, row)):
        return logits_of(hf, [tokens])[0, -1]


def lens_of(hf: Any, row: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of HF's final norm and head."""
    with torch.no_grad():
        return hf.lm_head(hf.model.norm(row)).softmax(-1)


def last_outputs(hf: Any, tokens: list[int]) -> torch.Tensor:
    """Return the output of each layer at the last token, ``[layers, hidden]``."""
    return torch.stack([rows[-1] for rows in outputs_of(hf, tokens, hf.model.layers)])


def test_facts(model: StandardizedTransformer, hf: Any) -> None:
    """Catches sizes of something else."""
    sizes = model.num_layers, model.hidden_size, model.vocab_size
    assert sizes == (hf.config.num_hidden_layers, hf.config.hidden_size, hf.config.vocab_size)


def test_outputs_of_attention_and_mlp(model: StandardizedTransformer, hf: Any) -> None:
    """Catches rows of another module, and a refusal in models without a norm behind attention and MLP."""
    tokens, block = model.encode(PROMPTS[1]), hf.model.layers[2]
    with model.trace(tokens):
        rows = [model.attentions_output[2].save(), model.mlps_output[2].save()]
    for found, expected in zip(rows, outputs_of(hf, tokens, (block.self_attn, block.mlp)), strict=True):
        torch.testing.assert_close(found.value[0], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("idx", [None, 0, 2, -2])
def test_activations_of_one_token(model: StandardizedTransformer, hf: Any, idx: int | None) -> None:
    """Catches positions shifted by padding, and layers in another order than given."""
    rows = model.get_token_activations(PROMPTS, layers=[2, 0], idx=idx)
    assert rows.shape == (2, len(PROMPTS), 64)
    for i, prompt in enumerate(PROMPTS):
        states = hidden_states(hf, model.encode(prompt))
        position = -1 if idx is None else idx
        torch.testing.assert_close(rows[0, i], states[3][position], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(rows[1, i], states[1][position], atol=1e-3, rtol=1e-3)
    batched = collect_token_activations_batched(model, PROMPTS, 2, layers=[2, 0], idx=idx)
    torch.testing.assert_close(batched, rows, atol=1e-3, rtol=1e-3)


def test_the_logit_lens(model: StandardizedTransformer, hf: Any) -> None:
    """Catches a lens without the final norm, and swapped axes."""
    found = logit_lens(model, PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        expected = lens_of(hf, last_outputs(hf, model.encode(prompt)))
        torch.testing.assert_close(found[i], expected, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(found[:, -1], model.next_token_probs(PROMPTS), atol=1e-3, rtol=1e-2)
    row = last_outputs(hf, model.encode(PROMPTS[0]))[1]
    closest = model.get_topk_closest_tokens(row, k=3)
    top = lens_of(hf, row).topk(3)
    assert list(closest) == model.tokenizer.convert_ids_to_tokens(top.indices.tolist())
    assert list(closest.values()) == pytest.approx(top.values.tolist(), abs=1e-3)


def test_patchscopes(model: StandardizedTransformer, hf: Any) -> None:
    """Catches a row at another token or layer, and latents indexed by the layer's number."""
    target, layers = TargetPrompt("cat cat ? is", -4), [2, 1]
    tokens = model.encode(target.prompt)
    found = patchscope_lens(model, PROMPTS[:2], target, layers=layers)
    generated = patchscope_generate(model, PROMPTS[:2], target, max_length=2, layers=layers)
    for i, prompt in enumerate(PROMPTS[:2]):
        rows = last_outputs(hf, model.encode(prompt))
        for j, layer in enumerate(layers):
            logits = patched_logits(hf, tokens, layer, len(tokens) - 4, rows[layer])
            torch.testing.assert_close(found[i, j], logits.softmax(-1), atol=1e-3, rtol=1e-2)
            assert generated[layer][i, : len(tokens)].tolist() == tokens
            assert generated[layer][i, len(tokens)] == logits.argmax()
    latents = model.get_token_activations(PROMPTS[:2], layers)
    again = patchscope_lens(model, None, [target, target], layers=layers, latents=latents)
    torch.testing.assert_close(again, found, atol=1e-3, rtol=1e-2)


def test_steering_within_a_context(model: StandardizedTransformer, hf: Any) -> None:
    """Catches steering that stays after its context, or reaches other positions."""
    vector, tokens = torch.randn(64, generator=torch.Generator().manual_seed(1)), model.encode(PROMPTS[1])
    plain = model.next_token_probs(PROMPTS[1])
    with model.steer(1, vector, factor=3.0, token_positions=-1):
        steered = model.next_token_probs(PROMPTS[1])
    row = last_outputs(hf, tokens)[1] + 3.0 * vector
    expected = patched_logits(hf, tokens, 1, len(tokens) - 1, row).softmax(-1)
    torch.testing.assert_close(steered[0], expected, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(model.next_token_probs(PROMPTS[1]), plain, atol=1e-4, rtol=1e-3)


def test_a_lens_of_steered_rows(model: StandardizedTransformer, hf: Any) -> None:
    """Catches edits of the steered prompt in the one-token prompts of the lens, which lack their positions."""
    vector, tokens = torch.randn(64, generator=torch.Generator().manual_seed(2)), model.encode(PROMPTS[1])
    for position in (-1, len(tokens) - 1):
        with model.steer(1, vector, factor=3.0, token_positions=position):
            found = logit_lens(model, PROMPTS[1])
        torch.testing.assert_close(
            found[0, 1], lens_of(hf, last_outputs(hf, tokens)[1] + 3.0 * vector), atol=1e-3, rtol=1e-2
        )


def test_run_prompts(model: StandardizedTransformer) -> None:
    """Catches targets of another prompt, and tokens of a target that are not added."""
    prompts = [Prompt(text, {"first": [1, 2], "second": [3]}) for text in PROMPTS]
    found = run_prompts(model, prompts, batch_size=2)
    probs = model.next_token_probs(PROMPTS)
    torch.testing.assert_close(found["first"][:, 0], probs[:, 1] + probs[:, 2], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found["second"][:, 0], probs[:, 3], atol=1e-4, rtol=1e-3)
    assert run_prompts(model, prompts[:1], get_probs_func=logit_lens)["first"].shape == (1, 4)


def test_prompts_from_strings(model: StandardizedTransformer) -> None:
    """Catches a word without its form after a space, and a space counted as a word's first token."""

    class Words:
        """A tokenizer with tokens for ``a``, ``b`` and `` a``."""

        tokens: ClassVar[dict[str, list[int]]] = {"a": [1], " a": [2], "b": [3, 4], " b": [9, 3, 4], " ": [9], "c": [5]}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return self.tokens.get(text, [5])

    prompt = Prompt.from_strings("one", {"first": "a", "both": ["a", "b"]}, Words())
    assert prompt.target_tokens == {"first": [1, 2], "both": [1, 2, 3]}
    assert list(Prompt.from_strings("one", "a", Words()).target_tokens) == ["target"]
    with pytest.raises(SteeringError, match="same first token"):
        Prompt.from_strings("one", "c", Words())
    (first,) = run_prompts(model, [Prompt.from_strings("one", "x", model)])["target"]
    assert 0 < float(first) < 1


def test_the_readme_of_nnterp(model: StandardizedTransformer, hf: Any) -> None:
    """Catches ``steer`` in a trace without effect or in every invoke, and logits of another token."""
    vector, tokens = torch.randn(64, generator=torch.Generator().manual_seed(3)), model.encode(PROMPTS[1])
    with model.trace(PROMPTS[1]):
        model.attentions_output[1]
        model.mlps_output[1].save()
        plain = model.logits.save()
    with model.trace() as tracer:
        with tracer.invoke(PROMPTS[1]):
            model.steer(layers=[1, 2], steering_vector=vector, factor=1.5)
            everywhere = model.layers_output[2].save()
        with tracer.invoke(PROMPTS[1]):
            model.steer(1, vector, token_positions=[0, -1])
            some = model.layers_output[1].save()
        with tracer.invoke(PROMPTS[1]):
            untouched = model.logits.save()
    logits = logits_of(hf, [tokens])[0, -1].log_softmax(-1)
    assert plain.value.shape == (1, 1, hf.config.vocab_size)
    torch.testing.assert_close(plain.value[0, -1], logits, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(untouched.value, plain.value, atol=1e-3, rtol=1e-3)
    placed = dict.fromkeys(range(len(tokens)), 1.5 * vector)
    torch.testing.assert_close(
        everywhere.value[0], steered_states(hf, tokens, 1, placed, norm_match=False)[3] + 1.5 * vector, atol=1e-3,
        rtol=1e-3,
    )  # fmt: skip
    placed = {0: vector, len(tokens) - 1: vector}
    torch.testing.assert_close(
        some.value[0], steered_states(hf, tokens, 1, placed, norm_match=False)[2], atol=1e-3, rtol=1e-3
    )
    with pytest.raises(SteeringError, match="batch_index"), model.trace("one"):
        model.steer(1, vector, batch_index=0)
    with pytest.raises(SteeringError, match="pass a list of TargetPrompt"):
        from vllm_steer.peers.nnterp import TargetPromptBatch  # noqa: F401
    with pytest.raises(SteeringError, match=r"within model\.trace"):
        model.logits.save()


def test_refusals(model: StandardizedTransformer) -> None:
    """Catches arguments that are accepted and ignored."""
    for call in (
        lambda: model.get_token_activations(PROMPTS, layers=[4]),
        lambda: model.get_token_activations(PROMPTS, idx=3),
        lambda: model.get_token_activations([]),
        lambda: patchscope_lens(model, None, repeat_prompt()),
        lambda: patchscope_lens(model, PROMPTS, [repeat_prompt()]),
        lambda: patchscope_lens(model, "one", TargetPrompt("a", 1)),
        lambda: model.skip_layer(1),
        lambda: model.project_on_vocab(torch.ones(3)),
    ):
        with pytest.raises(SteeringError):
            call()


def test_a_trace_reads_and_writes(model: StandardizedTransformer, hf: Any) -> None:
    """Catches writes at another token, of another invoke, or read before they are made."""
    tokens = model.encode(PROMPTS[1])
    with model.trace() as tracer:
        with tracer.invoke(PROMPTS[0]):
            clean = model.layers_output[1][:, -1].save()
        with tracer.invoke(PROMPTS[1]):
            model.layers_output[1][:, 2] = clean
            patched = model.next_token_probs.save()
            rows = model.layers_output[1].save()
        with tracer.invoke(PROMPTS[1]):
            model.layers_output[1][:, 2] *= 0.5
            model.layers_output[1][:, 2] += clean
            scaled = model.layers_output[1][:, 2].save()
    source, target = hidden_states(hf, model.encode(PROMPTS[0]))[2][-1], hidden_states(hf, tokens)[2][2]
    torch.testing.assert_close(clean.value[0], source, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(rows.value[0, 2], source, atol=1e-3, rtol=1e-3)
    assert rows.shape == (1, len(tokens), 64)
    expected = patched_logits(hf, tokens, 1, 2, source).softmax(-1)
    torch.testing.assert_close(patched.value[0], expected, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(scaled.value[0], 0.5 * target + source, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(torch.add(scaled, clean), scaled.value + clean.value)


def test_generation_is_traced(model: StandardizedTransformer, hf: Any) -> None:
    """Catches reads and writes of another step, and steps shifted by one."""
    vector = torch.randn(64, generator=torch.Generator().manual_seed(2))
    rows, probs = [], []
    with model.trace(PROMPTS[1], max_new_tokens=3) as tracer:
        for step in tracer.iter[:]:
            if step != 1:
                model.layers_output[1][:, -1] += 2.0 * vector
            rows.append(model.layers_output[1].save())
            probs.append(model.next_token_probs.save())
        tokens = tracer.result.save()
    whole, count = tokens.value[0], len(model.encode(PROMPTS[1]))
    assert len(whole) == count + 3
    pushed = torch.zeros(len(whole) - 1, 1)
    pushed[[count - 1, count + 1]] = 2.0
    outputs: list[torch.Tensor] = []

    def push(rows: torch.Tensor) -> torch.Tensor:
        changed = rows + pushed * vector
        outputs.append(changed[0])
        return changed

    with hooked(hf.model.layers[1], push):
        logits = logits_of(hf, whole[None, :-1])[0]
    expected = logits.softmax(-1)[count - 1 :]
    assert whole[count:].tolist() == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.cat([each.value for each in probs]), expected, atol=1e-3, rtol=1e-2)
    assert [each.shape for each in rows] == [(1, count, 64), (1, 1, 64), (1, 1, 64)]
    torch.testing.assert_close(torch.cat([each.value[0] for each in rows]), outputs[0], atol=1e-3, rtol=1e-3)


def test_what_cannot_be_compiled_is_refused_with_the_line(model: StandardizedTransformer) -> None:
    """Catches code of a trace that is ignored, and errors without its line."""
    vector = torch.ones(64)

    def computed() -> Any:
        return model.layers_output[1] * 2

    def within() -> None:
        model.layers_output[2][:, -1] = model.layers_output[1][:, -1]

    def part() -> None:
        model.layers_output[1][:, -1, :3] = vector[:3]

    def gradient() -> Any:
        return model.layers_output[1].grad

    for function, line in (
        (computed, "model.layers_output[1] * 2"),
        (within, "model.layers_output[2][:, -1] = model"),
        (part, "model.layers_output[1][:, -1, :3]"),
        (gradient, "model.layers_output[1].grad"),
    ):
        with pytest.raises(SteeringError) as caught, model.trace("one"):
            function()
        assert line in caught.value.problem
    with pytest.raises(SteeringError, match=r"line [0-9]+: .*tracer.iter\[1\]: the invoke has 1 steps"):  # noqa: SIM117
        with model.trace("one") as tracer:
            tracer.iter[1]
    with pytest.raises(SteeringError, match=r"line [0-9]+: .*a context has one step"):  # noqa: SIM117
        with model.trace("one", max_new_tokens=3) as tracer:
            with tracer.iter[:]:
                pass
    with pytest.raises(SteeringError, match="of the same invoke"):  # noqa: SIM117
        with model.trace("one", max_new_tokens=2) as tracer:
            first = model.layers_output[1][:, -1]
            with tracer.iter[1]:
                model.layers_output[1][:, -1] = first
    with pytest.raises(SteeringError, match=r"within model\.trace"):
        model.layers_output[1].save()
