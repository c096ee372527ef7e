# SPDX-License-Identifier: Apache-2.0
"""The results of a dose study as JSON lines: the study, then one line for each generated text."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from vllm_steer.errors import SteeringError

Kind = Literal["plain", "vector", "random", "shuffled"]


class Study(msgspec.Struct, frozen=True):
    """Settings of a study. A file has results of equal settings only."""

    model: str
    vectors: str
    """Digest of the vectors."""
    point: str
    layers: tuple[int, ...]
    doses: tuple[float, ...]
    score: str
    prompts: str
    """Digest of the prompts."""
    held_out: tuple[int, ...]
    """Numbers of the prompts that choose nothing."""
    controls: int
    shuffles: int
    seed: int
    max_tokens: int
    tokens: str
    sampling: str
    version: int = 1


class Sample(msgspec.Struct, frozen=True):
    """One generated text."""

    kind: Kind
    number: int
    """Number of the random or shuffled direction."""
    layer: int
    """-1 without steering."""
    dose: float
    prompt: int
    text: str
    score: float
    loss: float | None
    """Mean negative log-probability of the tokens under the model without steering, in nats; None without tokens."""
    tokens: int
    repetition: float

    @property
    def key(self) -> tuple[Kind, int, int, float, int]:
        """Identity of the text within its study."""
        return self.kind, self.number, self.layer, self.dose, self.prompt


class SampleFile:
    """A file to which the samples of a study are added, and from which an interrupted study goes on."""

    def __init__(self, path: Path, study: Study) -> None:
        """Open or create the file, and lock it until `close`.

        Raises:
            SteeringError: It has the results of another study, a running process writes it, or it cannot be written.
        """
        self.path = path
        self.samples: list[Sample] = []
        try:
            self._locked = path.open("ab")
            try:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._begin(study)
            except BaseException:
                self.close()
                raise
        except BlockingIOError:
            raise SteeringError("out", f"a running process writes {path}; end it, or use another file") from None
        except OSError as error:
            raise SteeringError("out", f"{path} cannot be used: {error.strerror or error}") from None

    def close(self) -> None:
        """Release the file."""
        self._locked.close()

    def _begin(self, study: Study) -> None:
        """Write the study into an empty file, or read the samples of another one."""
        if not self.path.stat().st_size:
            self._append([study])
            return
        found, self.samples, size = read_samples(self.path)
        if names := [n for n in study.__struct_fields__ if getattr(found, n) != getattr(study, n)]:
            problem = f"{self.path} has the results of another study (other {', '.join(names)})"
            raise SteeringError("out", f"{problem}; use another file, or remove this one")
        os.truncate(self.path, size)  # a line that a killed process did not complete

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples; they are on the disk when this returns.

        Raises:
            SteeringError: They cannot be written; those of earlier calls are.
        """
        try:
            self._append(samples)
        except OSError as error:
            problem = f"{self.path} cannot be written: {error.strerror or error}; it has {len(self.samples)} results"
            raise SteeringError("out", f"{problem}. Make room and run the same study again: it goes on") from None
        self.samples += samples

    def _append(self, lines: Iterable[Study | Sample]) -> None:
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        with self.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_samples(path: str | Path) -> tuple[Study, list[Sample], int]:
    """Return the study of a file, its samples, and the size of the lines that are complete.

    Raises:
        SteeringError: The file cannot be read or is not one of a dose study.
    """
    try:
        data = Path(path).read_bytes()
        size = data.rfind(b"\n") + 1
        first, *lines = data[:size].splitlines() or [b""]
        study = msgspec.json.decode(first, type=Study)
        decoder = msgspec.json.Decoder(Sample)
        samples = {sample.key: sample for sample in map(decoder.decode, lines)}
    except OSError as error:
        raise SteeringError("results", f"{path} cannot be read: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise SteeringError("results", f"{path} is not a file of a dose study: {error}; use another file") from None
    return study, list(samples.values()), size
