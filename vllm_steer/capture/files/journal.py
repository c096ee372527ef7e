# SPDX-License-Identifier: Apache-2.0
"""Journal of submitted requests: which requests of a run should be in the directory.

A journal is a text file with one JSON object per line, ``requests-TIME-RANDOM.jsonl``. Requests in a journal that are
not stored are missing, for instance because the process was killed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_steer.capture.files.directory import CaptureDirectory, OutputFile
from vllm_steer.capture.files.format import CaptureFileError, escape_surrogates
from vllm_steer.capture.files.layouts import timestamped_stem
from vllm_steer.capture.results import SubmittedRequest

PREFIX, SUFFIX = "requests", ".jsonl"


class Submission(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample of a request that was submitted."""

    run: str
    """Name of the run."""
    submission: int
    """Number of the request among those submitted in its run, from 0."""
    request_id: str
    """The client's request id: arbitrary text."""
    sample: int
    """Number of the sample, from 0."""
    tag: str | None = None
    """The spec's ``tag``, or None."""
    error: str | None = None
    """Reason for a failed write; None in the entry of a submission."""


class SubmissionJournal:
    """Writer of a journal, which is created with the first request."""

    def __init__(self, directory: CaptureDirectory, run: str) -> None:
        self._directory = directory
        self._run = run
        self._file: OutputFile | None = None

    def add(self, submitted: SubmittedRequest, error: str | None = None) -> None:
        """Append a request, or why it failed.

        Raises:
            CaptureWriteError: The line cannot be written.
        """
        tag = submitted.spec.options.get("tag")
        entry = Submission(
            self._run,
            submitted.submission,
            escape_surrogates(submitted.request_id),
            submitted.sample,
            None if tag is None else escape_surrogates(tag),
            None if error is None else escape_surrogates(error),
        )
        if self._file is not None and not self._file.is_in_place():
            self.close()
        if self._file is None:
            stem = timestamped_stem(PREFIX, time.time_ns())
            self._file = self._directory.create(stem, SUFFIX, hidden=False)
        self._file.append([msgspec.json.encode(entry) + b"\n"])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journals(root: Path) -> Iterator[Submission]:
    """Yield the submitted requests of a directory, by journal and as written. An incomplete last line is skipped.

    Raises:
        CaptureFileError: A journal is damaged.
    """
    for path in sorted(root.glob(f"{PREFIX}-*{SUFFIX}")):
        if path.is_file() and not path.is_symlink():
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
                try:
                    yield msgspec.json.decode(line, type=Submission)
                except (msgspec.MsgspecError, UnicodeError) as error:
                    raise CaptureFileError(f"{path} is damaged in line {number}: {error}") from None
