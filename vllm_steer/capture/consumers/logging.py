# SPDX-License-Identifier: Apache-2.0
"""The consumer for a first look: shapes and norms, as lines of the log."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

import torch

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.results import CapturedRequest

logger = logging.getLogger("vllm_steer.capture")


class LoggingConsumer(Consumer):
    """Writes a line per site to the logger ``vllm_steer.capture`` and returns the same numbers; keeps no row."""

    name: ClassVar[str] = "logging"

    def __init__(self, *, level: Literal["debug", "info", "warning"] = "info") -> None:
        self._level = logging.getLevelNamesMapping()[level.upper()]

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Numbers by site, written ``point[layer]``: shape, dtype, and mean, least and greatest norm of a row.

        ``not_finite`` counts the rows with a NaN or an infinity, which the norms leave out. No rows, no norms: None.
        """
        sites = {f"{point}[{layer}]": _numbers(site.rows) for (point, layer), site in captured.sites.items()}
        request = f"{captured.request_id[:128]!r}/{captured.sample}"  # quoted: an id may hold line breaks
        logger.log(self._level, "capture of %s: %s, %d sites", request, captured.status, len(sites))
        for name, numbers in sites.items():
            logger.log(
                self._level,
                "capture of %s: %s %s %s, norm %s (%s to %s), %d rows not finite",
                request,
                name,
                numbers["shape"],
                numbers["dtype"],
                *(numbers[key] for key in ("norm_mean", "norm_min", "norm_max", "not_finite")),
            )
        return {"sites": sites}


def _numbers(rows: torch.Tensor) -> dict[str, Any]:
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    finite = norms[torch.isfinite(norms)]
    some = finite.numel() > 0
    return {
        "shape": list(rows.shape),
        "dtype": str(rows.dtype).removeprefix("torch."),
        "norm_mean": float(f"{finite.mean():.6g}") if some else None,
        "norm_min": float(f"{finite.min():.6g}") if some else None,
        "norm_max": float(f"{finite.max():.6g}") if some else None,
        "not_finite": norms.numel() - finite.numel(),
    }
