# SPDX-License-Identifier: Apache-2.0
"""Parts of a conversation: the tokens that mark them, and the program of a request bound to its prompt."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.messages import Messages, rendered_messages
from vllm_steer.frontend.prompt_tokens import token_mask, without_placeholders
from vllm_steer.frontend.roles import RoleTokens, end_of_text, read_role_tokens, read_template
from vllm_steer.params import CAPTURE_KEY, PROGRAM_KEY, capture_specs, encode_specs, program_of
from vllm_steer.program.bind import bind_selector, bind_to_prompt
from vllm_steer.program.compiled_part import NO_TOKEN, CompiledPart, Markers
from vllm_steer.request.message_parts import IMAGE, Marker
from vllm_steer.request.scalars import shown

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
        self._no_roles: SteeringError | None = None
        self._given = given
        self._tool_parser = tool_parser
        self._named: dict[str, tuple[int, int]] = {}

    def find(self, part: CompiledPart, tokenizer: Any, field: str) -> Markers | None:
        """Return the tokens that decide about a part; None if it is optional and the engine has none.

        Raises:
            SteeringError: The tokens are not known, or a marker is not one token.
        """
        ids = self._find_ids(part.name, part.optional, tokenizer, field) if part.name else None
        if part.name and ids is None:
            return None
        start, end = ids or self._ids(part.start, part.end, tokenizer, field)
        # The token that ends the model's messages, if it is known.
        breaks = [self._roles(tokenizer).ends.get("assistant", next(iter(end_of_text(tokenizer)), NO_TOKEN))]
        if part.name == "thinking":
            breaks.append(self._start_of_tool_call(tokenizer, field))
        return Markers(start, end, tuple(each for each in breaks if each not in (start, end, NO_TOKEN)))

    def _start_of_tool_call(self, tokenizer: Any, field: str) -> int:
        """Return the token that begins a tool call, or :data:`NO_TOKEN` if it is not known."""
        try:
            ids = self._find_ids("tool_call", True, tokenizer, field)
        except SteeringError:
            ids = None  # an edit that selects tool calls gets the reason
        return NO_TOKEN if ids is None else ids[0]

    def _find_ids(self, name: str, optional: bool, tokenizer: Any, field: str) -> tuple[int, int] | None:
        if name not in self._named:
            markers = self._given.get(name) or self._of_parser(name, tokenizer, field)
            if markers is None and optional:
                return None
            if markers is None:
                raise SteeringError(
                    field,
                    f"this engine does not know which tokens mark {name}; start it with "
                    f"{_PARSER_FLAGS[name]} or --steering-part {name}=START,END, or give both tokens: "
                    '{"between": [start, end]}',
                )
            start, end = markers
            self._named[name] = self._ids(start, end, tokenizer, f"{field} ({name})")
        return self._named[name]

    def find_messages(
        self, role: str, prompt: Sequence[int], tokenizer: Any, messages: Messages | None, field: str
    ) -> list[tuple[int, int]]:
        """Return the ranges of the messages of a role; the stop of a message that the prompt leaves open is `OPEN_END`.

        Raises:
            SteeringError: The chat template does not mark the messages of the role exactly, or a content contains its
                marks.
        """
        roles = self._roles(tokenizer)
        if self._no_roles is not None:
            raise SteeringError(field, self._no_roles.problem)
        if role in roles.problems:
            raise SteeringError(
                field,
                f"the chat template of this model does not mark the messages of the role {role}: "
                f"{roles.problems[role]}; {_GIVE_POSITIONS}",
            )
        _refuse_written(messages, {*roles.starts, *roles.ends.values()}, tokenizer, field)
        return roles.spans(role, prompt)

    def open_message(self, prompt: Sequence[int], tokenizer: Any) -> Sequence[int]:
        """Return the tokens of the message that a prompt leaves open; the whole prompt if no token bounds messages."""
        return prompt[self._roles(tokenizer).open_message(prompt) :]

    def check_written(
        self, found: Markers, message: Sequence[int], tokenizer: Any, messages: Messages | None, field: str
    ) -> None:
        """Raise :class:`SteeringError` if text of earlier messages may decide about a part of the open message.

        Args:
            found: The tokens that decide about the part.
            message: The tokens of the message that the prompt leaves open.
            tokenizer: The engine's tokenizer.
            messages: The prompt's messages; None for a raw prompt.
            field: Path of the selector.
        """
        if messages is not None and messages.last_role not in self._roles(tokenizer).bounded:
            _refuse_written(messages, {found.start, found.end, *found.breaks}.intersection(message), tokenizer, field)

    def _roles(self, tokenizer: Any) -> RoleTokens:
        """Return the tokens of the chat template, or the tokenizer's own if its template cannot be read."""
        if self._role_tokens is None:
            try:
                self._role_tokens = self._read_roles(tokenizer, "")
            except SteeringError as error:
                self._no_roles = error
                self._role_tokens = RoleTokens({}, {}, frozenset(), {}, end_of_text(tokenizer))
        return self._role_tokens

    def _read_roles(self, tokenizer: Any, field: str) -> RoleTokens:
        if tokenizer is None:
            raise SteeringError(field, f"the engine has no tokenizer, which has the chat template; {_GIVE_POSITIONS}")
        template = read_template(self._chat_template) if self._chat_template else None
        if self._chat_template and template is None:
            raise SteeringError(field, f"--chat-template is not a file that can be read; {_GIVE_POSITIONS}")
        lists_tokens = hasattr(tokenizer, "added_tokens_decoder")
        if lists_tokens and template is None and not getattr(tokenizer, "chat_template", None):
            raise SteeringError(field, f"the tokenizer has no chat template (--chat-template); {_GIVE_POSITIONS}")
        if not lists_tokens and not hasattr(tokenizer, "all_special_ids"):
            raise SteeringError(field, f"the tokenizer does not list its special tokens; {_GIVE_POSITIONS}")
        return read_role_tokens(tokenizer, template)

    def _of_parser(self, name: str, tokenizer: Any, field: str) -> tuple[Marker, Marker] | None:
        """Return the markers of vLLM's parser for a part; None if the engine has no such parser."""
        settings = self._vllm_config.structured_outputs_config
        reasoning = str(getattr(settings, "reasoning_parser", "") or "")
        parser_name = self._tool_parser if name == "tool_call" else reasoning
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
        SteeringError: A message or an image of the program is not in the prompt, the tokens of a part are not known, or
            the text of a message contains the tokens that would decide.
    """
    program = program_of(request.sampling_params)
    if program is None or not program.needs_prompt:
        return
    tokenizer = input_processor.tokenizer
    if request.prompt_token_ids is None:
        raise SteeringError("steering", "parts of a conversation need a prompt of tokens, not of embeddings")
    prompt = without_placeholders(request.prompt_token_ids, token_mask(request))

    messages = rendered_messages()
    message = markers.open_message(prompt, tokenizer)

    def ranges(name: str, field: str) -> list[tuple[int, int]]:
        return _images(request) if name == IMAGE else markers.find_messages(name, prompt, tokenizer, messages, field)

    def find(part: CompiledPart, field: str) -> Markers | None:
        found = markers.find(part, tokenizer, field)
        if found is not None:
            markers.check_written(found, message, tokenizer, messages, field)
        return found

    bound = bind_to_prompt(program, message, ranges, find)
    request.sampling_params = params = copy.copy(request.sampling_params)
    params.extra_args = {**params.extra_args, PROGRAM_KEY: bound.encode_cached()}
    specs = capture_specs(params)
    if any(spec.tokens.is_prompt_part for _, spec in specs):
        params.extra_args[CAPTURE_KEY] = encode_specs(
            tuple(
                (name, spec.with_changes(positions=bind_selector(spec.tokens, ranges, f"capture.{name}.positions")))
                for name, spec in specs
            )
        )


def _refuse_written(messages: Messages | None, tokens: Iterable[int], tokenizer: Any, field: str) -> None:
    """Raise :class:`SteeringError` if the text of a message contains one of these tokens."""
    if messages is None or not hasattr(tokenizer, "added_tokens_decoder"):
        return  # Mistral's tokenizers make no special tokens of text
    for token in tokens:
        text = tokenizer.decode([token])
        if messages.contain(text):
            raise SteeringError(
                field,
                f"a message contains {shown(text)}, with which the chat template marks messages or parts, so that its "
                f"text would decide what is selected; remove it from the message, or {_GIVE_POSITIONS}",
            )


def _images(request: Any) -> list[tuple[int, int]]:
    """Return the ranges of the prompt's image tokens."""
    ranges = []
    for feature in request.mm_features or ():
        if feature.modality == "image":
            place = feature.mm_position
            # Both ends of a range are included.
            ranges += [(first, last + 1) for first, last in place.extract_embeds_range()]
    return sorted(ranges)


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
