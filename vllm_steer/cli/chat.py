# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer chat``: two conversations side by side, one steered, with the same questions."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.connection import URL, ApiKey, Modules, Url, connected, references
from vllm_steer.cli.output import printable

if TYPE_CHECKING:
    from vllm_steer.client import Client, Piece

HELP = "Type a question. /modules calm=1.5 terse steers with others, /reset forgets what was said, /quit ends."


@dataclass
class Side:
    """One of the two conversations."""

    title: str
    fields: dict[str, Any]
    """Those of its bodies beside the messages."""
    messages: list[dict[str, str]] = field(default_factory=list)
    answer: str = ""


def chat(
    modules: Modules = None,
    system: Annotated[str | None, typer.Option(help="A system message for both.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="Of sampling; at 0, only steering makes a difference.")] = 0.0,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model, steered by modules and plain, side by side. Global steering applies to both."""
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    sides = [Side("plain", dict(settings)), Side("steered", dict(settings))]
    _steer(sides[1], references(modules))
    _reset(sides, system)
    with connected(url, api_key) as client:
        client.model  # noqa: B018 - a server that is not there says so before the first question
        typer.echo(HELP)
        for line in _lines():
            command, _, rest = line.partition(" ")
            if command == "/quit":
                return
            if command == "/reset":
                _reset(sides, system)
            elif command == "/modules":
                _try_to_steer(sides[1], rest.split())
            elif line.startswith("/"):
                typer.echo(HELP)
            elif line:
                _ask(client, sides, line)


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _steer(side: Side, modules: list[tuple[str, float]]) -> None:
    side.fields.pop("steering_modules", None)
    if modules:
        side.fields["steering_modules"] = modules
    side.title = ", ".join(f"{name}={scale:g}" for name, scale in modules) or "steered by nothing"


def _try_to_steer(side: Side, words: list[str]) -> None:
    try:
        _steer(side, references(words))
        typer.echo(f"steered: {side.title}")
    except typer.BadParameter as error:
        typer.echo(f"error: {error}")


def _reset(sides: list[Side], system: str | None) -> None:
    for side in sides:
        side.messages = [] if system is None else [{"role": "system", "content": system}]


def _ask(client: Client, sides: list[Side], question: str) -> None:
    """Put the question to both at once and show their answers as they come; an error is shown, and nothing is kept."""
    from vllm_steer.client import ServerError

    pieces: queue.Queue[tuple[Side, Piece | BaseException | None]] = queue.Queue()
    for side in sides:
        side.answer = ""
        side.messages.append({"role": "user", "content": question})
        threading.Thread(target=_stream, args=(client, side, pieces), daemon=True).start()
    failed: BaseException | None = None
    with _Screen(sides) as screen:
        running = len(sides)
        while running:
            side, piece = pieces.get()
            if piece is None:
                running -= 1
            elif isinstance(piece, BaseException):
                failed = piece
            else:
                side.answer += piece.text
                screen.update()
    for side in sides:
        if failed is None:
            side.messages.append({"role": "assistant", "content": side.answer})
        else:
            side.messages.pop()
    if isinstance(failed, ServerError):
        typer.echo(f"error: {failed}")
    elif failed is not None:
        raise failed


def _stream(client: Client, side: Side, pieces: queue.Queue[tuple[Side, Piece | BaseException | None]]) -> None:
    try:
        for piece in client.stream_chat(side.messages, **side.fields):
            pieces.put((side, piece))
    except Exception as error:  # for the thread that shows it
        pieces.put((side, error))
    finally:
        pieces.put((side, None))


class _Screen:
    """Two columns that grow; elsewhere than on a screen, the finished answers one after the other."""

    def __init__(self, sides: list[Side]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._sides = sides
        self._is_screen = sys.stdout.isatty()
        self._live = Live(console=Console(), refresh_per_second=12, vertical_overflow="visible")

    def __enter__(self) -> _Screen:
        if self._is_screen:
            self._live.start()
        return self

    def update(self) -> None:
        """Show what there is."""
        if self._is_screen:
            self._live.update(self._columns())

    def __exit__(self, *_: object) -> None:
        if self._is_screen:
            self._live.stop()
            return
        for side in self._sides:
            typer.echo(f"[{printable(side.title)}] {_shown(side.answer)}")

    def _columns(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True, show_lines=False)
        for side in self._sides:
            table.add_column(Text(printable(side.title)), ratio=1, overflow="fold")
        table.add_row(*(Text(_shown(side.answer)) for side in self._sides))
        return table


def _shown(answer: str) -> str:
    """A model's text, without what could move the cursor."""
    return "\n".join(printable(line) for line in answer.split("\n"))
