# SPDX-License-Identifier: Apache-2.0
"""Tokens that mark parts of conversations, and programs bound to a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.multimodal.inputs import PlaceholderRange

from tests.repo.tree import ROOT
from vllm_steer import Edit, SamplingParams, SteeringError
from vllm_steer.frontend.part_markers import PartMarkers, bind_request
from vllm_steer.frontend.prompt_tokens import without_placeholders
from vllm_steer.params import program_of
from vllm_steer.program import Program
from vllm_steer.program.compiled_part import NO_TOKEN, CompiledPart

WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(ROOT / "demo/model")
    made.add_tokens(WORDS)
    return made


def markers(given: Any = None, reasoning: str = "", tool: str = "") -> PartMarkers:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning))
    return PartMarkers(config, given or {}, tool)


def bound(
    tokens: Any,
    prompt: list[int],
    tokenizer: Any,
    found: PartMarkers,
    images: Any = (),
    mask: Any = None,
    features: Any = (),
) -> Program:
    edit = Edit(kind="add", point="post_block", layers=0, vector=np.ones(4), tokens=tokens)
    features = [*features, *(SimpleNamespace(modality="image", mm_position=each) for each in images)]
    request = SimpleNamespace(
        sampling_params=SamplingParams(steering=[edit]),
        prompt_token_ids=prompt,
        prompt_is_token_ids=mask,
        mm_features=features,
    )
    bind_request(request, SimpleNamespace(tokenizer=tokenizer), found)
    program = program_of(request.sampling_params)
    assert program is not None
    return program


def parts(*args: Any, **kwargs: Any) -> tuple[CompiledPart, ...]:
    return bound(*args, **kwargs).edits[0].parts


@pytest.mark.parametrize(
    ("parser", "start", "end"),
    [("hermes", "<tool_call>", "</tool_call>"), ("qwen3_coder", "<tool_call>", "</tool_call>"),
     ("ernie45", "<tool_call>", "</tool_call>"), ("mistral", "[TOOL_CALLS]", None)],
)  # fmt: skip
def test_markers_of_tool_parsers(parser: str, start: str, end: str | None, tokenizer: Any) -> None:
    """Catches tokens that differ from the markers of the parser, an end that the parser does not have, and a lost end.

    Ernie's parser has one start token under two names, and its end token under one of them.
    """
    (part,) = parts("tool_call", [1], tokenizer, markers(tool=parser))
    assert part.start == tokenizer.convert_tokens_to_ids(start)
    assert part.end == (NO_TOKEN if end is None else tokenizer.convert_tokens_to_ids(end))


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_markers_of_reasoning_parsers(parser: str, tokenizer: Any) -> None:
    """Catches tokens that differ from the markers of the parser, and an answer inside of a tool call."""
    ids = tokenizer.convert_tokens_to_ids(WORDS)
    (thinking,) = parts("answer", [1], tokenizer, markers(reasoning=parser))
    assert (thinking.start, thinking.end, thinking.outside) == (ids[0], ids[1], True)
    both = parts("answer", [1], tokenizer, markers({"tool_call": (7, 8)}, reasoning=parser))
    assert [(each.start, each.end, each.outside) for each in both] == [(ids[0], ids[1], True), (7, 8, True)]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [([1], False), ([3], True), ([3, 1, 4], False), ([3, 4, 1, 3, 9], True), ([4, 3], True), ([4], False)],
)
def test_prompt_opens_a_span(prompt: list[int], opened: bool) -> None:
    """Catches a prompt that opens a span and is not read, and an earlier turn that counts instead of the last one."""
    (part,) = parts({"between": [3, 4]}, prompt, None, markers())
    assert part.opened is opened
    (other,) = parts({"between": [3, 4], "opened": True}, prompt, None, markers())
    assert other.opened is (opened or not {3, 4} & set(prompt))


@pytest.mark.parametrize("end", [4, None])
def test_placeholders_of_embeddings_do_not_open_a_span(end: int | None) -> None:
    """Catches the token at the place of an embedding that begins or ends a part, (None) also of a part without end."""
    given = CompiledPart("", 3, NO_TOKEN, False, False, bound=True)
    mask = [True, True, False, False]
    prompt = without_placeholders([1, 3, 9, 4], mask)
    assert list(prompt) == [1, 3, -1, -1]
    if end is None:
        assert given.after(prompt)
    else:
        (part,) = bound({"between": [3, end]}, [1, 3, 9, end], None, markers(), mask=mask).edits[0].parts
        assert part.opened


def test_embeddings_beside_images_do_not_end_a_span() -> None:
    """Catches placeholders of embeddings that are read as tokens in a prompt with images, which has no mask."""
    features = [SimpleNamespace(modality="prompt_embeds", mm_position=PlaceholderRange(2, 2))]
    found = bound({"between": [3, 4]}, [1, 3, 4, 4], None, markers(), features=features)
    assert found.edits[0].parts[0].opened


def test_images_become_positions() -> None:
    """Catches positions of separators among the placeholder tokens."""
    import torch

    images = [PlaceholderRange(2, 3), PlaceholderRange(9, 4, torch.tensor([False, True, True, False]))]
    assert bound("image", [1] * 20, None, markers(), images).edits[0].tokens == [[2, 5], [10, 12]]


@pytest.mark.parametrize(
    ("tokens", "found", "words"),
    [
        ("thinking", markers(), "--reasoning-parser"),
        ("tool_call", markers(), "--tool-call-parser"),
        ("tool_call", markers(tool="deepseek_v3"), "does not fit the tokenizer"),
        ("tool_call", markers(tool="pythonic"), "--steering-part"),
        ({"between": ["the end", "of it"]}, markers(), "tokens of this model"),
        ({"between": ["<think>", 4096]}, markers(), "cannot both begin and end"),
        ("image", markers(), "the prompt has none"),
    ],
)
def test_refused(tokens: Any, found: PartMarkers, words: str, tokenizer: Any) -> None:
    """Catches a part whose tokens are guessed or ignored."""
    if tokens == {"between": ["<think>", 4096]}:
        tokens = {"between": ["<think>", tokenizer.convert_tokens_to_ids("<think>")]}
    with pytest.raises(SteeringError, match=words) as caught:
        bound(tokens, [1, 2], tokenizer, found)
    assert caught.value.field.startswith("steering[0].tokens")


def test_prompts_of_embeddings_are_refused() -> None:
    """Catches a part that is decided without the prompt's tokens."""
    edit = Edit(kind="add", point="post_block", layers=0, vector=np.ones(4), tokens={"between": [3, 4]})
    request = SimpleNamespace(sampling_params=SamplingParams(steering=[edit]), prompt_token_ids=None, mm_features=None)
    with pytest.raises(SteeringError, match="embeddings"):
        bind_request(request, SimpleNamespace(tokenizer=None), markers())
