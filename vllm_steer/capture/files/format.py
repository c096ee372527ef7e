# SPDX-License-Identifier: Apache-2.0
"""The one file format of captures: safetensors files that hold the rows of one or many requests.

Every file has row tensors of any names and number, ``positions`` and ``token_ids`` (int32 ``[T]``, side by side), and
an index: the list of its requests as JSON, each site of which names its row tensor and its range of rows there, and its
range in ``positions`` and ``token_ids``. The index stands in the metadata under ``requests``, or, where it is only
known when everything else has been written, in a tensor of bytes named ``index``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.capture.results import CapturedRequest, SiteRows, Status
from vllm_steer.spec import CaptureSpec, Projection
from vllm_steer.spec.capture import POSITIONS as SPEC_POSITIONS

Ints: TypeAlias = npt.NDArray[np.int32]

FORMAT = "vllm-steer capture"
VERSION = "1"
SUFFIX = ".safetensors"
POSITIONS, TOKEN_IDS, INDEX = "positions", "token_ids", "index"
ALIGNMENT = 8
"""Tensors start at multiples of it, so that any dtype can be mapped in place."""

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
)


# Selector -> what users write for it in a spec.
_WRITTEN: Mapping[str, str] = MappingProxyType({selector: written for written, selector in SPEC_POSITIONS.items()})


class CaptureFileError(ValueError):
    """A file that is no capture file, or a damaged one; the text names it."""


class SiteEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the rows of one site are in the file; ranges are half-open."""

    point: str
    layer: int
    dtype: str
    tensor: str
    rows: tuple[int, int]
    tokens: tuple[int, int]
    """Range in ``positions`` and ``token_ids``: as long as ``rows``, but for a reduction to one row."""


class RequestEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the index says of one sample of one request."""

    request_id: str
    sample: int
    model: str
    prompt_tokens: int
    output_tokens: int
    status: Status
    spec: dict[str, Any]
    sites: tuple[SiteEntry, ...]
    error: str | None = None
    tag: str | None = None


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the file: its safetensors dtype, and the bytes it takes from the end of the header on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str], size: int | None = None) -> bytes:
    """The beginning of a safetensors file, padded to ``size`` bytes or else to the alignment.

    Raises:
        ValueError: it does not fit.
    """
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION, **metadata}}
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.stop),
        }
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    whole = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT if size is None else size
    if 8 + len(text) > whole:
        raise ValueError(f"a header of {8 + len(text)} bytes does not fit into {whole}")
    return (whole - 8).to_bytes(8, "little") + text.ljust(whole - 8)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor ``[n, width]`` in row-major order, in place where it is contiguous."""
    return tensor.contiguous().view(torch.uint8).numpy().data


def checked_dtype(there: SiteRows) -> str:
    """The safetensors name of a site's dtype; TypeError or ValueError for rows that no capture has."""
    rows = there.rows
    if rows.dtype not in DTYPES or rows.ndim != 2:
        raise TypeError(f"captured rows are [n, width] of a floating dtype, not {list(rows.shape)} of {rows.dtype}")
    if rows.shape[0] not in (1, len(there.positions)):
        raise ValueError(f"{rows.shape[0]} captured rows do not go with {len(there.positions)} positions")
    return DTYPES[rows.dtype]


class Tokens:
    """The ``positions`` and ``token_ids`` of one request; sites with equal positions share a range.

    ``start`` is how many the file has already; ``stop`` how many it then has.
    """

    def __init__(self, start: int) -> None:
        self.stop = start
        self._arrays: list[tuple[Ints, Ints]] = []
        self._ranges: dict[bytes, tuple[int, int]] = {}

    def add(self, captured: CapturedRequest, positions: npt.NDArray[np.int64]) -> tuple[int, int]:
        """The range of one site's positions."""
        key = positions.tobytes()
        if key not in self._ranges:
            self._arrays.append((positions.astype(np.int32), captured.tokens_at(positions).astype(np.int32)))
            self._ranges[key] = self.stop, self.stop + len(positions)
            self.stop += len(positions)
        return self._ranges[key]

    def arrays(self) -> dict[str, Ints]:
        """Both tensors by name: int32 ``[stop - start]``."""
        none = np.empty(0, np.int32)
        return {
            name: np.concatenate([none, *(pair[i] for pair in self._arrays)])
            for i, name in enumerate((POSITIONS, TOKEN_IDS))
        }


def request_entry(captured: CapturedRequest, sites: Sequence[SiteEntry], tag: str | None) -> RequestEntry:
    """The index entry of a request whose rows are at ``sites``."""
    return RequestEntry(
        request_id=storable(captured.request_id),
        sample=captured.sample,
        model=storable(captured.model),
        prompt_tokens=len(captured.prompt_token_ids),
        output_tokens=len(captured.output_token_ids),
        status=captured.status,
        spec=describe_spec(captured.spec),
        sites=tuple(sites),
        error=None if captured.error is None else storable(captured.error),
        tag=None if tag is None else storable(tag),
    )


def describe_spec(spec: CaptureSpec) -> dict[str, Any]:
    """A spec as users write it, but of a projection only the shape: its directions may be larger than the rows."""
    positions, reduce = spec.tokens.to_wire(), spec.reduce
    return {
        "hooks": {point: layers if layers == "all" else list(layers) for point, layers in spec.hooks},
        "positions": _WRITTEN.get(positions, positions) if isinstance(positions, str) else positions,
        "before": spec.before,
        "dtype": spec.dtype,
        "reduce": {"directions": list(reduce.directions.shape)} if isinstance(reduce, Projection) else reduce,
    }


def hashed_stem(request_id: str, sample: int) -> str:
    """A file name of 32 hexadecimal digits and the sample's number, whatever the client called its request."""
    digest = hashlib.blake2b(storable(request_id).encode(), digest_size=16).hexdigest()
    return f"{digest}-{sample}"


def storable(text: str) -> str:
    """``text`` with half surrogate pairs, which a JSON body can hold and UTF-8 cannot, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
