# SPDX-License-Identifier: Apache-2.0
"""Parts common to all capture files: properties of requests, names of dtypes, and errors.

Specification: ``docs/reference/capture-files.md``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from vllm_steer.capture.results import CapturedRequest, SiteRows, Status, Unreached
from vllm_steer.request import CaptureSpec, Projection
from vllm_steer.request.selector import POSITIONS as SPEC_POSITIONS

FORMAT = "vllm-steer capture"
MIN_MAPPED_BYTES = 1 << 16
"""Rows of a site in a safetensors file are mapped from this size on, and copied below it."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""Row dtypes by their safetensors names."""
_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

_POSITION_NAMES: Mapping[str, str] = MappingProxyType({selector: name for name, selector in SPEC_POSITIONS.items()})


class CaptureFileError(ValueError):
    """A file is damaged or not a capture file.

    Examples:
        >>> from vllm_steer import CaptureFileError, open_captures  # doctest: +SKIP
        >>> try:  # doctest: +SKIP
        ...     requests = list(open_captures("acts"))
        ... except CaptureFileError as error:
        ...     print(error)
    """


class RequestEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Properties of one sample of one request."""

    request_id: str
    sample: int
    model: str
    prompt_tokens: int
    output_tokens: int
    status: Status
    spec: dict[str, Any]
    error: str | None = None
    tag: str | None = None
    run: str | None = None
    """Name of the run that wrote the request."""
    submission: int | None = None
    """Number of the request among those submitted in its run, from 0."""
    unreached: Unreached = ()
    """Positions and ``[start, stop]`` pairs of the spec that the request ended before."""
    sites: tuple[Any, ...]
    """The captured sites, each with ``point`` and ``layer``."""


class StoredSite(NamedTuple):
    """Rows of one site of a stored request."""

    rows: torch.Tensor
    """``[n, width]``, memory-mapped and copy-on-write."""
    positions: torch.Tensor
    """int32 ``[tokens]``; as many as rows unless the rows were reduced to one."""
    token_ids: torch.Tensor
    """int32 ``[tokens]``."""


class CaptureFile(ABC):
    """A file of stored requests. A pickled one has no rows; its copy reads them from the file."""

    path: Path

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of requests."""

    @abstractmethod
    def entry(self, index: int) -> RequestEntry:
        """Return the properties of request ``index``, as written."""

    @abstractmethod
    def shape(self, index: int, number: int) -> tuple[int, int, torch.dtype]:
        """Return number, width and dtype of the rows of site ``number`` of request ``index``, without reading them."""

    @abstractmethod
    def site(self, index: int, number: int) -> StoredSite:
        """Return the rows of site ``number`` of request ``index``; raise CaptureFileError if they are damaged."""


def entry_fields(captured: CapturedRequest, run: str | None) -> dict[str, Any]:
    """Return the fields of `RequestEntry` for a request."""
    tag = captured.spec.options.get("tag")
    return {
        "request_id": escape_surrogates(captured.request_id),
        "sample": captured.sample,
        "model": escape_surrogates(captured.model),
        "prompt_tokens": len(captured.prompt_token_ids),
        "output_tokens": len(captured.output_token_ids),
        "status": captured.status,
        "spec": spec_to_dict(captured.spec),
        "error": None if captured.error is None else escape_surrogates(captured.error),
        "tag": None if tag is None else escape_surrogates(tag),
        "run": run,
        "submission": captured.submission,
        "unreached": captured.unreached,
    }


def dtype_name(site: SiteRows) -> str:
    """Check a site's rows and return the safetensors name of their dtype.

    Raises:
        TypeError: The rows are not two-dimensional or not floating point.
        ValueError: The number of rows does not match the positions.
    """
    rows = site.rows
    if rows.dtype not in _DTYPE_NAMES or rows.ndim != 2:
        raise TypeError(f"captured rows must be a [n, width] tensor of floats; got {list(rows.shape)} of {rows.dtype}")
    if rows.shape[0] not in (1, len(site.positions)):
        raise ValueError(f"got {rows.shape[0]} captured rows for {len(site.positions)} positions")
    return _DTYPE_NAMES[rows.dtype]


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
