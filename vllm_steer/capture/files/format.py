# SPDX-License-Identifier: Apache-2.0
"""Format of capture files: safetensors files with the rows of one or many requests.

A file has row tensors, the int32 tensors ``positions`` and ``token_ids``, and an index in JSON, which maps each site of
each request to its ranges in these tensors. The index is in the metadata under ``requests``, or in a byte tensor named
``index`` if it is only known after the rows have been written. Specification: ``docs/reference/capture-files.md``.
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
from vllm_steer.spec.selector import POSITIONS as SPEC_POSITIONS

Int32Array: TypeAlias = npt.NDArray[np.int32]

FORMAT = "vllm-steer capture"
VERSION = "1"
SUFFIX = ".safetensors"
POSITIONS, TOKEN_IDS, INDEX = "positions", "token_ids", "index"
ALIGNMENT = 8
"""Alignment of tensors in bytes, so that any dtype can be memory-mapped."""

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
)
"""Row dtypes and their safetensors names."""

_POSITION_NAMES: Mapping[str, str] = MappingProxyType({selector: name for name, selector in SPEC_POSITIONS.items()})


class CaptureFileError(ValueError):
    """A file is damaged or not a capture file.

    Example:
        >>> from vllm_steer import CaptureFileError, open_captures  # doctest: +SKIP
        >>> with contextlib.suppress(CaptureFileError): requests = list(open_captures("acts"))  # doctest: +SKIP
    """


class SiteEntry(msgspec.Struct, frozen=True, omit_defaults=True):
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


class RequestEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Index entry of one sample of one request."""

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
    """A tensor in the safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the end of the header."""
    stop: int


def encode_header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str], size: int | None = None) -> bytes:
    """Return the safetensors header, padded to ``size`` bytes or to the alignment.

    Raises:
        ValueError: The header does not fit into ``size`` bytes.
    """
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION, **metadata}}
    for tensor in tensors:
        offsets = tensor.start, tensor.stop
        table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    total = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT if size is None else size
    if 8 + len(text) > total:
        raise ValueError(f"a header of {8 + len(text)} bytes does not fit into {total} bytes")
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def row_bytes(rows: torch.Tensor) -> memoryview:
    """Return the bytes of CPU rows ``[n, width]`` in row-major order, without a copy if they are contiguous."""
    return rows.contiguous().view(torch.uint8).numpy().data


def dtype_name(site: SiteRows) -> str:
    """Check a site's rows and return the safetensors name of their dtype.

    Raises:
        TypeError: The rows are not two-dimensional or not floating point.
        ValueError: The number of rows does not match the positions.
    """
    rows = site.rows
    if rows.dtype not in DTYPES or rows.ndim != 2:
        raise TypeError(f"captured rows must be a [n, width] tensor of floats; got {list(rows.shape)} of {rows.dtype}")
    if rows.shape[0] not in (1, len(site.positions)):
        raise ValueError(f"got {rows.shape[0]} captured rows for {len(site.positions)} positions")
    return DTYPES[rows.dtype]


class TokenTable:
    """The ``positions`` and ``token_ids`` of one request. Sites with equal positions share a range."""

    def __init__(self, start: int = 0) -> None:
        """Create an empty table.

        Args:
            start: Number of tokens that the file holds already.
        """
        self.stop = start
        self._arrays: list[tuple[Int32Array, Int32Array]] = []
        self._ranges: dict[bytes, tuple[int, int]] = {}

    def add(self, captured: CapturedRequest, positions: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Add one site's positions and return their range in the file."""
        key = positions.tobytes()
        if key not in self._ranges:
            self._arrays.append((positions.astype(np.int32), captured.tokens_at(positions).astype(np.int32)))
            self._ranges[key] = self.stop, self.stop + len(positions)
            self.stop += len(positions)
        return self._ranges[key]

    def arrays(self) -> dict[str, Int32Array]:
        """Return both tensors by name, each int32 ``[stop - start]``."""
        empty = np.empty(0, np.int32)
        return {
            name: np.concatenate([empty, *(pair[i] for pair in self._arrays)])
            for i, name in enumerate((POSITIONS, TOKEN_IDS))
        }


def request_entry(captured: CapturedRequest, sites: Sequence[SiteEntry], tag: str | None) -> RequestEntry:
    """Return the index entry of a request whose rows are at ``sites``."""
    return RequestEntry(
        request_id=escape_surrogates(captured.request_id),
        sample=captured.sample,
        model=escape_surrogates(captured.model),
        prompt_tokens=len(captured.prompt_token_ids),
        output_tokens=len(captured.output_token_ids),
        status=captured.status,
        spec=spec_to_dict(captured.spec),
        sites=tuple(sites),
        error=None if captured.error is None else escape_surrogates(captured.error),
        tag=None if tag is None else escape_surrogates(tag),
    )


def spec_to_dict(spec: CaptureSpec) -> dict[str, Any]:
    """Return a spec in the form that users write.

    Directions of a projection are replaced by their shape, because they may be larger than the rows.
    """
    positions, reduce = spec.tokens.to_wire(), spec.reduce
    return {
        "hooks": {point: layers if layers == "all" else list(layers) for point, layers in spec.hooks},
        "positions": _POSITION_NAMES.get(positions, positions) if isinstance(positions, str) else positions,
        "before": spec.before,
        "dtype": spec.dtype,
        "reduce": {"directions": list(reduce.directions.shape)} if isinstance(reduce, Projection) else reduce,
    }


def hashed_stem(request_id: str, sample: int) -> str:
    """Return a file name without suffix: the hash of the client's request id, and the sample number."""
    digest = hashlib.blake2b(escape_surrogates(request_id).encode(), digest_size=16).hexdigest()
    return f"{digest}-{sample}"


def escape_surrogates(text: str) -> str:
    """Escape unpaired surrogates, which JSON can carry but UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
