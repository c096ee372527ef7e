# SPDX-License-Identifier: Apache-2.0
"""Shards of a harvest on several engines, which write to one folder of a shared file system.

A shard is a run of texts, and its files are its batches. A file gets its name, which depends on the run and the batch
only, when it is complete: an engine that takes over a shard skips the files that are there, and one that was thought
lost replaces a file by an equal one. Incomplete files are in a hidden folder of the run. The next harvest removes that
folder before it looks what is stored, so engines that outlive their run cannot add a file.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_steer.capture.files.layouts import timestamped_stem
from vllm_steer.capture.files.stream import END_OF_STREAM, SUFFIX, StreamEncoder
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.lab.examples import TextLine
from vllm_steer.lab.ray_engines import RayEngines
from vllm_steer.lab.text_rows import TextRows

RUN = "harvest"
"""Name of the run in the folder's files."""
SHARD_TEXTS = 1024
"""Most texts of a shard."""
_SHARDS_PER_ENGINE = 8
_PARTS = ".shards-"
Batch = TypeVar("Batch", bound=Sized)


def write_behind(batches: Generator[Batch], write: Callable[[Batch], object]) -> Generator[int]:
    """Write each batch while the next one runs, and close the generator; yield the length of each written batch."""
    with closing(batches), ThreadPoolExecutor(1) as pool:
        last: tuple[Future[object], int] | None = None
        for batch in batches:
            if last is not None:
                last[0].result()
                yield last[1]
            last = pool.submit(write, batch), len(batch)
        if last is not None:
            last[0].result()
            yield last[1]


def remove_parts(folder: Path) -> None:
    """Remove incomplete files of killed runs; their engines, if some still run, cannot write to the folder any more."""
    for parts in folder.glob(f"{_PARTS}*"):
        while parts.exists():  # an engine may create a file meanwhile
            shutil.rmtree(parts, ignore_errors=True)


@dataclass(frozen=True)
class _Shard:
    """Texts that one engine writes to files."""

    parts: Path
    """Hidden folder of the run."""
    start: int
    """Nanoseconds since 1970 when the run began."""
    settings: Any
    numbers: Sequence[int]

    def file(self, first: int) -> Path:
        """Return the path of the batch whose first text has this number."""
        ending = self.parts.name.removeprefix(_PARTS)
        return self.parts.parent / (timestamped_stem("sharded", self.start + first, ending) + SUFFIX)


class ShardTask:
    """Work of an engine on a shard: runs its texts and writes their rows."""

    def __init__(self, lines: Sequence[TextLine], given: Mapping[str, Any], describe: Callable[..., Any]) -> None:
        """Create the task, which is pickled.

        Args:
            lines: All texts.
            given: Arguments of `TextRows`.
            describe: Returns the settings of the harvest for `TextRows` and ``given``.
        """
        self._lines, self._given, self._describe = lines, given, describe
        self._read: tuple[TextRows, Any] | None = None

    def __call__(self, llm: Any, shard: _Shard | None) -> Any:
        """Write a shard; without one, return the settings."""
        if self._read is None:
            rows = TextRows(llm, self._lines, **self._given)
            self._read = rows, self._describe(rows, self._given)
        rows, settings = self._read
        if shard is None:
            return settings
        if settings != shard.settings:
            problem = f"the node {socket.gethostname()} has another model or vLLM: {settings}, not {shard.settings}"
            raise SteeringError("ray", problem)
        missing = [batch for batch in rows.split(shard.numbers) if not shard.file(batch[0]).exists()]
        return sum(write_behind(rows.batches(missing), lambda captured: _write(captured, shard)))

    def settings(self, engines: RayEngines) -> Any:
        """Return the settings of the harvest, for which an engine checks all texts."""
        ((_, settings),) = engines.map(self, [None])
        return settings

    def run(self, engines: RayEngines, folder: Path, settings: Any, left: Sequence[int]) -> Generator[int]:
        """Write the texts ``left`` on all engines; yield the number of texts of each shard that is written."""
        parts, start = folder / f"{_PARTS}{secrets.token_hex(4)}", time.time_ns()
        size = max(1, min(SHARD_TEXTS, len(left) // (engines.count * _SHARDS_PER_ENGINE)))
        shards = [_Shard(parts, start, settings, left[i : i + size]) for i in range(0, len(left), size)]
        parts.mkdir()
        try:
            with closing(engines.map(self, shards)) as written:
                for shard, _ in written:
                    yield len(shard.numbers)
        finally:
            remove_parts(folder)


def _write(captured: Sequence[CapturedRequest], shard: _Shard) -> None:
    path, encoder = shard.file(captured[0].submission or 0), StreamEncoder()
    part = shard.parts / f"{path.name}.{secrets.token_hex(4)}"
    try:
        try:
            with part.open("xb") as file:
                for each in captured:
                    file.writelines(encoder.encode(each, RUN))
                file.write(END_OF_STREAM)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        problem = f"{path.parent} cannot be written on {socket.gethostname()}: {error.strerror or error}"
        hint = "All nodes must share this folder; when they can write, run the same harvest again"
        raise SteeringError("out", f"{problem}. {hint}") from None
