# SPDX-License-Identifier: Apache-2.0
"""A consumer that averages the rows of all requests per site and writes the means when it is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from vllm_steer.capture import CapturedRequest, Site
from vllm_steer.capture.consumers import Consumer


class RunningMean(Consumer):
    """Consumer that writes the mean row of each site to a safetensors file.

    Args:
        out: Path of the file. Its tensors ``point.layer`` have the shape ``[hidden]``.
    """

    name: ClassVar[str] = "running_mean"

    def __init__(self, *, out: str) -> None:
        self._out = Path(out)
        self._sums: dict[Site, torch.Tensor] = {}
        self._counts: dict[Site, int] = {}

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Add a request's rows, and return the number of rows per site. Called from one thread only."""
        for site, there in captured.sites.items():
            self._sums[site] = self._sums.get(site, 0) + there.rows.double().sum(0)
            self._counts[site] = self._counts.get(site, 0) + len(there.rows)
        return {"rows": {f"{point}.{layer}": count for (point, layer), count in self._counts.items()}}

    def close(self) -> None:
        """Write the means."""
        means = {f"{p}.{n}": total / max(1, self._counts[p, n]) for (p, n), total in self._sums.items()}
        save_file({name: mean.float() for name, mean in means.items()}, self._out)
