# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer chat``: a plain and a steered conversation side by side, with the same questions."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, Modules, Url, connect, parse_modules
from vllm_steer.cli.output import printable

if TYPE_CHECKING:
    from vllm_steer.client import Client, Piece

HELP = "Type a question. /modules calm=1.5 terse changes the steering, /reset clears the conversation, /quit ends."


@dataclass
class Conversation:
    """One column: its messages, and the answer that is being streamed."""

    title: str
    fields: dict[str, Any]
    """Body fields besides the messages."""
    messages: list[dict[str, str]] = field(default_factory=list)
    answer: str = ""

    def steer(self, modules: list[tuple[str, float]]) -> None:
        """Steer the following answers by ``modules``."""
        self.fields.pop("steering_modules", None)
        if modules:
            self.fields["steering_modules"] = modules
        self.title = ", ".join(f"{name}={scale:g}" for name, scale in modules) or "no modules"

    def reset(self, system: str | None) -> None:
        """Clear the messages, except for the system message."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]


Update: TypeAlias = "tuple[Conversation, Piece | Exception | None]"
"""A streamed piece, the error that ended the stream, or None at its end."""


def chat(
    modules: Modules = None,
    system: Annotated[str | None, typer.Option(help="System message of both conversations.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="At 0, only steering makes the answers differ.")] = 0.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model, plain and steered by modules, side by side. Global steering applies to both.

    Exits with status 1 if a question or a command failed.
    """
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    plain, steered = Conversation("plain", dict(settings)), Conversation("", dict(settings))
    conversations = [plain, steered]
    steered.steer(parse_modules(modules))
    for conversation in conversations:
        conversation.reset(system)
    failed = False
    with connect(url, api_key) as client:
        client.model  # noqa: B018 - fails before the first question if the server is unreachable
        typer.echo(HELP)
        for line in _read_lines():
            command, _, rest = line.partition(" ")
            if command == "/quit":
                break
            if command == "/reset":
                for conversation in conversations:
                    conversation.reset(system)
            elif command == "/modules":
                try:
                    steered.steer(parse_modules(rest.split()))
                    typer.echo(f"modules: {steered.title}")
                except typer.BadParameter as error:
                    typer.echo(f"error: {error}", err=True)
                    failed = True
            elif line.startswith("/"):
                typer.echo(HELP)
            elif line:
                failed |= not _ask(client, conversations, line)
    if failed:
        raise typer.Exit(1)


def _read_lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _ask(client: Client, conversations: list[Conversation], question: str) -> bool:
    """Ask both conversations at once and show the streamed answers. After an error, neither keeps the question.

    Returns:
        Whether the server answered both.
    """
    from vllm_steer.client import ServerError

    updates: queue.Queue[Update] = queue.Queue()
    for conversation in conversations:
        conversation.answer = ""
        conversation.messages.append({"role": "user", "content": question})
        threading.Thread(target=_stream, args=(client, conversation, updates), daemon=True).start()
    failure: Exception | None = None
    with _Columns(conversations) as columns:
        running = len(conversations)
        while running:
            conversation, update = updates.get()
            if update is None:
                running -= 1
            elif isinstance(update, Exception):
                failure = update
            else:
                conversation.answer += update.text
                columns.update()
    for conversation in conversations:
        if failure is None:
            conversation.messages.append({"role": "assistant", "content": conversation.answer})
        else:
            conversation.messages.pop()
    if isinstance(failure, ServerError):
        typer.echo(f"error: {failure}", err=True)
    elif failure is not None:
        raise failure
    return failure is None


def _stream(client: Client, conversation: Conversation, updates: queue.Queue[Update]) -> None:
    try:
        for piece in client.stream_chat(conversation.messages, **conversation.fields):
            updates.put((conversation, piece))
    except Exception as error:  # raised again in the main thread
        updates.put((conversation, error))
    finally:
        updates.put((conversation, None))


class _Columns:
    """Two growing columns in a terminal; in a pipe, the finished answers one after the other."""

    def __init__(self, conversations: list[Conversation]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._conversations = conversations
        self._is_terminal = sys.stdout.isatty()
        self._live = Live(console=Console(), refresh_per_second=12, vertical_overflow="visible")

    def __enter__(self) -> _Columns:
        if self._is_terminal:
            self._live.start()
        return self

    def update(self) -> None:
        """Redraw both answers."""
        if self._is_terminal:
            self._live.update(self._table())

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._live.stop()
            return
        for conversation in self._conversations:
            typer.echo(f"[{printable(conversation.title)}] {_printable_lines(conversation.answer)}")

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True, show_lines=False)
        for conversation in self._conversations:
            table.add_column(Text(printable(conversation.title)), ratio=1, overflow="fold")
        table.add_row(*(Text(_printable_lines(conversation.answer)) for conversation in self._conversations))
        return table


def _printable_lines(answer: str) -> str:
    return "\n".join(printable(line) for line in answer.split("\n"))
