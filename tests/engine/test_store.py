# SPDX-License-Identifier: Apache-2.0
"""What the device is told of running requests, ahead of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_steer import SamplingParams
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.store import ProgramStore
from vllm_steer.taps.tables import Tables

LAYERS, POINTS, HIDDEN = 4, 3, 8


def steered(layer: int, value: float) -> Any:
    return SamplingParams(steering_vectors={"post_block": {layer: np.full(HIDDEN, value)}})


def test_the_device_knows_which_sites_rows_use() -> None:
    """Catches a site that is told to be of no use while a row edits there: on a GPU its tap would leave at once, and
    the request go on unsteered without an error. On a CPU nothing looks at it."""
    config = SteeringConfig(max_rows=8, max_vectors=8, max_instructions=8, capture_rows=1)
    tables = Tables(
        config, num_sites=LAYERS * POINTS, hidden_size=HIDDEN, max_tokens=4, max_requests=4, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    store = ProgramStore(tables, config, LAYERS)

    def users() -> dict[int, int]:
        store.flush()
        return {site: n for site, n in enumerate(tables.head[0].tolist()) if n}

    assert users() == {}
    first, other = POINTS * 1 + 2, POINTS * 3 + 2
    store.add("a", 0, steered(1, 1.0), 5)
    assert users() == {first: 1}
    store.add("b", 1, steered(1, 2.0), 5)
    store.add("c", 2, steered(3, 2.0), 5)
    store.add("d", 3, steered(1, 1.0), 5)  # the row of the first
    assert users() == {first: 2, other: 1}
    store.remove("a")
    store.remove("c")
    assert users() == {first: 2}
    store.remove("d")
    store.remove("b")
    assert users() == {}
    store.add("e", 0, steered(3, 1.0), 5)
    assert users() == {other: 1}
