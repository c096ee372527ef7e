# SPDX-License-Identifier: Apache-2.0
"""The check at start, on the models whose layers are joined or run otherwise than in most models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.conformance.branches import supported_branches
from tests.conformance.engine import steered_engine
from tests.conformance.identities import MIXED
from tests.conformance.model import LAYERS
from tests.conformance.no_reference import NO_REFERENCE, random_weights, save_config
from tests.conformance.shard import EVERYTHING, selected

ROWS = {tiny.name: tiny for tiny in NO_REFERENCE}
CHECKED = (
    "solar", "iquestloopcoder", "hrmtext", "deepseek_v32", "decilm_no_ops", "kimi_linear", "whisper", "hy_v4",
    "deepseek_v4", "deepseek_v41_engram", "kimi_k3", "inkling",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CHECKED if EVERYTHING or selected(name)])
def test_accepts_the_right_taps(name: str, tmp_path: Path) -> None:
    """Catches an engine that does not start because a block reads more than the block before it leaves."""
    tiny = ROWS[name]
    path = save_config(tiny, tmp_path)
    with random_weights(tiny) as settings:
        row = dataclasses.replace(tiny, engine={**(tiny.engine or {}), **settings})
        with steered_engine(row, path, "eager", supported_branches(tiny), self_check=True) as llm:
            (report,) = llm.collective_rpc("steering_capabilities")
    found = report["self_check"]
    assert found["ran"]
    if tiny.recipe not in MIXED:
        assert found["conclusive"] > LAYERS
