# SPDX-License-Identifier: Apache-2.0
"""Reading captures back: a file, or a folder of files, of any layout.

    for request in open_captures("acts"):
        rows = request.tensor("post_block", 12)          # [n, hidden], mapped from the file
        where = request.positions("post_block", 12)      # [n]

A folder can be read while it is written to: files that are not complete are not seen.
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
    hashed_stem,
    storable,
)
from vllm_steer.capture.results import Site

_HASHED_NAME = re.compile("[0-9a-f]{32}-.*")


def open_captures(path: str | Path) -> Captures:
    """The captures in a file or a folder, which is not searched below its first level; links in it are left alone.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    return Captures(path)


class Captures:
    """The requests in a file or folder, by file name and then in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """The capture files that are complete now."""
        if not self.path.is_dir():
            return [self.path]
        found = (path for path in self.path.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def __iter__(self) -> Iterator[StoredRequest]:
        """Each request in turn; raises CaptureFileError at a file that cannot be read."""
        for path in self.files():
            yield from CaptureFile(path).requests

    def find(self, request_id: str, sample: int | None = None) -> list[StoredRequest]:
        """The requests of that id, which several may have: samples, and clients that reuse ids."""
        stem = hashed_stem(request_id, 0).removesuffix("0")
        files = [path for path in self.files() if path.name.startswith(stem) or not _HASHED_NAME.match(path.name)]
        if not self.path.is_dir():
            files = [self.path]  # it may have been renamed
        return [
            request
            for path in files
            for request in CaptureFile(path).requests
            if request.request_id == storable(request_id) and sample in (None, request.sample)
        ]


class StoredRequest:
    """One sample of one request in a file."""

    def __init__(self, file: CaptureFile, index: int, entry: RequestEntry) -> None:
        self.path = file.path
        self.index = index
        """Its place among the requests of the file."""
        self._file = file
        self._entry = entry
        self._sites = {(site.point, site.layer): site for site in entry.sites}

    @property
    def request_id(self) -> str:
        """What the client called it: free text."""
        return self._entry.request_id

    @property
    def sample(self) -> int:
        """Which of the request's samples, from 0."""
        return self._entry.sample

    @property
    def model(self) -> str:
        """The served model's name."""
        return self._entry.model

    @property
    def tag(self) -> str | None:
        """The spec's ``tag``."""
        return self._entry.tag

    @property
    def status(self) -> str:
        """``ok`` or ``partial``."""
        return self._entry.status

    @property
    def error(self) -> str | None:
        """Why it is not ``ok``."""
        return self._entry.error

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt: positions from here on are of generated tokens."""
        return self._entry.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """How many tokens were generated."""
        return self._entry.output_tokens

    @property
    def spec(self) -> dict[str, Any]:
        """What was asked for, as written; of a projection only the shape of its directions."""
        return self._entry.spec

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites there are."""
        return tuple(self._sites)

    @property
    def num_bytes(self) -> int:
        """What the rows take in the file."""
        return sum(rows.numel() * rows.element_size() for rows in (self.tensor(*site) for site in self.sites))

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """The rows of a site, ``[n, hidden]`` or as reduced, mapped from the file: read when they are touched.

        Writing to it changes this process's memory, never the file. KeyError names the sites there are.
        """
        site = self._site(point, layer)
        return self._file.rows(site.tensor, site.rows)

    def numpy(self, point: str, layer: int) -> npt.NDArray[Any]:
        """As `tensor`; bfloat16, which numpy does not have, becomes float32, and is then a copy."""
        rows = self.tensor(point, layer)
        array: npt.NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return array

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[n]``, ascending: the positions that the site was read at."""
        return self._file.tokens(POSITIONS, self._site(point, layer).tokens).long()

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[n]``: the token at each of those positions."""
        return self._file.tokens(TOKEN_IDS, self._site(point, layer).tokens).long()

    def __repr__(self) -> str:
        return f"StoredRequest({self.request_id!r}, sample={self.sample}, {len(self._sites)} sites, {self.status})"

    def _site(self, point: str, layer: int) -> SiteEntry:
        try:
            return self._sites[point, layer]
        except KeyError:
            known = ", ".join(f"{name}[{number}]" for name, number in self._sites) or "none"
            raise KeyError(f"{point}[{layer}] was not captured; there are: {known}") from None


class CaptureFile:
    """One file. It is mapped when rows are first asked for, and as long as they are held."""

    def __init__(self, path: Path) -> None:
        """Read the file's index; raises CaptureFileError."""
        self.path = path
        entries = _read_index(path)
        self.requests: tuple[StoredRequest, ...] = tuple(StoredRequest(self, i, e) for i, e in enumerate(entries))

    def rows(self, name: str, span: tuple[int, int]) -> torch.Tensor:
        """Rows ``span[0]`` to ``span[1]`` of a tensor of rows; raises CaptureFileError where there are none such."""
        return self._part(name, span, DTYPES, 2)

    def tokens(self, name: str, span: tuple[int, int]) -> torch.Tensor:
        """The same of ``positions`` or ``token_ids``."""
        return self._part(name, span, (torch.int32,), 1)

    def _part(self, name: str, span: tuple[int, int], dtypes: Collection[torch.dtype], ndim: int) -> torch.Tensor:
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
            kind = metadata.get("format"), metadata.get("version")
            if kind != (FORMAT, VERSION):
                raise CaptureFileError(f"{path} is not a capture file of version {VERSION}, but {_named(kind)}")
            if "requests" in metadata:
                text = metadata["requests"].encode()
            else:
                index = file.get_tensor(INDEX)
                if index.dtype != torch.uint8:
                    raise CaptureFileError(f"{path} is damaged: its index is of {index.dtype}")
                text = index.numpy().tobytes()
        return msgspec.json.decode(text, type=list[RequestEntry])
    except (SafetensorError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # A damaged byte may be no UTF-8, and somebody else's file may be as deep as it likes.
        raise CaptureFileError(f"{path} cannot be read as a capture file: {error}") from None


def _named(kind: tuple[str | None, str | None]) -> str:
    return "another safetensors file" if kind[0] != FORMAT else f"of version {kind[1]}"
