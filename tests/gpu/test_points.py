# SPDX-License-Identifier: Apache-2.0
"""GPU: every site of engines with optional hook points is steered and captured in compiled code, also when it is alone.

Compiled code that gives taps copies of their tables (see ``vllm_steer/taps/tables.py``) loses the edits of a site when
no request uses the site whose table comes first. A batch that uses many sites does not show this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.captures import result
from tests.gpu.variants import VARIANTS, running
from tests.tiny import LAYERS, VOCAB, direction
from vllm_steer import Edit, SamplingParams
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, points_on

pytestmark = pytest.mark.gpu

PROMPT = np.random.default_rng(0).integers(1, VOCAB, 21).tolist()
STRENGTH = 3.0
TOLERANCE = 0.01
"""Largest distance of rows relative to their length: above the rounding of kernels, far below a lost edit."""
LAST = LAYERS - 1


def request(point: str, layer: int) -> SamplingParams:
    """Return a request that edits one site and captures it and the stream after the last layer."""
    edit = Edit(kind="add", point=point, layers=layer, vector=direction(layer), strength=STRENGTH, tokens="all")
    hooks = {"post_block": [LAST]}
    hooks[point] = sorted({layer, *hooks.get(point, [])})
    return SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, steering=[edit],
        capture={"memory": {"hooks": hooks, "positions": "all"}},
    )  # fmt: skip


def capture_only(point: str, layer: int) -> SamplingParams:
    """Return a request that captures one site."""
    hooks = {"memory": {"hooks": {point: [layer]}, "positions": "all"}}
    return SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, capture=hooks)


def rows_of(llm: Any, params: SamplingParams) -> dict[tuple[str, int], torch.Tensor]:
    """Run one request alone and return the captured rows of its prompt by site."""
    captured = result(llm.generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)[0])
    return {site: captured.tensor(*site)[: len(PROMPT)].float() for site in captured.sites}


def measured(variant: str, folder: Path, points: Sequence[str]) -> dict[Any, dict[Any, torch.Tensor]]:
    """Return the rows of each site of an engine, captured with and without an edit there, each request alone."""
    with running(variant, folder, steering_config={"points": list(points)}) as llm:
        sites = [(point, layer) for layer in range(LAYERS) for point in points_on(tuple(points))]
        edited = {(*site, "edited"): rows_of(llm, request(*site)) for site in sites}
        return edited | {(*site, "captured"): rows_of(llm, capture_only(*site)) for site in sites}


@pytest.fixture(scope="module")
def eager(tiny_llama: Path) -> dict[Any, dict[Any, torch.Tensor]]:
    """Return the rows of an eager engine with all points, whose taps read their own tables."""
    assert len(points_on(tuple(OPTIONAL_POINTS))) == len(POINT_NAMES)
    return measured("v2-eager", tiny_llama, OPTIONAL_POINTS)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("graphs")])
@pytest.mark.parametrize("points", [("mlp_in", "mlp_out"), OPTIONAL_POINTS], ids=["two", "all"])
def test_sites_alone_match_an_eager_engine(
    tiny_llama: Path, eager: dict[Any, dict[Any, torch.Tensor]], variant: str, points: Sequence[str]
) -> None:
    """Catches edits and captures that compiled code loses at sites of some layers."""
    for name, rows in measured(variant, tiny_llama, points).items():
        assert rows.keys() == eager[name].keys()
        for site, value in rows.items():
            right = eager[name][site]
            off = (value - right).norm(dim=1) / right.norm(dim=1)
            assert float(off.max()) < TOLERANCE, (name, site, off)


def test_edits_reach_the_last_stream(eager: dict[Any, dict[Any, torch.Tensor]]) -> None:
    """Catches a comparison in which no edit has an effect."""
    last = ("post_block", LAST)
    plain = eager[(*last, "captured")][last]
    for (point, layer, kind), rows in eager.items():
        if kind == "edited":
            assert float((rows[last] - plain).norm(dim=1).min()) > 0.1 * STRENGTH, (point, layer)
