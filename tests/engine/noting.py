# SPDX-License-Identifier: Apache-2.0
"""A Dynamo backend that records the graphs that it gets and runs them eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CODES: list[str] = []
"""Code of each graph, in compilation order."""


def noting(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    CODES.append(graph.code)
    return graph.forward
