# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of captured rows: one request per file.

A file has row tensors, the int32 tensors ``positions`` and ``token_ids``, and the metadata ``requests``, which maps
each site to its ranges in these tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vllm_steer.capture.files.format import (
    DTYPES,
    FORMAT,
    MIN_MAPPED_BYTES,
    CaptureFile,
    CaptureFileError,
    RequestEntry,
    StoredSite,
    dtype_name,
    entry_fields,
)
from vllm_steer.capture.results import CapturedRequest, row_bytes

VERSION = "1"
SUFFIX = ".safetensors"
POSITIONS, TOKEN_IDS = "positions", "token_ids"


class TensorSite(msgspec.Struct, frozen=True):
    """Location of one site's rows in the file. Ranges are half-open."""

    point: str
    layer: int
    dtype: str
    """Safetensors name of the dtype."""
    tensor: str
    """Name of the row tensor."""
    rows: tuple[int, int]
    """Range in the row tensor."""
    tokens: tuple[int, int]
    """Range in ``positions`` and ``token_ids``; as long as ``rows`` unless the rows were reduced to one."""


class TensorEntry(RequestEntry, frozen=True, omit_defaults=True, kw_only=True):
    """Index entry of one sample of one request."""

    sites: tuple[TensorSite, ...]


def encode_request(captured: CapturedRequest, run: str | None = None) -> list[memoryview | bytes]:
    """Return the contents of a file with one request. Row tensors are named ``point.layer``."""
    parts: list[tuple[int, str, str, tuple[int, ...], memoryview]] = []
    sites: list[TensorSite] = []
    ranges: dict[bytes, tuple[int, int]] = {}  # sites with equal positions share a range
    positions = np.empty(0, np.int64)
    for (point, layer), site in captured.sites.items():
        name, dtype, rows = f"{point}.{layer}", dtype_name(site), site.rows
        key = site.positions.tobytes()
        if key not in ranges:
            ranges[key] = len(positions), len(positions) + len(site.positions)
            positions = np.concatenate([positions, site.positions])
        sites.append(TensorSite(point, layer, dtype, name, (0, rows.shape[0]), ranges[key]))
        parts.append((rows.element_size(), name, dtype, tuple(rows.shape), row_bytes(rows)))
    for name, values in ((POSITIONS, positions), (TOKEN_IDS, captured.tokens_at(positions))):
        parts.append((4, name, "I32", values.shape, values.astype(np.int32).view(np.uint8).data))
    parts.sort(key=lambda part: -part[0])  # wider elements first: every tensor is aligned without padding
    index = msgspec.json.encode([TensorEntry(sites=tuple(sites), **entry_fields(captured, run))]).decode()
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION, "requests": index}}
    offset = 0
    for _, name, dtype, shape, data in parts:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, offset + data.nbytes)}
        offset += data.nbytes
    header = json.dumps(table, separators=(",", ":")).encode("ascii")
    header = header.ljust(-(-len(header) // 8) * 8)  # aligned, so that any dtype can be memory-mapped
    return [len(header).to_bytes(8, "little"), header, *(data for *_, data in parts)]


class TensorFile(CaptureFile):
    """A safetensors file. It is mapped when rows are first read, and stays mapped while large rows are in use."""

    def __init__(self, path: Path) -> None:
        """Read the index.

        Raises:
            CaptureFileError: The file is damaged or not a capture file.
        """
        self.path = path
        self._entries = _read_index(path)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, index: int) -> TensorEntry:
        """Return the properties of a request."""
        return self._entries[index]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def shape(self, index: int, number: int) -> tuple[int, int, torch.dtype]:
        """Return number, width and dtype of the rows of a site."""
        site = self._entries[index].sites[number]
        rows = self._slice(site.tensor, site.rows, DTYPES.values(), 2)
        return len(rows), rows.shape[1], rows.dtype

    def site(self, index: int, number: int) -> StoredSite:
        """Return the rows and tokens of a site."""
        site = self._entries[index].sites[number]
        return StoredSite(
            _separate(self._slice(site.tensor, site.rows, DTYPES.values(), 2)),
            _separate(self._slice(POSITIONS, site.tokens, (torch.int32,), 1)),
            _separate(self._slice(TOKEN_IDS, site.tokens, (torch.int32,), 1)),
        )

    def _slice(self, name: str, span: tuple[int, int], dtypes: Collection[torch.dtype], ndim: int) -> torch.Tensor:
        mapped = self._mapped
        try:
            tensor: torch.Tensor = mapped.get_tensor(name)
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


def _separate(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a mapped file as a tensor of its own, with which not the whole file is pickled.

    A small part is copied, because it would keep its file mapped: Linux allows 65,530 mappings per process.
    """
    if part.nbytes < MIN_MAPPED_BYTES:
        return part.clone()
    mapped = part.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(mapped, dtype=torch.uint8).view(part.dtype).view(part.shape)


def _read_index(path: Path) -> list[TensorEntry]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CaptureFileError(f"{path} is not a capture file but another safetensors file")
            if metadata.get("version") != VERSION:
                raise CaptureFileError(f"{path} has format version {metadata.get('version')}; supported: {VERSION}")
        if "requests" not in metadata:
            raise CaptureFileError(f"{path} is damaged: it has no index")
        return msgspec.json.decode(metadata["requests"].encode(), type=list[TensorEntry])
    except (SafetensorError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # UnicodeError: a damaged byte. RecursionError: JSON nested too deeply.
        raise CaptureFileError(
            f"{path} cannot be read as a capture file: {error}; remove it, or copy it again"
        ) from None
