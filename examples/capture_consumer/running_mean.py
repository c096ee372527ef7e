# SPDX-License-Identifier: Apache-2.0
"""A consumer that keeps the mean of each site over all rows of all requests, and writes it when the process ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from vllm_steer.capture import CapturedRequest, Site
from vllm_steer.capture.consumers import Consumer


class RunningMean(Consumer):
    """Options: ``out``, a safetensors file with a mean ``[hidden]`` for each site, called ``point.layer``."""

    name: ClassVar[str] = "running_mean"

    def __init__(self, *, out: str) -> None:
        self._out = Path(out)
        self._sums: dict[Site, torch.Tensor] = {}
        self._counts: dict[Site, int] = {}

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Returns how many rows each site has seen. Called in one thread, so nothing is locked."""
        for site, there in captured.sites.items():
            self._sums[site] = self._sums.get(site, 0) + there.rows.double().sum(0)
            self._counts[site] = self._counts.get(site, 0) + len(there.rows)
        return {"rows": {f"{point}.{layer}": count for (point, layer), count in self._counts.items()}}

    def close(self) -> None:
        """Write the means."""
        means = {f"{p}.{n}": total / max(1, self._counts[p, n]) for (p, n), total in self._sums.items()}
        save_file({name: mean.float() for name, mean in means.items()}, self._out)
