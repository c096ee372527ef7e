# SPDX-License-Identifier: Apache-2.0
"""Progress bar of a sweep or another study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich import progress
from rich.console import Console

if TYPE_CHECKING:
    from vllm_steer.patching.result import PatchingResult


class Progress:
    """A bar on stderr with the number of cells, the failures and the cache hit rate."""

    def __init__(self, name: str = "patching") -> None:
        self._bar = progress.Progress(
            progress.TextColumn(name),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, note="")
        self._started = False

    def show(self, total: int, new: int, result: PatchingResult) -> None:
        """Add ``new`` cells; cells that were run earlier count from the start."""
        if not self._started:
            self._started, new = True, len(result.finished)
        note = f"cached {result.cache_hit_rate:.0%}"
        if result.errors:
            note += f", {len(result.errors)} failed"
        self._bar.update(self._task, total=total, advance=new, note=note)

    def count(self, total: int, new: int, failed: int) -> None:
        """Add ``new`` cells of a study without a result of its own here, such as one that runs on a server."""
        self._bar.update(self._task, total=total, advance=new, note=f"{failed} failed" if failed else "")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
