# SPDX-License-Identifier: Apache-2.0
"""A consumer that computes the mean of each site over all rows of all requests and saves it when the process ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from vllm_steer.capture import CapturedRequest, Site
from vllm_steer.capture.consumers import Consumer


class RunningMean(Consumer):
    """Mean row of each site.

    The option ``out`` is the safetensors file of the means; its tensors ``[hidden]`` are named ``point.layer``.
    """

    name: ClassVar[str] = "running_mean"

    def __init__(self, *, out: str) -> None:
        self._out = Path(out)
        self._sums: dict[Site, torch.Tensor] = {}
        self._counts: dict[Site, int] = {}

    def accept(self, captured: CapturedRequest) -> dict[str, Any]:
        """Add the rows of one sample and return the number of rows so far. Runs in one thread, so needs no lock."""
        for site, captured_rows in captured.sites.items():
            self._sums[site] = self._sums.get(site, 0) + captured_rows.rows.double().sum(0)
            self._counts[site] = self._counts.get(site, 0) + len(captured_rows.rows)
        return {"rows": {f"{point}.{layer}": count for (point, layer), count in self._counts.items()}}

    def close(self) -> None:
        """Save the means."""
        means = {f"{p}.{n}": total / max(1, self._counts[p, n]) for (p, n), total in self._sums.items()}
        save_file({name: mean.float() for name, mean in means.items()}, self._out)
