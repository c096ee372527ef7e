# SPDX-License-Identifier: Apache-2.0
"""Solvers: generate with steering, and ask an activation oracle about the last answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.model import ChatMessage, ChatMessageSystem, ChatMessageUser, GenerateConfig, ModelOutput, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from vllm_steer.errors import SteeringError

_SOURCES = ("answer_mean", "answer")


class _Fields:
    """Fields with vectors; Inspect logs an argument of this type by its name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.name = f"<{', '.join(fields)}>"


def steer(
    modules: Sequence[Any] | Mapping[str, float] | str | None = None, edits: Sequence[Any] = (), vectors: Any = None
) -> Solver:
    """Return a solver that generates with steering, in addition to the task's ``extra_body``.

    Logs contain names of modules, but no vectors. On the command line, the solver is ``vllm_steer/steer``, with
    ``modules`` only.

    Args:
        modules: Modules that the server has, by name or as ``{name: scale}``.
        edits: A list of :class:`vllm_steer.Edit`.
        vectors: A ``SteeringVector`` of :mod:`vllm_steer.peers.vllm_lens`, or a list of them.

    Raises:
        SteeringError: Nothing is given.
    """
    given: dict[str, Any] = {}
    if edits:
        given["steering"] = list(edits)
    if vectors is not None:
        given["extra_args"] = {"apply_steering_vectors": vectors}
    return _steer(modules, _Fields(given) if given else None)


@solver(name="steer")
def _steer(modules: Any = None, fields: _Fields | None = None) -> Solver:
    """Generate with modules and other fields."""
    given: dict[str, Any] = {} if fields is None else dict(fields.fields)
    if modules:
        named = list(modules.items()) if isinstance(modules, Mapping) else modules
        each_as_list = (each if isinstance(each, str) else list(each) for each in named)
        given["steering_modules"] = [named] if isinstance(named, str) else [*each_as_list]
    if not given:
        raise SteeringError("steer", "needs modules, edits or vectors")

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        from vllm_steer.peers.inspect.fields import shared

        with shared(given) as key:
            return await generate(state, extra_body=_with_task_fields(key))

    return solve


@solver
def ask_oracle(
    question: str,
    adapter: str | None = None,
    layer: int | None = None,
    source: str = "answer_mean",
    inject_layer: int = 1,
    placeholder: str = " ?",
    scale: float = 1.0,
    max_tokens: int = 64,
    model: str | None = None,
    as_output: bool = False,
) -> Solver:
    """Ask an activation oracle what the rows of the last answer mean.

    The prompt has one placeholder token for each row. The row, scaled to the norm of the stream, is added to the stream
    at its placeholder. The answer becomes ``state.metadata["oracle"]``.

    Args:
        question: Text after the placeholders.
        adapter: LoRA adapter of the server that was trained as an oracle; None for the model itself.
        layer: Captured layer whose rows are sent; None if one layer was captured.
        source: ``answer_mean`` for the mean over the answer's tokens, or ``answer`` for a row of each.
        inject_layer: Layer whose output receives the rows.
        placeholder: Text that is one token of the model, and occurs nowhere else in the prompt.
        scale: Factor of the rows.
        max_tokens: Most tokens of the oracle's answer.
        model: Name of the oracle's model; by default, the model of the task.
        as_output: Whether the oracle's answer replaces the output, so that scorers see it.

    Raises:
        SteeringError: ``source`` is unknown.
    """
    if source not in _SOURCES:
        raise SteeringError("source", f"{source!r} is not valid; use one of {', '.join(_SOURCES)}")

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        import torch

        from vllm_steer.peers.inspect.fields import SHARED_KEY, TOKENS_FIELD, shared
        from vllm_steer.peers.inspect.scorers import answer_rows
        from vllm_steer.peers.vllm_lens.keys import SteeringVector

        rows = answer_rows(state.output, layer)
        rows = rows.mean(0, keepdim=True) if source == "answer_mean" else rows
        oracle = get_model(model)
        messages: list[ChatMessage] = [ChatMessageUser(content=f"{placeholder * len(rows)}\n{question}")]
        config = GenerateConfig(max_tokens=max_tokens)
        # `generate` puts the system message of the merged configuration in front.
        system = oracle._resolve_config(config).system_message
        sent = [ChatMessageSystem(content=system), *messages] if system else messages
        token, positions = await _positions(oracle.api, sent, placeholder, len(rows))
        vector = SteeringVector(
            activations=torch.as_tensor(rows)[None],
            layer_indices=[inject_layer],
            scale=scale,
            norm_match=True,
            position_indices=positions,
        )
        fields: dict[str, Any] = {"extra_args": {"apply_steering_vectors": [vector]}, TOKENS_FIELD: True}
        if adapter is not None:
            fields["lora_request"] = {"lora_name": adapter}
        with shared(fields) as key:
            config.extra_body = {"extra_args": {SHARED_KEY: key}}
            output = await oracle.generate(messages, config=config)
        _check_positions(output, token, positions)
        state.metadata["oracle"] = output.completion
        if as_output:
            state.output = output
        return state

    return solve


def _with_task_fields(key: str) -> dict[str, Any]:
    """Return the ``extra_body`` of the task and its model, which an argument of ``generate`` replaces, with ``key``."""
    from inspect_ai.model._generate_config import active_generate_config

    from vllm_steer.peers.inspect.fields import SHARED_KEY

    body = dict(active_generate_config().extra_body or get_model().config.extra_body or {})
    return {**body, "extra_args": {**(body.get("extra_args") or {}), SHARED_KEY: key}}


async def _positions(api: Any, messages: list[ChatMessage], placeholder: str, count: int) -> tuple[int, list[int]]:
    """Return the placeholder's token and its positions in the prompt.

    Raises:
        SteeringError: The provider is another one, the placeholder is not one token of the prompt, or the prompt has
            more of them.
    """
    if not hasattr(api, "tokenize_messages"):
        raise SteeringError("model", "must be a model of the provider vllm-steer")
    own, tokens = await api.tokenize(placeholder), await api.tokenize_messages(messages)
    found = [i for i in range(len(tokens) - count + 1) if tokens[i : i + count] == own * count]
    if len(own) != 1 or not found:
        raise SteeringError("placeholder", f"{placeholder!r} must be one token that the prompt keeps; use another text")
    if len(found) > 1:
        raise SteeringError(
            "placeholder", f"{placeholder!r} is also elsewhere in the question or system message; use another text"
        )
    return own[0], list(range(found[0], found[0] + count))


def _check_positions(output: ModelOutput, token: int, positions: list[int]) -> None:
    """Raise SteeringError unless the prompt that was answered has the token at all positions."""
    tokens = (output.metadata or {}).get("prompt_token_ids")
    if tokens is None:
        reason = output.error or output.completion or output.stop_reason
        raise SteeringError("ask_oracle", f"the answer has no prompt tokens to check the rows' positions: {reason}")
    if positions[-1] >= len(tokens) or any(tokens[position] != token for position in positions):
        raise SteeringError(
            "placeholder",
            f"the prompt that was answered has other tokens at positions {positions[0]} to {positions[-1]}, so rows "
            "were added there; remove options that change the chat template",
        )
