# SPDX-License-Identifier: Apache-2.0
"""Captured rows of a request, and the results that consumers report."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_steer.request import CaptureSpec

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "partial", "error"]
Site: TypeAlias = tuple[str, int]
"""Point name and layer number."""
Unreached: TypeAlias = tuple[int | list[int | None], ...]
"""Positions and ``[start, stop]`` pairs of a spec; a pair without end has None as its stop."""
NO_TOKEN = -1
"""Token id of the positions of a prompt that have an embedding instead of a token."""


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Rows of one site of one request, ordered by position."""

    positions: npt.NDArray[np.int64]
    """``[n]``, ascending and unique: positions in the prompt and the generated tokens together, from 0."""
    rows: torch.Tensor
    """CPU tensor: ``[n, hidden]``, ``[n, k]`` if projected, ``[1, hidden]`` if reduced to the mean or the last row."""

    def to_json(self) -> dict[str, Any]:
        """Return the rows as JSON types; ``data`` is base64 of the rows, little-endian and row-major."""
        return {
            "positions": self.positions.tolist(),
            "dtype": str(self.rows.dtype).removeprefix("torch."),
            "shape": list(self.rows.shape),
            "data": base64.b64encode(row_bytes(self.rows)).decode("ascii"),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SiteRows:
        """Return the rows that `to_json` has written."""
        import torch

        data = bytearray(base64.b64decode(document["data"]))
        dtype = getattr(torch, document["dtype"])
        rows = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return cls(np.array(document["positions"], np.int64), rows.reshape(document["shape"]))


def row_bytes(rows: torch.Tensor) -> memoryview:
    """Return the bytes of CPU rows ``[n, width]`` in row-major order, without a copy if they are contiguous."""
    import torch

    return rows.contiguous().view(torch.uint8).numpy().reshape(-1).data


class RowAccess:
    """Rows by point and layer."""

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """Return the rows of a site, ``[n, hidden]`` or as reduced.

        Raises:
            KeyError: The site was not captured, or its rows are not here.
        """
        return self._site(point, layer).rows

    def numpy(self, point: str, layer: int) -> npt.NDArray[Any]:
        """Return the rows of a site as an array; bfloat16 rows are copied to float32."""
        import torch

        rows = self.tensor(point, layer)
        array: npt.NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return array

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """Return the positions read at a site, int64 ``[n]``, ascending. A reduction does not shorten them."""
        import torch

        return torch.tensor(self._site(point, layer).positions)

    def _site(self, point: str, layer: int) -> SiteRows:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class SubmittedRequest:
    """One sample of a request that the front end has accepted."""

    request_id: str
    """The client's request id, or vLLM's if the client set none. Arbitrary text: do not use it as a file name."""
    sample: int
    """Number of the sample among the request's ``n`` samples, from 0."""
    submission: int
    """Number of the request among those with captures that the front end accepted, from 0."""
    spec: CaptureSpec
    """The capture spec of the request."""


@dataclass(frozen=True, eq=False)
class CapturedRequest(RowAccess):
    """Rows that one consumer receives for one sample of a finished request.

    The last token has rows only if a readout ended the request (``stop_on``); otherwise it is never forwarded.

    Examples:
        >>> captured = llm.generate("one", params)[0].capture_results["memory"].data  # doctest: +SKIP
        >>> captured.tensor("post_block", 3), captured.positions("post_block", 3)  # doctest: +SKIP
    """

    request_id: str
    """The client's request id, or vLLM's if the client set none. Arbitrary text: do not use it as a file name."""
    sample: int
    """Number of the sample among the request's ``n`` samples, from 0."""
    model: str
    """Name of the served model."""
    prompt_token_ids: tuple[int, ...]
    """Tokens of the prompt; -1 at each position with an embedding (``prompt_embeds``) instead of a token."""
    output_token_ids: tuple[int, ...]
    spec: CaptureSpec
    """The capture spec of the request."""
    sites: Mapping[Site, SiteRows]
    status: Status
    """``ok`` if all rows of the tokens that the request reached are present and exact. ``partial`` if rows are missing
    or overflow the dtype, or if the request reached none of the listed positions. See also `unreached`."""
    error: str | None
    """Reason for a status other than ``ok``."""
    submission: int | None = None
    """Number of the request among those with captures that its front end accepted, from 0."""
    unreached: Unreached = ()
    """Positions and ``[start, stop]`` pairs of the spec that have no rows because the request ended before them."""

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """Return the token at each of the site's positions, int64 ``[n]``; -1 where the prompt has an embedding."""
        import torch

        return torch.tensor(self.tokens_at(self._site(point, layer).positions))

    def tokens_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the token at each of ``positions``, int64 ``[n]``; -1 where the prompt has an embedding."""
        tokens = self.prompt_token_ids + self.output_token_ids
        return np.array([tokens[position] for position in positions.tolist()], dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return sum(site.rows.nbytes for site in self.sites.values())

    @property
    def tag(self) -> str | None:
        """The spec's ``tag``, or None."""
        return self.spec.options.get("tag")

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; later positions are generated tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.output_token_ids)

    def _site(self, point: str, layer: int) -> SiteRows:
        try:
            return self.sites[point, layer]
        except KeyError:
            raise_unknown_site(point, layer, self.sites)


def raise_unknown_site(point: str, layer: int, known: Mapping[Site, Any]) -> NoReturn:
    """Raise a ``KeyError`` that lists the captured sites."""
    sites = ", ".join(f"{name}[{number}]" for name, number in known) or "none"
    raise KeyError(f"{point}[{layer}] was not captured; captured sites: {sites}") from None


@dataclass(frozen=True, eq=False)
class CaptureResult(RowAccess):
    """Result of one consumer for one sample of a request.

    Examples:
        >>> result = llm.generate("one", params)[0].capture_results["memory"]  # doctest: +SKIP
        >>> result.tensor("post_block", 3) if result.status == "ok" else result.error  # doctest: +SKIP
    """

    status: Status
    error: str | None
    """Reason for a status other than ``ok``."""
    data: Any
    """Return value of the consumer: the `CapturedRequest` for ``memory``, ``{"path": ...}`` for ``filesystem``."""
    unreached: Unreached = ()
    """Positions and ``[start, stop]`` pairs of the spec that have no rows because the request ended before them."""

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """Return the tokens of a site; see `CapturedRequest.token_ids`."""
        return self._captured().token_ids(point, layer)

    @property
    def sites(self) -> Mapping[Site, SiteRows]:
        """Rows by site; see `CapturedRequest.sites`."""
        return self._captured().sites

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self._captured().num_bytes

    @property
    def tag(self) -> str | None:
        """The spec's ``tag``, or None."""
        return self._captured().tag

    def _site(self, point: str, layer: int) -> SiteRows:
        return self._captured()._site(point, layer)

    def _captured(self) -> CapturedRequest:
        if isinstance(self.data, CapturedRequest):
            return self.data
        if self.error is not None:
            raise RuntimeError(f"nothing was captured: {self.error}")
        raise TypeError(f"this consumer returned {type(self.data).__name__} instead of rows; see .data")


class CaptureResults(Mapping[str, CaptureResult]):
    """Results by consumer name. Accessing a result blocks until its consumer has finished."""

    def __init__(self, futures: Mapping[str, Future[CaptureResult]]) -> None:
        self.futures = dict(futures)
        """Futures by consumer name, for callers that must not block. They never hold an exception."""

    def __getitem__(self, name: str) -> CaptureResult:
        return self.futures[name].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self.futures)

    def __len__(self) -> int:
        return len(self.futures)

    def __repr__(self) -> str:
        states = {name: "done" if future.done() else "running" for name, future in self.futures.items()}
        return f"CaptureResults({states})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Users copy and pickle vLLM's outputs; futures support neither.
        return _from_results, (dict(self),)


def _from_results(results: dict[str, CaptureResult]) -> CaptureResults:
    return CaptureResults({name: finished(result) for name, result in results.items()})


def finished(result: CaptureResult) -> Future[CaptureResult]:
    """Return a completed future."""
    future: Future[CaptureResult] = Future()
    future.set_result(result)
    return future
