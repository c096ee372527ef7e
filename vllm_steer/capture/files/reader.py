# SPDX-License-Identifier: Apache-2.0
"""Reader of capture files and directories, whatever their layout.

    for request in open_captures("acts"):
        rows = request.tensor("post_block", 12)  # [n, hidden], memory-mapped
        positions = request.positions("post_block", 12)  # [n]

A directory can be read while it is written to: incomplete files are invisible.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from vllm_steer.capture.files.format import (
    DTYPES,
    FORMAT,
    INDEX,
    POSITIONS,
    SUFFIX,
    TOKEN_IDS,
    VERSION,
    CaptureFileError,
    RequestEntry,
    SiteEntry,
    escape_surrogates,
    hashed_stem,
)
from vllm_steer.capture.results import Site, raise_unknown_site

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
        """Return the complete capture files."""
        if not self.path.is_dir():
            return [self.path]
        found = (path for path in self.path.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def __iter__(self) -> Iterator[StoredRequest]:
        """Iterate over all requests; raise CaptureFileError at a file that cannot be read."""
        for path in self.files():
            yield from CaptureFile(path).requests

    def find(self, request_id: str, sample: int | None = None) -> list[StoredRequest]:
        """Return the requests with an id. There can be several: samples, and clients that reuse ids."""
        files = self.files()
        if self.path.is_dir():  # a single file may have been renamed
            prefix = hashed_stem(request_id, 0).removesuffix("0")
            files = [path for path in files if path.name.startswith(prefix) or not _HASHED_NAME.match(path.name)]
        return [
            request
            for path in files
            for request in CaptureFile(path).requests
            if request.request_id == escape_surrogates(request_id) and sample in (None, request.sample)
        ]


class StoredRequest:
    """One sample of one request in a capture file."""

    def __init__(self, file: CaptureFile, index: int, entry: RequestEntry) -> None:
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
        self._file = file
        self._sites = {(site.point, site.layer): site for site in entry.sites}

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
        site = self._site(point, layer)
        return self._file.rows(site.tensor, site.rows)

    def numpy(self, point: str, layer: int) -> npt.NDArray[Any]:
        """Return the rows of a site as an array; bfloat16 rows are copied to float32."""
        rows = self.tensor(point, layer)
        array: npt.NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return array

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """Return the positions read at a site, int64 ``[n]``, ascending."""
        return self._file.tokens(POSITIONS, self._site(point, layer).tokens).long()

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """Return the token at each of the site's positions, int64 ``[n]``."""
        return self._file.tokens(TOKEN_IDS, self._site(point, layer).tokens).long()

    def __repr__(self) -> str:
        return f"StoredRequest({self.request_id!r}, sample={self.sample}, {len(self._sites)} sites, {self.status})"

    def _site(self, point: str, layer: int) -> SiteEntry:
        try:
            return self._sites[point, layer]
        except KeyError:
            raise_unknown_site(point, layer, self._sites)


class CaptureFile:
    """One capture file. It is mapped when rows are first read, and stays mapped while they are in use."""

    def __init__(self, path: Path) -> None:
        """Read the index.

        Raises:
            CaptureFileError: The file is damaged or not a capture file.
        """
        self.path = path
        entries = _read_index(path)
        self.requests: tuple[StoredRequest, ...] = tuple(StoredRequest(self, i, e) for i, e in enumerate(entries))

    def rows(self, name: str, span: tuple[int, int]) -> torch.Tensor:
        """Return the rows ``span[0]`` to ``span[1]`` of a row tensor; raise CaptureFileError if there are none."""
        return self._slice(name, span, DTYPES, 2)

    def tokens(self, name: str, span: tuple[int, int]) -> torch.Tensor:
        """Return a slice of ``positions`` or ``token_ids``, as `rows` does."""
        return self._slice(name, span, (torch.int32,), 1)

    def _slice(self, name: str, span: tuple[int, int], dtypes: Collection[torch.dtype], ndim: int) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._mapped.get_tensor(name)
        except SafetensorError as error:
            raise CaptureFileError(f"{self.path} is damaged: {error}") from None
        if tensor.dtype not in dtypes or tensor.ndim != ndim:
            raise CaptureFileError(f"{self.path} is damaged: {name} is {list(tensor.shape)} of {tensor.dtype}")
        start, stop = span
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise CaptureFileError(f"{self.path} is damaged: {name} has {tensor.shape[0]} rows, not {start} to {stop}")
        return tensor[start:stop]

    @cached_property
    def _mapped(self) -> Any:
        return safe_open(self.path, framework="pt")


def _read_index(path: Path) -> list[RequestEntry]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CaptureFileError(f"{path} is not a capture file but another safetensors file")
            if metadata.get("version") != VERSION:
                raise CaptureFileError(f"{path} has format version {metadata.get('version')}; supported: {VERSION}")
            if "requests" in metadata:
                text = metadata["requests"].encode()
            else:
                index = file.get_tensor(INDEX)
                if index.dtype != torch.uint8:
                    raise CaptureFileError(f"{path} is damaged: its index is a tensor of {index.dtype}")
                text = index.numpy().tobytes()
        return msgspec.json.decode(text, type=list[RequestEntry])
    except (SafetensorError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # UnicodeError: a damaged byte. RecursionError: JSON nested too deeply.
        raise CaptureFileError(f"{path} cannot be read as a capture file: {error}") from None
