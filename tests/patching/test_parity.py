# SPDX-License-Identifier: Apache-2.0
"""Grids equal those of a loop of hooks in HF Transformers, at all points and in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.branches import BRANCHES, supported_branches
from tests.conformance.engine import steered_engine
from tests.conformance.hf_reference import Intervention, Reference
from tests.conformance.model import LAYERS, build, save
from tests.conformance.zoo import BY_NAME
from vllm_steer.patching import PatchingStudy
from vllm_steer.request.edit import KINDS

pytestmark = pytest.mark.skipif("replace" not in KINDS, reason="needs the edit replace")

CLEAN, CORRUPT = (5, 17, 40, 33, 71, 9), (5, 17, 88, 33, 71, 9)
ANSWER, FOIL = 21, 64
TOLERANCE = 1e-4
STREAMS = {"pre_attn": "x_in", "post_attn": "x_mid", "post_block": "x_out"}
FAMILIES = ("llama", "gpt2", "gemma2", "mixtral", "qwen3")


def hook_loop(reference: Reference, points: tuple[str, ...], base: Any, source: Any, shift: int = 0) -> np.ndarray:
    """Return the difference of answer and foil for each cell, ``[points, layers, positions]``."""
    trace = reference.run(source)
    grid = np.empty((len(points), LAYERS, len(base)))
    for index in np.ndindex(grid.shape):
        point, layer, position = points[index[0]], index[1], index[2]
        rows = getattr(trace, STREAMS.get(point, point))[layer]
        row = torch.from_numpy(rows[(position + shift) % len(base)])
        patch = Intervention(point, layer, [position], lambda rows, row=row: row.expand_as(rows))
        logprobs = reference.run(base, [patch]).logprobs[-1]
        grid[index] = logprobs[ANSWER] - logprobs[FOIL]
    return grid


@pytest.mark.parametrize("name", FAMILIES)
def test_grids_equal_hf_hooks(name: str, tmp_path: Path) -> None:
    """Catches a cell patched elsewhere, in the wrong direction or with rows one position off."""
    tiny = BY_NAME[name]
    points = tuple(point for point in STREAMS if point not in tiny.refused) + supported_branches(tiny)
    path = save(tiny, tmp_path)
    reference = Reference(tiny, build(tiny).float())
    with steered_engine(tiny, path, "eager", BRANCHES) as llm:
        study = PatchingStudy(llm, clean=list(CLEAN), corrupt=list(CORRUPT), answer=[ANSWER], foil=[FOIL])
        for direction, base, source in (("denoising", CORRUPT, CLEAN), ("noising", CLEAN, CORRUPT)):
            result = study.sweep(points=points, direction=direction, progress=False)
            assert not result.failed()
            ours = np.stack([result.grid(point) for point in points])
            theirs = hook_loop(reference, points, base, source)
            np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
            assert np.abs(ours - result.baseline()[0]).max() > 0.1
            assert result.control() < TOLERANCE
            if direction == "denoising":
                assert np.abs(ours - hook_loop(reference, points, base, source, shift=1)).max() > 0.1
