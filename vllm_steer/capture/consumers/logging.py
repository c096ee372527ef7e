# SPDX-License-Identifier: Apache-2.0
"""Consumer that logs shapes and norms of the rows."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

import torch

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.results import CapturedRequest

logger = logging.getLogger("vllm_steer.capture")


class LoggingConsumer(Consumer):
    """Logs one line per site to the logger ``vllm_steer.capture`` and keeps no rows."""

    name: ClassVar[str] = "logging"

    def __init__(self, *, level: Literal["debug", "info", "warning"] = "info") -> None:
        """Set the level of the log lines."""
        self._level = logging.getLevelNamesMapping()[level.upper()]

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Log the statistics of each site.

        Returns:
            The statistics by site (``point[layer]``): shape, dtype, and mean, minimum and maximum of the row norms.
            ``not_finite`` counts rows with NaN or infinity, which the norms exclude. Without rows, norms are None.
        """
        sites = {f"{point}[{layer}]": _statistics(site.rows) for (point, layer), site in captured.sites.items()}
        request = f"{captured.request_id[:128]!r}/{captured.sample}"  # quoted: ids may contain line breaks
        logger.log(self._level, "capture of %s: %s, %d sites", request, captured.status, len(sites))
        for name, statistics in sites.items():
            logger.log(
                self._level,
                "capture of %s: %s %s %s, norm %s (%s to %s), %d rows not finite",
                request,
                name,
                statistics["shape"],
                statistics["dtype"],
                *(statistics[key] for key in ("norm_mean", "norm_min", "norm_max", "not_finite")),
            )
        return {"sites": sites}


def _statistics(rows: torch.Tensor) -> dict[str, Any]:
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    finite = norms[torch.isfinite(norms)]
    norm_mean, norm_min, norm_max = (
        (float(f"{norm:.6g}") for norm in (finite.mean(), finite.min(), finite.max()))
        if finite.numel()
        else (None, None, None)
    )
    return {
        "shape": list(rows.shape),
        "dtype": str(rows.dtype).removeprefix("torch."),
        "norm_mean": norm_mean,
        "norm_min": norm_min,
        "norm_max": norm_max,
        "not_finite": norms.numel() - finite.numel(),
    }
