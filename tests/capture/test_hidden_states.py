# SPDX-License-Identifier: Apache-2.0
"""Hidden states of several prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.capture.captured import captured
from vllm_steer.capture.hidden_states import HiddenStates, capture_hidden_states
from vllm_steer.capture.results import CaptureResult
from vllm_steer.errors import SteeringError
from vllm_steer.params import capture_specs

SITE = ("post_block", 3)
ENGINE = SimpleNamespace(output_processor=SimpleNamespace(request_states={}))


def test_rows_are_separate_for_each_prompt() -> None:
    """Catches rows of another prompt, wrong bounds, and prompts without rows that shift the others."""
    requests = tuple(captured(str(rows), seed=rows, rows=rows) for rows in (3, 0, 5))
    states = HiddenStates(requests)
    assert len(states) == 3 and [*states] == [*requests] and states[-1] is requests[2]
    bounds = states.bounds(*SITE)
    assert bounds.dtype == torch.int64 and bounds.tolist() == [0, 3, 3, 8]
    assert states.prompt_index(*SITE).tolist() == [0] * 3 + [2] * 5
    for i, (rows, request) in enumerate(zip(states.tensors(*SITE), requests, strict=True)):
        assert torch.equal(rows, request.tensor(*SITE))
        assert torch.equal(rows, states.tensor(*SITE)[bounds[i] : bounds[i + 1]])


@pytest.mark.parametrize(
    ("status", "unreached", "problem"),
    [("partial", (), "aborted"), ("ok", (9,), "no rows at positions 9; the prompt has 2 tokens")],
)
def test_errors_name_the_prompt(status: Any, unreached: tuple[int, ...], problem: str) -> None:
    """Catches an error with vLLM's request number, which differs from the prompt's after an earlier call."""

    class Model:
        llm_engine = ENGINE

        def generate(self, prompts: list[str], params: Any, use_tqdm: bool) -> list[Any]:
            good, bad = CaptureResult("ok", None, None), CaptureResult(status, "aborted", None, unreached)
            return [
                SimpleNamespace(request_id=str(17 + i), capture_results={"memory": result}, prompt_token_ids=[1, 2])
                for i, result in enumerate((good, bad))
            ]

    with pytest.raises(RuntimeError) as caught:
        capture_hidden_states(Model(), ["a", "b"], hooks={"post_block": [1]})
    assert str(caught.value) == f"prompts[1]: {problem}"


def test_reduced_rows_have_one_row_per_prompt() -> None:
    """Catches bounds that count the positions that were read instead of the rows."""
    requests = tuple(captured(str(i), seed=i, rows=4, reduced=True) for i in range(3))
    assert HiddenStates(requests).bounds(*SITE).tolist() == [0, 1, 2, 3]
    assert HiddenStates(requests).prompt_index(*SITE).tolist() == [0, 1, 2]


class CountingModel:
    """A model that notes its prompts, and returns one result for each."""

    llm_engine = ENGINE

    def chat(self, prompts: list[Any], params: Any, use_tqdm: bool, **options: Any) -> list[Any]:
        self.options = options
        return self.generate(prompts, params, use_tqdm)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        self.prompts, self.params = prompts, params
        return [SimpleNamespace(capture_results={"memory": CaptureResult("ok", None, captured())}) for _ in prompts]


@pytest.mark.parametrize(
    ("prompts", "passed"),
    [
        ("one two", ["one two"]),
        ({"prompt_token_ids": [1, 2, 3]}, [{"prompt_token_ids": [1, 2, 3]}]),
        ([1, 2, 3], [[1, 2, 3]]),
        (("one", "two"), ["one", "two"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a"}, {"prompt": "b"}]),
    ],
    ids=["text", "mapping", "token ids", "texts", "lists of token ids", "mappings"],
)
@pytest.mark.parametrize("hooks", [{"post_block": [3]}, ["resid_post.3"]], ids=["mapping", "list"])
def test_forms_of_prompts_and_hooks(prompts: Any, passed: list[Any], hooks: Any) -> None:
    """Catches a single prompt split into letters, keys or tokens, and names of sites that are refused."""
    model = CountingModel()
    states = capture_hidden_states(model, prompts, hooks=hooks)
    assert model.prompts == passed and len(states) == len(passed)
    ((name, spec),) = capture_specs(model.params)
    assert (name, spec.hooks) == ("memory", (("post_block", (3,)),))


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    ("prompts", "passed"),
    [(CHAT, [CHAT]), ([CHAT, CHAT[1:]], [CHAT, CHAT[1:]]), ((tuple(CHAT),), [tuple(CHAT)])],
    ids=["one", "several", "tuples"],
)
def test_conversations(prompts: Any, passed: list[Any]) -> None:
    """Catches a conversation whose messages are taken for prompts, and options of the template that are lost."""
    model = CountingModel()
    options = {"add_generation_prompt": False}
    states = capture_hidden_states(model, prompts, hooks={"post_block": [3]}, chat_kwargs=options)
    assert model.prompts == passed and len(states) == len(passed) and model.options == options


@pytest.mark.parametrize(
    ("prompts", "options", "problem"),
    [([CHAT, "one"], None, "prompts: mixes"), (["one"], {"tools": []}, "chat_kwargs")],
)
def test_conversations_that_cannot_be_run(prompts: Any, options: Any, problem: str) -> None:
    """Catches options that are ignored, and a conversation that is sent to `generate`."""
    with pytest.raises(SteeringError, match=problem):
        capture_hidden_states(CountingModel(), prompts, hooks={"post_block": [3]}, chat_kwargs=options)
