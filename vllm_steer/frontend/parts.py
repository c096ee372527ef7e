# SPDX-License-Identifier: Apache-2.0
"""Parts of a conversation: the tokens that mark them, and the program of a request bound to its prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.prompt_tokens import token_mask, without_placeholders
from vllm_steer.frontend.roles import RoleTokens, read_role_tokens, read_template
from vllm_steer.params import PROGRAM_KEY, program_of
from vllm_steer.program.bind import bind_to_prompt
from vllm_steer.program.part import NO_TOKEN, CompiledPart
from vllm_steer.spec.part import IMAGE, Marker
from vllm_steer.spec.scalars import shown

_PARSER_FLAGS: Mapping[str, str] = {"thinking": "--reasoning-parser", "tool_call": "--tool-call-parser"}
_GIVE_POSITIONS = "give positions, for example from return_token_ids or /tokenize"
_TOOL_ATTRIBUTES = (
    ("tool_calls_start_token", "tool_calls_end_token"),
    ("tool_call_start_token", "tool_call_end_token"),
)
"""Attributes of vLLM's tool parsers, the outermost markers first."""
_TOOL_TERMINALS = (("TOOL_SECTION_START", "TOOL_SECTION_END"), ("TOOL_START", "TOOL_END"), ("TOOL_CALLS", ""))
"""Terminals of vLLM's declarative parsers, the outermost markers first."""


class PartMarkers:
    """Start and end tokens of the parts of an engine's conversations.

    Args:
        vllm_config: The engine's configuration.
        given: Start and end of parts by name, as ids or text.
        tool_parser: Name of the server's tool parser, or an empty string.
        chat_template: The server's chat template or its file; the tokenizer's if empty.
    """

    def __init__(
        self, vllm_config: Any, given: Mapping[str, Sequence[Marker]], tool_parser: str, chat_template: str = ""
    ) -> None:
        self._vllm_config = vllm_config
        self._chat_template = chat_template
        self._role_tokens: RoleTokens | None = None
        self._given = given
        self._tool_parser = tool_parser
        self._named: dict[str, tuple[int, int]] = {}

    def find(self, part: CompiledPart, tokenizer: Any, field: str) -> tuple[int, int] | None:
        """Return the start and end token of a part; None if it is optional and the engine has none.

        Raises:
            SteeringError: The tokens are not known, or a marker is not one token.
        """
        if not part.name:
            return self._ids(part.start, part.end, tokenizer, field)
        if part.name not in self._named:
            markers = self._given.get(part.name) or self._of_parser(part.name, tokenizer, field)
            if markers is None and part.optional:
                return None
            if markers is None:
                raise SteeringError(
                    field,
                    f"this engine does not know which tokens mark {part.name}; start it with "
                    f"{_PARSER_FLAGS[part.name]} or --steering-part {part.name}=START,END, or give both tokens: "
                    '{"between": [start, end]}',
                )
            start, end = markers
            self._named[part.name] = self._ids(start, end, tokenizer, f"{field} ({part.name})")
        return self._named[part.name]

    def find_messages(self, role: str, prompt: Sequence[int], tokenizer: Any, field: str) -> list[tuple[int, int]]:
        """Return the ranges of the messages of a role; the stop of a message that the prompt leaves open is `OPEN_END`.

        Raises:
            SteeringError: The chat template does not mark the messages of the role exactly.
        """
        if self._role_tokens is None:
            self._role_tokens = self._read_roles(tokenizer, field)
        if role in self._role_tokens.problems:
            raise SteeringError(
                field,
                f"the chat template of this model does not mark the messages of the role {role}: "
                f"{self._role_tokens.problems[role]}; {_GIVE_POSITIONS}",
            )
        return self._role_tokens.spans(role, prompt)

    def _read_roles(self, tokenizer: Any, field: str) -> RoleTokens:
        if tokenizer is None:
            raise SteeringError(field, f"the engine has no tokenizer, which has the chat template; {_GIVE_POSITIONS}")
        template = read_template(self._chat_template) if self._chat_template else None
        if self._chat_template and template is None:
            raise SteeringError(field, f"--chat-template is not a file that can be read; {_GIVE_POSITIONS}")
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise SteeringError(field, f"the tokenizer has no chat template (--chat-template); {_GIVE_POSITIONS}")
        if not hasattr(tokenizer, "added_tokens_decoder"):
            raise SteeringError(field, f"the tokenizer does not list its special tokens; {_GIVE_POSITIONS}")
        return read_role_tokens(tokenizer, template)

    def _of_parser(self, name: str, tokenizer: Any, field: str) -> tuple[Marker, Marker] | None:
        """Return the markers of vLLM's parser for a part; None if the engine has no such parser."""
        parser_name = self._tool_parser if name == "tool_call" else _reasoning_parser(self._vllm_config)
        if not parser_name:
            return None
        try:
            markers = (_tool_markers if name == "tool_call" else _reasoning_markers)(parser_name, tokenizer)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Parsers look for their tokens in the tokenizer.
            raise SteeringError(
                field, f"vLLM's parser {parser_name!r} does not fit the tokenizer: {shown(str(error))}"
            ) from None
        if markers is None:
            raise SteeringError(
                field,
                f"vLLM's parser {parser_name!r} does not mark {name} by one start token; use --steering-part "
                f'{name}=START,END, or give both tokens: {{"between": [start, end]}}',
            )
        return markers

    def _ids(self, start: Marker, end: Marker, tokenizer: Any, field: str) -> tuple[int, int]:
        ids = _token_id(start, tokenizer, field), _token_id(end, tokenizer, field)
        if ids[0] == ids[1]:
            raise SteeringError(field, f"token {ids[0]} cannot both begin and end a part; name two tokens")
        return ids


def bind_request(request: Any, input_processor: Any, markers: PartMarkers) -> None:
    """Replace the program of an engine request by the one for its prompt, if they differ.

    Raises:
        SteeringError: A message or an image of the program is not in the prompt, or the tokens of a part are not known.
    """
    program = program_of(request.sampling_params)
    if program is None or not program.needs_prompt:
        return
    tokenizer = input_processor.tokenizer
    if request.prompt_token_ids is None:
        raise SteeringError("steering", "parts of a conversation need a prompt of tokens, not of embeddings")
    prompt = without_placeholders(request.prompt_token_ids, token_mask(request))

    def ranges(name: str, field: str) -> list[tuple[int, int]]:
        return _images(request) if name == IMAGE else markers.find_messages(name, prompt, tokenizer, field)

    bound = bind_to_prompt(program, prompt, ranges, lambda part, field: markers.find(part, tokenizer, field))
    request.sampling_params = params = copy.copy(request.sampling_params)
    params.extra_args = {**params.extra_args, PROGRAM_KEY: bound.encode_cached()}


def _images(request: Any) -> list[tuple[int, int]]:
    """Return the ranges of the prompt's image tokens."""
    ranges = []
    for feature in request.mm_features or ():
        if feature.modality == "image":
            place = feature.mm_position
            # Both ends of a range are included.
            ranges += [(first, last + 1) for first, last in place.extract_embeds_range()]
    return sorted(ranges)


def _reasoning_parser(vllm_config: Any) -> str:
    return str(getattr(vllm_config.structured_outputs_config, "reasoning_parser", "") or "")


def _reasoning_markers(parser: str, tokenizer: Any) -> tuple[Marker, Marker] | None:
    from vllm_steer.compat.internals import ReasoningParserManager  # slow to import, and rarely needed

    made = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
    start, end = made.reasoning_start_str, made.reasoning_end_str
    return (start.strip(), end.strip()) if start and end else None


def _tool_markers(parser: str, tokenizer: Any) -> tuple[Marker, Marker] | None:
    from vllm_steer.compat.internals import ToolParserManager  # slow to import, and rarely needed

    made = ToolParserManager.get_tool_parser(parser)(tokenizer)
    found = [(getattr(made, start, None), getattr(made, end, None)) for start, end in _TOOL_ATTRIBUTES]
    if first := next((start for start, _ in found if isinstance(start, str)), None):
        # Some parsers have one start token under both names, and its end token under one of them.
        return first, next((end for start, end in found if start == first and end), NO_TOKEN)
    engine = getattr(made, "_parser_engine", None)
    terminals = getattr(getattr(engine, "parser_engine_config", None), "token_id_terminals", {})
    for start, end in _TOOL_TERMINALS:
        if start in terminals:
            return terminals[start], terminals.get(end, NO_TOKEN)
    return None


def _token_id(marker: Marker, tokenizer: Any, field: str) -> int:
    if isinstance(marker, int):
        return marker
    if tokenizer is None:
        raise SteeringError(field, f"the engine has no tokenizer for {shown(marker)}; give token ids")
    ids = tokenizer.encode(marker, add_special_tokens=False)
    if len(ids) != 1:
        raise SteeringError(
            field,
            f"{shown(marker)} is {len(ids)} tokens of this model; a part begins and ends with one token, since each "
            "token is decided on its own",
        )
    return int(ids[0])
