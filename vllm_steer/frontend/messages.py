# SPDX-License-Identifier: Apache-2.0
"""Messages from which vLLM rendered a prompt, kept beside the prompt until its request is bound.

vLLM's tokenizers read special tokens in the rendered text, whether the chat template or the content of a message wrote
them. Only the messages tell the two apart. A raw prompt has no messages: it means what its tokens say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

_KEY = "steering_messages"
"""Key of vLLM's engine input, a dict of which vLLM reads the keys that it knows."""


class Messages:
    """The messages of one prompt.

    Args:
        conversation: The messages as the chat template got them.
        others: Other arguments of the template, such as tools and documents.
    """

    def __init__(self, conversation: Sequence[Mapping[str, Any]], others: Mapping[str, Any]) -> None:
        self._conversation, self._others = conversation, others

    @property
    def last_role(self) -> str:
        """Role of the last message."""
        return str(self._conversation[-1].get("role", "")) if self._conversation else ""

    def contain(self, text: str) -> bool:
        """Return whether ``text`` is in the messages, whatever whitespace is inside of it or between them.

        Templates strip contents and join the parts of a message.
        """
        wanted = "".join(text.split())
        return bool(wanted) and wanted in self._text

    @cached_property
    def _text(self) -> str:
        strings = [*_strings(self._conversation), *_strings(self._others)]
        return "".join("".join(strings).split())


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of nested lists and dicts in order."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [each for pair in reversed(list(value.items())) for each in reversed(pair)]
        elif isinstance(value, (list, tuple)):
            # The parts of a content, which templates join.
            yield from (str(each["text"]) for each in value if isinstance(each, Mapping) and "text" in each)
            waiting += reversed(value)


_messages: ContextVar[Messages | None] = ContextVar("vllm_steer_messages", default=None)


def rendered_messages() -> Messages | None:
    """Return the messages of the prompt of the request that is being added; None for a raw prompt."""
    return _messages.get()


@contextmanager
def messages_of(prompt: Any) -> Iterator[None]:
    """Make the messages of an engine input available to :func:`rendered_messages`."""
    token = _messages.set(prompt.get(_KEY) if isinstance(prompt, dict) else None)
    try:
        yield
    finally:
        _messages.reset(token)


def keep_messages(
    original: Callable[..., Any], renderer: Any, conversations: Any, chat_params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``BaseRenderer.render_chat`` and keep the messages of each prompt."""
    return _keep(original(renderer, conversations, chat_params, *args, **kwargs), chat_params)


async def keep_messages_async(
    original: Callable[..., Awaitable[Any]],
    renderer: Any,
    conversations: Any,
    chat_params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``BaseRenderer.render_chat_async`` and keep the messages of each prompt."""
    return _keep(await original(renderer, conversations, chat_params, *args, **kwargs), chat_params)


def _keep(rendered: Any, chat_params: Any) -> Any:
    conversations, prompts = rendered
    for conversation, prompt in zip(conversations, prompts, strict=True):
        prompt[_KEY] = Messages(conversation, chat_params.chat_template_kwargs)
    return rendered
