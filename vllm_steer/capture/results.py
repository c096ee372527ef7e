# SPDX-License-Identifier: Apache-2.0
"""What was captured of one request, and what a consumer reports about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.spec import CaptureSpec

Status = Literal["ok", "partial", "error"]
Site: TypeAlias = tuple[str, int]
"""A point's name and a layer's number."""


@dataclass(frozen=True, eq=False)
class SiteRows:
    """The rows of one site of one request, in order of position."""

    positions: npt.NDArray[np.int64]
    """``[n]``, ascending, each once: places in prompt and generated tokens together, from 0."""
    rows: torch.Tensor
    """``[n, hidden]`` on the CPU; ``[n, k]`` where projected; ``[1, hidden]`` where reduced to a mean or the last."""


@dataclass(frozen=True, eq=False)
class CapturedRequest:
    """All that one consumer gets of one sample of one request, when the request has finished.

    Rows exist for tokens that were forwarded: the last sampled token is not one of them.
    """

    request_id: str
    """The client's, or vLLM's where the client gave none. Free text: never a file name."""
    sample: int
    """Which of the request's ``n`` samples, from 0."""
    model: str
    """The served model's name."""
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    spec: CaptureSpec
    """What was asked for."""
    sites: Mapping[Site, SiteRows]
    status: Status
    """``ok``: every row that was asked for. ``partial``: what there was up to the time when ``error`` happened, or rows
    with numbers that the dtype does not have."""
    error: str | None

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """The rows of a site, ``[n, hidden]`` or as reduced; KeyError names the sites there are."""
        return self._site(point, layer).rows

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[n]``, ascending: the positions that the site was read at (all of them, also where reduced)."""
        return torch.tensor(self._site(point, layer).positions)

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[n]``: the token at each of the site's positions."""
        return torch.tensor(self.token_array(self._site(point, layer).positions))

    def token_array(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 ``[n]``: the token at each of ``positions`` ``[n]``."""
        tokens = self.prompt_token_ids + self.output_token_ids
        return np.array([tokens[position] for position in positions.tolist()], dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """What the rows take in memory."""
        return sum(site.rows.numel() * site.rows.element_size() for site in self.sites.values())

    def _site(self, point: str, layer: int) -> SiteRows:
        try:
            return self.sites[point, layer]
        except KeyError:
            known = ", ".join(f"{name}[{number}]" for name, number in self.sites) or "none"
            raise KeyError(f"{point}[{layer}] was not captured; there are: {known}") from None


@dataclass(frozen=True, eq=False)
class CaptureResult:
    """What became of a request's capture at one consumer."""

    status: Status
    error: str | None
    """Why it is not ``ok``."""
    data: Any
    """What the consumer returned: the `CapturedRequest` of ``memory``, ``{"path": ...}`` of ``filesystem``."""

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """As `CapturedRequest.tensor`."""
        return self._captured().tensor(point, layer)

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """As `CapturedRequest.positions`."""
        return self._captured().positions(point, layer)

    def token_ids(self, point: str, layer: int) -> torch.Tensor:
        """As `CapturedRequest.token_ids`."""
        return self._captured().token_ids(point, layer)

    @property
    def sites(self) -> Mapping[Site, SiteRows]:
        """As `CapturedRequest.sites`."""
        return self._captured().sites

    def _captured(self) -> CapturedRequest:
        if isinstance(self.data, CapturedRequest):
            return self.data
        if self.error is not None:
            raise RuntimeError(f"nothing was captured: {self.error}")
        raise TypeError(f"this consumer returned {type(self.data).__name__}, not rows: see .data")
