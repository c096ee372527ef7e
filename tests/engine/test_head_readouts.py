# SPDX-License-Identifier: Apache-2.0
"""Head readouts of a rank, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.steps import make_tables
from vllm_steer import SamplingParams
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.head_readouts import HeadReadouts
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.ops import DeviceOps

LAYERS, POINTS, HIDDEN = 4, 3, 8
SITE = {"point": "post_block", "layer": 1, "positions": "all"}


def ready(readouts: dict[str, Any], tokens: int = 3, *, speculative: bool) -> tuple[ProgramStore, StepBatch]:
    """Return the programs of one request with readouts, and its first step."""
    config = SteeringConfig(capture_rows=16)
    tables = make_tables(config, num_sites=LAYERS * POINTS, max_requests=2, drafts=2 * speculative)
    store = ProgramStore(tables, config, LAYERS, range(LAYERS))
    store.add("a", 1, SamplingParams(readouts=readouts), tokens)
    store.flush()
    layout = BatchLayout(
        request_slot=torch.tensor([1]),
        start=torch.tensor([0, tokens], dtype=torch.int32),
        position=torch.arange(tokens),
        token=torch.zeros(tokens, dtype=torch.int32),
    )
    one = np.ones(1, dtype=np.int64)
    return store, StepBatch(lambda: layout, ["a"], one, 0 * one, tokens * one, tokens)


@pytest.mark.parametrize("speculative", [False, True])
def test_other_ranks_have_no_autoencoders(speculative: bool) -> None:
    """Catches a rank that looks for an autoencoder that only the first rank has, which ends the engine."""
    store, batch = ready({"topics": {"sae": "tiny", "top_k": 2, **SITE}}, speculative=speculative)
    heads = HeadReadouts(store, {}, DeviceOps(), enabled=False, speculative=speculative)
    for _ in range(2):
        heads.plan(batch, np.array([0]))
        heads.run()


def test_other_ranks_run_collective_heads() -> None:
    """Catches a lens that is skipped with the autoencoders: the first rank would wait for the others."""
    lens = {"lens": {"top_k": 2}, **SITE}
    store, batch = ready({"topics": {"sae": "tiny", "top_k": 2, **SITE}, "lens": lens}, speculative=False)
    called: list[int] = []

    class Lens:
        collective, num_outputs, num_bytes, tensors = True, 10, 0, ()

        def products(self, rows: torch.Tensor) -> None:
            called.append(len(rows))

    heads = HeadReadouts(store, {"lens": Lens()}, DeviceOps(), enabled=False, speculative=False)  # type: ignore[dict-item]
    heads.plan(batch, np.array([0]))
    heads.run()
    assert called == [3]


def test_the_first_rank_reports_a_missing_head() -> None:
    """Catches readouts that are silently left out on the rank that returns them."""
    store, batch = ready({"topics": {"sae": "tiny", "top_k": 2, **SITE}}, speculative=False)
    with pytest.raises(KeyError, match="sae:tiny"):
        HeadReadouts(store, {}, DeviceOps(), enabled=True, speculative=False).plan(batch, np.array([0]))
