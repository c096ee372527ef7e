# SPDX-License-Identifier: Apache-2.0
"""Patching studies of an engine that is used for something else in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_steer.patching import PatchingStudy

CLEAN, CORRUPT = [5, 17, 40, 33, 71, 9], [5, 17, 88, 33, 71, 9]


@pytest.mark.parametrize("step", [1, 4])
def test_an_interrupted_sweep_continues(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Catches requests that stay in the engine after Ctrl-C, whose outputs the next call then returns."""
    engine, file = llm.llm_engine, tmp_path / "study.safetensors"
    steps = iter(range(1, 1000))

    def interrupted() -> Any:
        if next(steps) == step:
            raise KeyboardInterrupt
        return type(engine).step(engine)

    study = PatchingStudy(llm, clean=CLEAN, corrupt=CORRUPT, answer=[21], foil=[64])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "step", interrupted)
        study.sweep(layers=[1, 2], file=file, progress=False)
    assert not engine.has_unfinished_requests()
    result = study.sweep(layers=[1, 2], file=file, progress=False)
    assert not np.isnan(result.grid("post_block")).any()
