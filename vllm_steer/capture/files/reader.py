# SPDX-License-Identifier: Apache-2.0
"""Reader of capture files and directories, whatever their layout.

    captures = open_captures("acts", run="baseline")
    for prompt, request in zip(prompts, captures, strict=True):  # in the order of submission
        rows = request.tensor("post_block", 12)  # [n, hidden], memory-mapped
        positions = request.positions("post_block", 12)  # [n]

A directory can be read while it is written to: every request that was reported as ``ok`` is found.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, overload

import torch
from msgspec.structs import astuple

from vllm_steer.capture.files import stream, tensors
from vllm_steer.capture.files.dataset import RowDataset
from vllm_steer.capture.files.format import CaptureFile, StoredSite, escape_surrogates, hashed_stem
from vllm_steer.capture.files.journal import Submission, read_journals
from vllm_steer.capture.files.stream_file import StreamFile
from vllm_steer.capture.files.tensors import TensorFile
from vllm_steer.capture.results import RowAccess, Site, SiteRows, raise_unknown_site

_FILE_TYPES: dict[str, type[StreamFile | TensorFile]] = {
    stream.SUFFIX: StreamFile,
    tensors.SUFFIX: TensorFile,
}
_HASHED_NAME = re.compile("[0-9a-f]{32}-.*")


_MAX_OPEN = 8
"""Safetensors files whose index is kept between requests. Streams are kept all: they hold many requests."""


def open_captures(path: str | Path, run: str | None = None) -> Captures:
    """Open a capture file or a directory of capture files. Subdirectories and symbolic links are skipped.

    Args:
        path: The file or directory. A leading ``~`` is the home directory.
        run: Select the requests of one run, by its name (option ``run`` of the consumer).

    Raises:
        FileNotFoundError: ``path`` does not exist.
        CaptureFileError: A file is damaged or not a capture file.
        ValueError: There is no such run.

    Examples:
        >>> from vllm_steer import open_captures  # doctest: +SKIP
        >>> [request.tensor("post_block", 5).shape for request in open_captures("acts")]  # doctest: +SKIP
    """
    path = Path(path).expanduser()  # as the consumer does with its root
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    captures = Captures(path, run)
    # The length needs the index of every file, so a damaged one is found here.
    if not len(captures) and run is not None and not captures.runs:
        raise ValueError(f"{path} has no run {run!r}; runs: {', '.join(map(repr, Captures(path).runs)) or 'none'}")
    return captures


class _Place(NamedTuple):
    """Place of a request in the order of submission, and in its file."""

    run_number: int
    run: str
    submission: int
    sample: int
    path: Path
    number: int


class Captures(Sequence["StoredRequest"]):
    """Requests in a file or directory: run by run, in the order of submission, then by sample.

    Runs are in the order of their first request. Requests without a run, of files that a server returned, come first,
    by file name. The directory is listed once; call `open_captures` again to find later ones.
    """

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.path = path
        self.run = run
        """Name of the selected run, or None for all."""
        self._streams: dict[Path, StreamFile] = {}
        self._recent: OrderedDict[Path, TensorFile] = OrderedDict()

    def files(self) -> list[Path]:
        """Return the capture files."""
        if not self.path.is_dir():
            return [self.path]
        found = (path for path in self.path.iterdir() if path.suffix in _FILE_TYPES and not path.name.startswith("."))
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs, in order. A run is in the list once a request was submitted."""
        stored = (place.run for place in self._places if place.run)
        return tuple(dict.fromkeys((*(entry.run for entry in self.submitted()), *stored)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> StoredRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredRequest]: ...
    def __getitem__(self, index: int | slice) -> StoredRequest | list[StoredRequest]:
        """Return one request or several, by their place in the order of submission."""
        if isinstance(index, slice):
            return [self._request(place) for place in self._places[index]]
        return self._request(self._places[index])

    def __iter__(self) -> Iterator[StoredRequest]:
        """Iterate in the order of submission."""
        return map(self._request, self._places)

    def dataset(self, point: str, layer: int) -> RowDataset:
        """Return the rows of one site of all requests that captured it, for ``torch.utils.data.DataLoader``.

        Raises:
            KeyError: No request captured the site.
            ValueError: The rows differ in width or dtype.

        Examples:
            >>> rows = open_captures("acts").dataset("post_block", 5)  # doctest: +SKIP
            >>> loader = DataLoader(rows, batch_size=512, shuffle=True, num_workers=2)  # doctest: +SKIP
        """
        return RowDataset(self, point, layer)

    def find(
        self, request_id: str | None = None, sample: int | None = None, *, tag: str | None = None
    ) -> list[StoredRequest]:
        """Return the requests with an id, sample number or tag, in the order of submission.

        An id can have several requests: samples, runs, and clients that reuse ids.
        """
        places = self._places
        if request_id is not None and self.path.is_dir():  # a single file may have been renamed
            prefix = hashed_stem(request_id, 0).removesuffix("0")
            names = {path: path.name for path in self.files()}
            places = self._list(
                path for path, name in names.items() if name.startswith(prefix) or not _HASHED_NAME.match(name)
            )
        return [
            request
            for request in map(self._request, places)
            if request_id is None or request.request_id == escape_surrogates(request_id)
            if sample in (None, request.sample)
            if tag is None or request.tag == escape_surrogates(tag)
        ]

    @cached_property
    def _places(self) -> list[_Place]:
        return self._list(self.files())

    def _list(self, files: Iterable[Path]) -> list[_Place]:
        """Return the places of the selected run's requests in ``files``, in order."""
        numbers = {run: number for number, run in enumerate(dict.fromkeys(entry.run for entry in self._journal()))}
        return sorted(
            _Place(
                -1 if request.run is None else numbers.get(request.run, len(numbers)),
                request.run or "",
                -1 if request.submission is None else request.submission,
                0 if request.submission is None else request.sample,
                path,
                request.index,
            )
            for path in files
            for request in self._requests(path)
            if self.run in (None, request.run)
        )

    def _request(self, place: _Place) -> StoredRequest:
        return StoredRequest(self._file(place.path), place.number)

    def _requests(self, path: Path) -> Iterator[StoredRequest]:
        file = self._file(path)
        return (StoredRequest(file, i) for i in range(len(file)))

    def _file(self, path: Path) -> StreamFile | TensorFile:
        file = self._streams.get(path, self._recent.get(path))
        if file is None:
            file = _FILE_TYPES.get(path.suffix, TensorFile)(path)
        if isinstance(file, StreamFile):
            self._streams[path] = file
        else:
            self._recent[path] = file
            self._recent.move_to_end(path)
            if len(self._recent) > _MAX_OPEN:
                self._recent.popitem(last=False)
        return file

    def submitted(self) -> list[Submission]:
        """Return all samples of requests that were submitted, by run and in the order of submission."""
        selected = (entry for entry in self._journal() if self.run in (None, entry.run))
        entries = {entry[:4]: entry for entry in map(astuple, selected)}
        # A resumed run has several journals; runs that were written in between, or a clock that went back, divide them.
        numbers = {run: number for number, run in enumerate(dict.fromkeys(run for run, *_ in entries))}
        in_order = sorted(entries.values(), key=lambda entry: (numbers[entry[0]], entry[1], entry[3]))
        return [Submission(*entry) for entry in in_order]

    def missing(self) -> list[Submission]:
        """Return the samples that were submitted but are not stored, in the order of submission."""
        stored = {(request.run, request.submission, request.request_id, request.sample) for request in self}
        return [entry for entry in self.submitted() if astuple(entry)[:4] not in stored]

    def _journal(self) -> Iterator[Submission]:
        return read_journals(self.path) if self.path.is_dir() else iter(())


class StoredRequest(RowAccess):
    """One sample of one request in a capture file."""

    def __init__(self, file: CaptureFile, index: int) -> None:
        entry = file.entry(index)
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
        self.num_prompt_tokens = entry.prompt_tokens
        """Length of the prompt; later positions are generated tokens."""
        self.num_output_tokens = entry.output_tokens
        """Number of generated tokens."""
        self.spec = entry.spec
        """The capture spec as users write it; directions of a projection are replaced by their shape."""
        self.run = entry.run
        """Name of the run that wrote the request, or None in a file that a server returned."""
        self.submission = entry.submission
        """Number of the request among those submitted in its run, from 0."""
        self.unreached = entry.unreached
        """Positions and ``[start, stop]`` pairs of the spec that the request ended before."""
        self._file = file
        self._sites = {(site.point, site.layer): number for number, site in enumerate(entry.sites)}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites."""
        return tuple(self._sites)

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return sum(self.tensor(*site).nbytes for site in self.sites)

    def shape(self, point: str, layer: int) -> tuple[int, int, torch.dtype]:
        """Return number, width and dtype of the rows of a site, without reading them."""
        return self._file.shape(self.index, self._number(point, layer))

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """Return the rows of a site, ``[n, hidden]`` or as reduced.

        Rows of streams, and large ones of safetensors files, are memory-mapped, copy-on-write.

        Raises:
            KeyError: The site was not captured.
            CaptureFileError: The file is damaged.
        """
        return super().tensor(point, layer)

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """Return the token at each of the site's positions, int64 ``[n]``; -1 where the prompt has an embedding."""
        return self._stored(point, layer).token_ids.long()

    def __repr__(self) -> str:
        return f"StoredRequest({self.request_id!r}, sample={self.sample}, {len(self._sites)} sites, {self.status})"

    def _site(self, point: str, layer: int) -> SiteRows:
        stored = self._stored(point, layer)
        return SiteRows(stored.positions.long().numpy(), stored.rows)

    def _stored(self, point: str, layer: int) -> StoredSite:
        return self._file.site(self.index, self._number(point, layer))

    def _number(self, point: str, layer: int) -> int:
        if (point, layer) not in self._sites:
            raise_unknown_site(point, layer, self._sites)
        return self._sites[point, layer]
