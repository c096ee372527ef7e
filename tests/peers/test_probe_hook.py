# SPDX-License-Identifier: Apache-2.0
"""The interface of vllm-probe-hook: hidden states on outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from tests.peers.conftest import hidden_states, steered_states
from vllm_steer import SteeringError
from vllm_steer.capture.results import SiteRows
from vllm_steer.peers.probe_hook import LLM, AsyncLLM, SamplingParams
from vllm_steer.peers.probe_hook.engines import _Sample
from vllm_steer.peers.probe_hook.options import ProbeOptions, check_global_steering
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.snapshot import Snapshot
from vllm_steer.request import Selector

FLAGS = {
    "include_prefill": False, "include_decode": True, "last_prefill_token": False, "last_decode_token": False,
    "include_last": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "flags", "field"),
    [
        ([], {}, "layers"),
        (3, {}, "layers"),
        (["x"], {}, "layers"),
        ([1], {"include_prefill": 1}, "include_prefill"),
        ([1], {"include_decode": False}, "include_decode"),
        ([1], {"include_decode": False, "include_prefill": True, "include_last": True}, "include_last"),
    ],
)
def test_invalid_options_are_refused(layers: Any, flags: dict[str, Any], field: str) -> None:
    """Catches options that are accepted without effect."""
    with pytest.raises(SteeringError) as caught:
        ProbeOptions.read(layers, **FLAGS | flags)
    assert caught.value.field == field


def test_steered_parameters_need_the_capture() -> None:
    """Catches outputs without hidden states, or requests without their steering."""
    options = ProbeOptions.read(["all"], **FLAGS)
    steered = {"post_block": {1: [1.0] * 64}}
    with pytest.raises(SteeringError, match=r"capture=llm.capture"):
        options.params(SamplingParams(steering_vectors=steered))
    both = SamplingParams(steering_vectors=steered, capture=options.capture())
    assert options.params(both) is both
    with pytest.raises(SteeringError, match="request of its own"):
        ProbeOptions.read(["all"], **FLAGS | {"include_last": True}).params(both)


SITE = {"post_block": {1: [1.0] * 64}}


def globally(**content: Any) -> Snapshot:
    """Return the state of a registry with that global steering."""
    return Snapshot().with_steering((), parse_module(content), RegistryLimits())


def add(tokens: Any) -> dict[str, Any]:
    """Return an edit of some tokens."""
    return {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0] * 64, "tokens": tokens}


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ({"base": SITE}, None),
        ({"base": SITE, "edits": [add("all"), add([0, [5, None]])]}, None),
        ({"base": SITE, "prefill": SITE}, r"prefill\.post_block\[1\]"),
        ({"decode": SITE}, r"decode\.post_block\[1\]"),
        ({"edits": [add("all"), add("last_prompt")]}, r"edits\[1\]"),
        ({"edits": [add([0, -1])]}, r"edits\[0\]"),
        ({"edits": [add([[-1, None]])]}, r"edits\[0\]"),
        ({"edits": [add({"generated": [[0, 4]]})]}, r"edits\[0\]"),
    ],
)
def test_global_steering_covers_the_same_tokens_of_a_longer_prompt(content: Any, refused: str | None) -> None:
    """Catches a last row that is steered as a prompt token, and steering of all tokens that is refused."""
    snapshot = globally(**content)
    if refused is None:
        assert check_global_steering(snapshot) == snapshot.steering_digest is not None
        return
    with pytest.raises(SteeringError, match=rf"include_last: .*, where {refused} of global steering"):
        check_global_steering(snapshot)


@pytest.mark.parametrize(
    "tokens",
    ["all", "prompt", "generated", "last_prompt", [3], [[2, None]], [[0, 3], -1], [[0, -1]], [[0, 1], [5, None], -1]],
    ids=str,
)
def test_absolute_selectors(tokens: Any) -> None:
    """Catches a selector called absolute whose positions depend on the prompt, and the reverse."""
    selector = Selector(tokens)
    assert selector.is_absolute == (len({selector.intervals(length) for length in range(2, 20)}) == 1)


def test_deltas_are_joined() -> None:
    """Catches partial outputs with only the newest token or row."""

    class Delta:
        text, token_ids, logprobs = "a", (5,), None
        capture_rows: Any = None

    sample = _Sample()
    for position in (3, 4):
        delta = Delta()
        row = SiteRows(np.array([position]), torch.full((1, 2), float(position)))
        delta.capture_rows = {"memory": {("post_block", 1): row}}
        sample.add(delta)
        sample.complete(delta)
    assert (delta.text, list(delta.token_ids)) == ("aa", [5, 5])
    assert sample.sites["post_block", 1].positions.tolist() == [3, 4]
    assert sample.sites["post_block", 1].rows[:, 0].tolist() == [3.0, 4.0]


def test_log_probabilities_keep_their_class() -> None:
    """Catches ``FlatLogprobs`` joined to a list, and outputs whose log-probabilities later ones extend."""
    sample, outputs = _Sample(), []
    for token in (5, 6):
        flat = FlatLogprobs()
        flat.append_fast([token], [-1.0], iter([1]), ["a"])
        outputs.append(SimpleNamespace(text="a", token_ids=(token,), logprobs=flat, capture_rows=None))
        sample.add(outputs[-1])
        sample.complete(outputs[-1])
    assert [type(output.logprobs) for output in outputs] == [FlatLogprobs] * 2
    assert [output.logprobs.token_ids for output in outputs] == [[5], [5, 6]]


@pytest.mark.parametrize(
    "spec",
    [
        {"hooks": {"pre_attn": [1]}, "positions": "all"},
        {"hooks": {"post_block": [1, 2]}, "positions": "all"},
        {"hooks": {"post_block": [1]}, "positions": "last_prompt"},
        {"hooks": {"post_block": [1]}, "positions": "all", "reduce": "mean"},
    ],
)
def test_other_captures_are_refused(spec: dict[str, Any]) -> None:
    """Catches rows of another point, layer or token in ``hidden_states``."""
    options = ProbeOptions.read([1], **FLAGS | {"include_prefill": True})
    with pytest.raises(SteeringError, match="other rows than this engine returns"):
        options.params(SamplingParams(capture={"memory": spec}))


@pytest.mark.slow
def test_the_last_row_of_several_samples(engine: Any) -> None:
    """Catches adapters of prompts counted as those of samples, and an error of vLLM for samples of the full length."""
    llm = LLM(engine, layers=[1], include_last=True)
    params = SamplingParams(max_tokens=3, n=2, temperature=1.0, ignore_eos=True, seed=0)
    outputs = llm.generate(["one", "two"], params, lora_request=[None, None], use_tqdm=False)
    assert [len(sample.hidden_states[1]) for output in outputs for sample in output.outputs] == [3] * 4
    with pytest.raises(SteeringError, match=r"request .* has 128 tokens: lower max_tokens"):
        llm.generate("one", SamplingParams(max_tokens=125, temperature=0, ignore_eos=True), use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize("include_last", [False, True])
def test_hidden_states_are_those_of_hf(engine: Any, hf: Any, include_last: bool) -> None:
    """Catches rows of another layer, token or request of a mixed batch, and a last row that is not the last token's."""
    llm = LLM(engine, layers=[1, 3], include_prefill=True, include_last=include_last)
    params = [SamplingParams(max_tokens=count, temperature=0) for count in (1, 4, 6)]
    outputs = llm.generate(["one", "two and", "a longer prompt"], params, use_tqdm=False)
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        states = hidden_states(hf, prompt + tokens)
        rows = len(tokens) if include_last else len(tokens) - 1
        assert output.hidden is output.hidden_states
        assert output.prefill_hidden is output.prefill_hidden_states
        assert list(output.hidden_states) == [1, 3]
        # HF's last entry is after the final norm, so layer 3 is compared by shape.
        assert output.hidden_states[3].shape == output.hidden_states[1].shape == (rows, 64)
        torch.testing.assert_close(output.prefill_hidden_states[1], states[2][: len(prompt)], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(
            output.hidden_states[1], states[2][len(prompt) : len(prompt) + rows], atol=1e-3, rtol=1e-3
        )


@pytest.mark.slow
def test_the_last_row_has_the_global_steering(engine: Any, hf: Any) -> None:
    """Catches a last row without global steering, or with that of prompt tokens."""
    llm = LLM(engine, layers=[1], include_last=True)
    params = SamplingParams(max_tokens=4, temperature=0)
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    try:
        engine.steering.set(base={"post_block": {1: vector.tolist()}})
        output = llm.generate("one", params, use_tqdm=False)[0]
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        states = steered_states(hf, tokens, 1, dict.fromkeys(range(len(tokens)), vector), norm_match=False)[2]
        torch.testing.assert_close(output.hidden_states[1], states[-4:], atol=1e-3, rtol=1e-3)
        for tier in ("prefill", "decode"):
            engine.steering.set(**{tier: SITE}, replace=True)
            with pytest.raises(SteeringError, match=rf"include_last: .*{tier}\.post_block"):
                llm.generate("one", params, use_tqdm=False)
    finally:
        engine.steering.clear()


@pytest.mark.slow
def test_last_tokens_only(engine: Any, hf: Any) -> None:
    """Catches the first row in place of the last."""
    with pytest.raises(SteeringError, match="already runs"):
        LLM(engine, layers=[0], seed=1)
    llm = LLM(engine, layers=[0], last_prefill_token=True, last_decode_token=True)
    output = llm.generate("one", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
    states = hidden_states(hf, [*output.prompt_token_ids, *output.outputs[0].token_ids])[1]
    torch.testing.assert_close(output.prefill_hidden[0], states[2:3], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(output.hidden[0], states[5:6], atol=1e-3, rtol=1e-3)


class Deltas:
    """An engine that answers with two deltas, and with the row 9 to a request for the last token."""

    def __init__(self, final_only: bool, *steering: Any) -> None:
        self.final_only = final_only
        self.steering = SimpleNamespace()
        self.applied = [SimpleNamespace(global_steering=each) for each in steering] or [None, None]
        """Applied steering of the two requests."""
        self.asked: list[tuple[Any, str, dict[str, Any]]] = []
        self.started = 0
        self.model_config = SimpleNamespace(max_model_len=16)

    async def generate(self, prompt: Any, params: Any, request_id: str, **kwargs: Any) -> Any:
        self.started += 1
        if "-last-" in request_id:
            self.asked.append((prompt, request_id, kwargs))
            assert (params.max_tokens, params.output_kind) == (1, RequestOutputKind.FINAL_ONLY)
            last = {("post_block", 1): SiteRows(np.array([5]), torch.full((1, 2), 9.0))}
            result = SimpleNamespace(status="ok", error=None, sites=last)
            yield SimpleNamespace(
                capture_results={"memory": result}, steering_applied=self.applied[1], prompt_logprobs=None
            )
            return
        for position, reason in ((3, None), (4, "length")):
            row = {("post_block", 1): SiteRows(np.array([position]), torch.full((1, 2), float(position)))}
            result = SimpleNamespace(
                status="ok",
                error=None,
                sites={("post_block", 1): SiteRows(np.array([3, 4]), torch.tensor([[3.0, 3.0], [4.0, 4.0]]))},
            )
            completion = SimpleNamespace(
                index=0, text="a", token_ids=[7, 8] if self.final_only else [position + 4], logprobs=None,
                finish_reason=reason, capture_rows=None if self.final_only else {"memory": row},
                capture_results={"memory": result} if reason else None,
            )  # fmt: skip
            if reason or not self.final_only:
                yield SimpleNamespace(
                    prompt_token_ids=[1, 2, 3], outputs=[completion], steering_applied=self.applied[0],
                    prompt_logprobs=[] if reason and not self.final_only else [None, {}, {}],
                )  # fmt: skip


def probing(engine: Deltas, snapshot: Snapshot, *, include_last: bool = True) -> Any:
    """Return an ``AsyncLLM`` of an engine with that state of its registry."""

    async def current() -> Snapshot:
        return snapshot

    engine.steering.snapshot = current
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.engine = engine
    llm.options = ProbeOptions.read([1], **FLAGS | {"include_last": include_last})
    return llm


async def test_global_steering_of_both_requests() -> None:
    """Catches (1) a request sent although its last row would be wrong and (2) two requests with other steering."""
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    engine = Deltas(True)
    llm = probing(engine, globally(decode=SITE))
    with pytest.raises(SteeringError, match=r"include_last: .*decode\.post_block"):
        _ = [output async for output in llm.generate("one", params, "a")]
    assert engine.started == 0
    base = globally(base=SITE)
    digest = base.steering_digest
    for given in ((digest, digest), (digest, "other"), ("other", "other"), ()):
        llm = probing(Deltas(True, *given), base)
        if given == (digest, digest):
            assert len([output async for output in llm.generate("one", params, "a")]) == 1
        else:
            with pytest.raises(RuntimeError, match="global steering changed"):
                _ = [output async for output in llm.generate("one", params, "a")]


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize(
    ("kind", "values", "tokens"),
    [("CUMULATIVE", [[3], [3, 4]], [1, 2]), ("DELTA", [[3], [4]], [1, 1]), ("FINAL_ONLY", [[3, 4]], [2])],
)
async def test_partial_outputs_have_rows(kind: str, values: Any, tokens: list[int], include_last: bool) -> None:
    """Catches rows or prompt log-probabilities of one output only, and a last row of other tokens."""
    llm = probing(Deltas(kind == "FINAL_ONLY"), Snapshot(), include_last=include_last)
    params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind[kind])
    outputs = [output async for output in llm.generate("one", params, "a", priority=1)]
    if include_last:
        values = [*values[:-1], [*values[-1], 9]]
        assert llm.engine.asked == [({"prompt_token_ids": [1, 2, 3, 7, 8]}, "a-last-0", {"priority": 1})]
    else:
        assert llm.engine.asked == []
    assert [output.hidden_states[1][:, 0].tolist() for output in outputs] == values
    assert [len(output.outputs[0].token_ids) for output in outputs] == tokens
    assert [len(output.prompt_logprobs) for output in outputs] == ([3, 0] if kind == "DELTA" else [3] * len(outputs))
