# SPDX-License-Identifier: Apache-2.0
"""Reader of capture files and directories, whatever their layout.

    for request in open_captures("acts"):
        rows = request.tensor("post_block", 12)  # [n, hidden], memory-mapped
        positions = request.positions("post_block", 12)  # [n]

A directory can be read while it is written to: every request that was reported as ``ok`` is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from msgspec.structs import astuple

from vllm_steer.capture.files import stream, tensors
from vllm_steer.capture.files.format import CaptureFile, StoredSite, escape_surrogates, hashed_stem
from vllm_steer.capture.files.journal import Submission, read_journals
from vllm_steer.capture.files.stream_file import StreamFile
from vllm_steer.capture.files.tensors import TensorFile
from vllm_steer.capture.results import Site, raise_unknown_site

_FILE_TYPES: dict[str, type[StreamFile | TensorFile]] = {
    stream.SUFFIX: StreamFile,
    tensors.SUFFIX: TensorFile,
}
_HASHED_NAME = re.compile("[0-9a-f]{32}-.*")


def open_captures(path: str | Path) -> Captures:
    """Open a capture file or a directory of capture files. Subdirectories and symbolic links are skipped.

    Raises:
        FileNotFoundError: ``path`` does not exist.

    Example:
        >>> from vllm_steer import open_captures  # doctest: +SKIP
        >>> [request.tensor("post_block", 5).shape for request in open_captures("acts")]  # doctest: +SKIP
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return Captures(path)


class Captures:
    """Requests in a file or directory, ordered by file name and then as written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """Return the capture files."""
        if not self.path.is_dir():
            return [self.path]
        found = (path for path in self.path.iterdir() if path.suffix in _FILE_TYPES and not path.name.startswith("."))
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def __iter__(self) -> Iterator[StoredRequest]:
        """Iterate over all requests; raise CaptureFileError at a file that cannot be read."""
        for path in self.files():
            yield from _read(path)

    def find(self, request_id: str, sample: int | None = None) -> list[StoredRequest]:
        """Return the requests with an id. There can be several: samples, and clients that reuse ids."""
        files = self.files()
        if self.path.is_dir():  # a single file may have been renamed
            prefix = hashed_stem(request_id, 0).removesuffix("0")
            files = [path for path in files if path.name.startswith(prefix) or not _HASHED_NAME.match(path.name)]
        return [
            request
            for path in files
            for request in _read(path)
            if request.request_id == escape_surrogates(request_id) and sample in (None, request.sample)
        ]

    def submitted(self) -> list[Submission]:
        """Return all samples of requests that were submitted, by run and in the order of submission."""
        entries = {entry[:4]: entry for entry in map(astuple, self._journal())}
        return [Submission(*entry) for entry in entries.values()]

    def missing(self) -> list[Submission]:
        """Return the samples that were submitted but are not stored, in the order of submission."""
        stored = {(request.run, request.submission, request.request_id, request.sample) for request in self}
        return [entry for entry in self.submitted() if astuple(entry)[:4] not in stored]

    def _journal(self) -> Iterator[Submission]:
        return read_journals(self.path) if self.path.is_dir() else iter(())


class StoredRequest:
    """One sample of one request in a capture file."""

    def __init__(self, file: CaptureFile, index: int) -> None:
        entry = file.entries[index]
        self.path = file.path
        """The file."""
        self.index = index
        """Place among the requests of the file."""
        self.request_id = entry.request_id
        """The client's request id: arbitrary text."""
        self.sample = entry.sample
        """Number of the sample, from 0."""
        self.model = entry.model
        """Name of the served model."""
        self.tag = entry.tag
        """The spec's ``tag``, or None."""
        self.status = entry.status
        """``ok`` or ``partial``."""
        self.error = entry.error
        """Reason for a status other than ``ok``."""
        self.prompt_tokens = entry.prompt_tokens
        """Length of the prompt; later positions are generated tokens."""
        self.output_tokens = entry.output_tokens
        """Number of generated tokens."""
        self.spec = entry.spec
        """The capture spec as users write it; directions of a projection are replaced by their shape."""
        self.run = entry.run
        """Name of the run that wrote the request, or None in files of earlier versions."""
        self.submission = entry.submission
        """Number of the request among those submitted in its run, from 0; None in files of earlier versions."""
        self._file = file
        self._sites = {site: number for number, site in enumerate(file.site_names(index))}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites."""
        return tuple(self._sites)

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return sum(self.tensor(*site).nbytes for site in self.sites)

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """Return the rows of a site, ``[n, hidden]`` or as reduced, memory-mapped and copy-on-write.

        Raises:
            KeyError: The site was not captured.
            CaptureFileError: The file is damaged.
        """
        return self._site(point, layer).rows

    def numpy(self, point: str, layer: int) -> npt.NDArray[Any]:
        """Return the rows of a site as an array; bfloat16 rows are copied to float32."""
        rows = self.tensor(point, layer)
        array: npt.NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return array

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """Return the positions read at a site, int64 ``[n]``, ascending."""
        return self._site(point, layer).positions.long()

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """Return the token at each of the site's positions, int64 ``[n]``."""
        return self._site(point, layer).token_ids.long()

    def __repr__(self) -> str:
        return f"StoredRequest({self.request_id!r}, sample={self.sample}, {len(self._sites)} sites, {self.status})"

    def _site(self, point: str, layer: int) -> StoredSite:
        if (point, layer) not in self._sites:
            raise_unknown_site(point, layer, self._sites)
        return self._file.site(self.index, self._sites[point, layer])


def _read(path: Path) -> list[StoredRequest]:
    file = _FILE_TYPES.get(path.suffix, TensorFile)(path)
    return [StoredRequest(file, i) for i in range(len(file.entries))]
