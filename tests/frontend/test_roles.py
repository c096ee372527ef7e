# SPDX-License-Identifier: Apache-2.0
"""Messages of prompts by role: which tokens of which chat templates, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.frontend.chat_templates import TEMPLATES, make_tokenizer
from vllm_steer import Edit, SamplingParams, SteeringError
from vllm_steer.frontend.part_markers import PartMarkers, bind_request
from vllm_steer.frontend.roles import read_role_tokens
from vllm_steer.params import capture_specs, program_of
from vllm_steer.request.selector import OPEN_END, Selector

MESSAGES = [
    {"role": "system", "content": "Be\nbrief"},
    {"role": "user", "content": "\nassistant user\n\n"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": " again "},
]
SERVED: dict[str, dict[str, list[str]]] = {
    "chatml": {
        "system": ["<|im_start|>system\nBe\nbrief<|im_end|>"],
        "user": ["<|im_start|>user\n\nassistant user\n\n<|im_end|>", "<|im_start|>user\n again <|im_end|>"],
        "assistant": ["<|im_start|>assistant\n7<|im_end|>", "<|im_start|>assistant\n<think>\n"],
    },
    "two tokens": {
        "system": ["<|head|>system<|end_head|>\n\nBe\nbrief<|eot|>"],
        "user": ["<|head|>user<|end_head|>\n\nassistant user<|eot|>", "<|head|>user<|end_head|>\n\nagain<|eot|>"],
        "assistant": ["<|head|>assistant<|end_head|>\n\n7<|eot|>", "<|head|>assistant<|end_head|>\n\n"],
    },
    "no system": {
        "user": ["<start_of_turn>user\nassistant user<end_of_turn>", "<start_of_turn>user\nagain<end_of_turn>"],
        "assistant": ["<start_of_turn>model\n7<end_of_turn>", "<start_of_turn>model\n"],
    },
    "token per role": {
        "system": ["<|system|>\nBe\nbrief<|end|>"],
        "user": ["<|user|>\n\nassistant user\n\n<|end|>", "<|user|>\n again <|end|>"],
        "assistant": ["<|assistant|>\n7<|end|>", "<|assistant|>\n"],
    },
    "user without end": {"assistant": ["<|assistant|>7</s>", "<|assistant|>"]},
    "instructions": {"assistant": ["[/INST] 7</s>", "[/INST]"]},
    "text": {},
    "text and end": {},
    "system as user": {
        "user": [
            "<|im_start|>user\nBe\nbrief<|im_end|>",
            "<|im_start|>user\n\nassistant user\n\n<|im_end|>",
            "<|im_start|>user\n again <|im_end|>",
        ],
        "assistant": ["<|im_start|>assistant\n7<|im_end|>", "<|im_start|>assistant\n"],
    },
}


def render(tokenizer: Any, messages: list[dict[str, str]], generates: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates)
    return list(tokenizer.encode(text, add_special_tokens=False))


def texts(tokenizer: Any, ids: list[int], role: str) -> list[str]:
    spans = read_role_tokens(tokenizer, None).spans(role, ids)
    return [tokenizer.decode(ids[start : min(stop, len(ids))]) for start, stop in spans]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_messages_of_each_template(name: str) -> None:
    """Catches a message of another role, a missing header or end, and a role that is guessed instead of refused."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    found = read_role_tokens(tokenizer, None)
    assert {"system", "user", "assistant"} - set(found.problems) == set(SERVED[name])
    ids = render(tokenizer, MESSAGES[name == "no system" :])
    for role, expected in SERVED[name].items():
        assert texts(tokenizer, ids, role) == expected, role


def test_only_the_prompt_opens_a_message() -> None:
    """Catches generated tokens in a message that the prompt has ended, and an answer outside of the last message."""
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    found = read_role_tokens(tokenizer, None)
    asked, ended = (render(tokenizer, MESSAGES, generates) for generates in (True, False))
    assert found.spans("assistant", asked)[-1][1] == OPEN_END
    assert all(stop < OPEN_END for role in SERVED["chatml"] for _, stop in found.spans(role, ended))
    continued = found.spans("user", ended[: ended.index(tokenizer.convert_tokens_to_ids("<|im_end|>"), 30)])
    assert continued[-1][1] == OPEN_END


def test_other_roles_belong_to_no_message() -> None:
    """Catches the result of a tool that counts as the message before it."""
    tokenizer = make_tokenizer(TEMPLATES["two tokens"])
    # The call of a tool has no end token of its own.
    text = "<|head|>assistant<|end_head|>\n\ncall<|head|>tool<|end_head|>\n\n12<|eot|><|head|>assistant<|end_head|>\n\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = ["<|head|>assistant<|end_head|>\n\ncall", "<|head|>assistant<|end_head|>\n\n"]
    assert texts(tokenizer, ids, "assistant") == expected
    assert texts(tokenizer, ids, "user") == []


def bind_params(tokenizer: Any, prompt: list[int], template: str = "", **fields: Any) -> Any:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser=""))
    request = SimpleNamespace(
        sampling_params=SamplingParams(**fields), prompt_token_ids=prompt, prompt_is_token_ids=None, mm_features=None
    )
    bind_request(request, SimpleNamespace(tokenizer=tokenizer), PartMarkers(config, {}, "", template))
    return request.sampling_params


def bind(*args: Any, **fields: Any) -> Any:
    return program_of(bind_params(*args, **fields))


def edit(tokens: Any = "user", **fields: Any) -> Edit:
    return Edit(kind="add", point="post_block", layers=1, vector=np.ones(4), tokens=tokens, **fields)


PROBE = {"probe": np.ones(4), "point": "post_block", "layer": 0}


def test_every_field_gets_positions(tmp_path: Path) -> None:
    """Catches a field whose part stays a name, and a server's template that is ignored."""
    tokenizer = make_tokenizer(TEMPLATES["text"])
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES["token per role"])
    text = "<|system|>\na<|end|>\n<|user|>\nb<|end|>\n<|assistant|>\n"
    prompt = tokenizer.encode(text, add_special_tokens=False)
    params = bind_params(
        tokenizer, prompt, str(file),
        readouts={"r": {**PROBE, "positions": "assistant"}},
        capture={"memory": {"hooks": {"post_block": [0], "pre_attn": "all"}, "positions": "user"},
                 "logging": {"hooks": {"post_block": [0]}, "positions": "assistant", "dtype": "float16", "tag": 1}},
        steering=[edit(), edit("generated", when={"readout": "r", "above": 0.0, "window": "prompt",
                                                  "positions": "system"})],
    )  # fmt: skip
    program = program_of(params)
    assert [each.tokens for each in program.edits] == [[[5, 9]], "generated"]
    assert program.edits[1].when[0].tokens == [[0, 4]]
    assert program.readouts[0].tokens == [[10, None]]
    assert [each.tokens for each in program.captures] == [[[5, 9]], [[5, 9]], [[10, None]]]
    # The front end assembles rows by the spec, the engine by the program.
    memory, logging = (spec for _, spec in capture_specs(params))
    assert (memory.positions, logging.positions) == (Selector([[5, 9]]), Selector([[10, None]]))
    assert (dict(memory.hooks), logging.dtype, logging.options) == (
        {"pre_attn": "all", "post_block": (0,)}, "float16", {"tag": 1}
    )  # fmt: skip
    assert not program.needs_prompt


def test_roles_in_captures_alone() -> None:
    """Catches captures that are bound only beside edits, and a role that the prompt lacks and that captures all."""
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    prompt = render(tokenizer, MESSAGES[1:])
    hooks = {"post_block": [0]}
    params = bind_params(tokenizer, prompt, capture={"memory": {"hooks": hooks, "positions": "user"}})
    ((_, spec),) = capture_specs(params)
    assert [tokenizer.decode(prompt[start:stop]) for start, stop in spec.positions.intervals(len(prompt))] == (
        SERVED["chatml"]["user"]
    )
    assert program_of(params).captures[0].tokens == spec.positions.to_wire()
    with pytest.raises(SteeringError, match="selects messages of the role system, but the prompt has none") as caught:
        bind(tokenizer, prompt, capture={"memory": {"hooks": hooks, "positions": "system"}})
    assert caught.value.field == "capture.memory.positions"


@pytest.mark.parametrize(
    ("template", "role", "words"),
    [
        ("chatml", "system", "selects messages of the role system, but the prompt has none"),
        ("text", "user", "no special tokens are between the contents of messages"),
        ("system as user", "system", "they begin as user messages do"),
        ("no system", "system", "no system role"),
        (None, "user", "no chat template"),
    ],
)
def test_refused(template: str | None, role: str, words: str) -> None:
    """Catches a role that is ignored because its messages cannot be found."""
    tokenizer = make_tokenizer(None if template is None else TEMPLATES[template])
    prompt = [1, 2] if template is None else render(tokenizer, MESSAGES[1:])
    with pytest.raises(SteeringError) as caught:
        bind(tokenizer, prompt, steering=[edit(role)])
    assert caught.value.field == "steering[0].tokens"
    assert words in caught.value.problem


def test_refused_without_a_tokenizer_or_template() -> None:
    """Catches engines that cannot know the tokens of a role and ignore it."""
    with pytest.raises(SteeringError, match="no tokenizer"):
        bind(None, [1, 2], steering=[edit()])
    with pytest.raises(SteeringError, match="--chat-template is not a file"):
        bind(make_tokenizer(None), [1, 2], "missing.jinja", steering=[edit()])


def test_refused_before_the_prompt_is_known() -> None:
    """Catches roles where the front end cannot fill in positions."""
    readouts = {"r": PROBE}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steering": [edit(when={"readout": "r", "above": 0.0, "window": "previous"})]}, "steering[0].when.window"),
        ({"stop_on": [{"readout": "r", "above": 0.0, "positions": "assistant"}]}, "stop_on[0].positions"),
        ({"capture": {"memory": {"hooks": {"post_block": [0]}, "positions": ["user"]}}}, "capture.memory.positions[0]"),
    ]
    for fields, path in cases:
        with pytest.raises(SteeringError) as caught:
            SamplingParams(readouts=readouts, **fields)
        assert caught.value.field == path
