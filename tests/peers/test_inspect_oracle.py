# SPDX-License-Identifier: Apache-2.0
"""Positions at which ``ask_oracle`` adds rows, with the real ``Model.generate`` and a provider that has no server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("inspect_ai")

from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelName, ModelOutput, get_model, modelapi
from inspect_ai.model._generate_config import active_generate_config, set_active_generate_config
from inspect_ai.model._model import active_model_context_var, init_active_model
from inspect_ai.solver import TaskState

from vllm_steer import SteeringError
from vllm_steer.peers.inspect import ask_oracle, scorers
from vllm_steer.peers.inspect.fields import prepare

ROWS = torch.ones(2, 4)
NOTHING = GenerateConfig()


@modelapi("recorder")
class Recorder(ModelAPI):
    """A provider with one token per letter, which answers with the prompt's tokens, ``late`` letters further on."""

    def __init__(self, model_name: str, *_: Any, late: int = 0, tells: bool = True, **__: Any) -> None:
        super().__init__(model_name)
        self.late, self.tells = late, tells
        self.sent: list[list[int]] = []
        self.bodies: list[Any] = []

    async def tokenize(self, text: Any) -> list[int]:
        return [ord(letter) for letter in text]

    async def tokenize_messages(self, messages: list[ChatMessage]) -> list[int]:
        return await self.tokenize("".join(f"{each.role}: {each.text}\n" for each in messages))

    async def generate(self, input: list[ChatMessage], tools: Any, tool_choice: Any, config: GenerateConfig) -> Any:
        self.bodies.append(prepare(config.extra_body).body)
        self.sent.append([0] * self.late + await self.tokenize_messages(input))
        output = ModelOutput.from_content("recorder", "yes")
        output.metadata = {"prompt_token_ids": self.sent[-1]} if self.tells else None
        return output


@pytest.fixture(autouse=True)
def _one_row_for_each_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scorers, "answer_rows", lambda *_: ROWS)
    config, token = active_generate_config(), active_model_context_var.set(None)  # type: ignore[arg-type]
    yield
    active_model_context_var.reset(token)
    set_active_generate_config(config)


def started(config: GenerateConfig = NOTHING, own: GenerateConfig = NOTHING, **arguments: Any) -> Any:
    """Return the provider of a task with ``config`` and of a model with the configuration ``own``."""
    model = get_model("recorder/x", config=own, memoize=False, **arguments)
    init_active_model(model, config)
    return model.api


async def ask(**arguments: Any) -> TaskState:
    """Run the solver of the task's model."""
    state = TaskState(model=ModelName("recorder/x"), sample_id=1, epoch=1, input="", messages=[])

    async def generate(*_: Any, **__: Any) -> TaskState:
        raise NotImplementedError

    arguments = {"placeholder": "#", "source": "answer", **arguments}
    return await ask_oracle("Is this positive?", **arguments)(state, generate)


SYSTEM = GenerateConfig(system_message="Be brief.")


@pytest.mark.parametrize(("config", "own"), [(NOTHING, NOTHING), (SYSTEM, NOTHING), (NOTHING, SYSTEM)])
async def test_rows_are_added_at_the_placeholders(config: GenerateConfig, own: GenerateConfig) -> None:
    """Catches positions in a prompt without the system message that is sent."""
    api = started(config, own)
    state = await ask()
    assert state.metadata["oracle"] == "yes"
    (sent,), (body,) = api.sent, api.bodies
    assert ("Be brief." in "".join(map(chr, sent))) == (SYSTEM in (config, own))
    expected = [[position] for position, token in enumerate(sent) if token == ord("#")]
    assert [edit["tokens"] for edit in body["steering"]] == expected
    assert len(expected) == len(ROWS)


@pytest.mark.parametrize(
    ("system", "arguments"),
    [("Answer ## or ?", {}), ("### title", {}), (None, {"placeholder": "?", "source": "answer_mean"})],
)
async def test_an_ambiguous_placeholder_is_refused(system: str | None, arguments: dict[str, Any]) -> None:
    """Catches rows added at a placeholder of the question or the system message."""
    api = started(GenerateConfig(system_message=system))
    with pytest.raises(SteeringError, match=r"placeholder: .* elsewhere in the question or system message"):
        await ask(**arguments)
    assert not api.sent


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"late": 3}, "has other tokens at positions"), ({"tells": False}, "has no prompt tokens to check")],
)
async def test_the_answered_prompt_is_checked(options: dict[str, Any], problem: str) -> None:
    """Catches rows added at other tokens of a prompt that the server renders in another way than its tokenizer."""
    api = started(**options)
    with pytest.raises(SteeringError, match=problem):
        await ask()
    assert api.bodies[0]["return_token_ids"]


@pytest.mark.parametrize("placeholder", ["##", ""])
async def test_a_placeholder_is_one_token(placeholder: str) -> None:
    """Catches a placeholder with another number of tokens than rows."""
    started()
    with pytest.raises(SteeringError, match="must be one token"):
        await ask(placeholder=placeholder)
