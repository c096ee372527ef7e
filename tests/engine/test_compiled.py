# SPDX-License-Identifier: Apache-2.0
"""Compiled models read strengths and vectors at run time, and compile-cache keys include steering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.engine import MODES
from tests.engine import scheduler_harness
from tests.engine.answers import logprobs_of, params, prompt, run
from tests.engine.conftest import opened
from tests.tiny import direction
from vllm_steer.engine.program_store import ProgramStore


@pytest.fixture(scope="module")
def traced(tiny_llama: Path) -> Iterator[Any]:
    """Return an engine whose model is traced once, as for compilation, and then run as a graph."""
    with opened(tiny_llama, **{"enforce_eager": False, **MODES["traced"]}) as llm:
        yield llm


def assert_strengths_apply(llm: Any) -> None:
    """Check that a strength scales its vector, whatever strengths were traced or used before."""
    p = prompt(*range(20, 40))
    v = direction(51)
    found = []
    for strength in (0.25, 1.0, 2.0):
        site: dict[str, Any] = {"post_block": {1: {"vector": v, "scale": strength}}}
        multiplied = {"post_block": {1: v * strength}}
        one, other = (run(llm, [p], [params(3, steering_vectors=each)])[0] for each in (site, multiplied))
        np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=1e-3)
        found.append(logprobs_of(one)[0])
    assert np.abs(found[0] - found[1]).max() > 1e-2
    assert np.abs(found[1] - found[2]).max() > 1e-2


@pytest.mark.failure(6)
@pytest.mark.failure(6, control=True)
@pytest.mark.feature("`torch.compile`", "steer")
def test_strengths_are_not_constants_of_the_graph(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a strength baked into a compiled graph. Negative control: tables that keep their first strengths."""
    assert_strengths_apply(traced)
    real = ProgramStore.flush

    def baked(self: Any) -> None:
        kept = self.tables.parameter.clone()
        real(self)
        self.tables.parameter.copy_(kept)

    monkeypatch.setattr(ProgramStore, "flush", baked)
    with pytest.raises(AssertionError):
        assert_strengths_apply(traced)


@pytest.mark.failure(6)
@pytest.mark.failure(6, control=True)
def test_compile_cache_key_includes_steering(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches compiled code shared with unsteered engines. Negative control: a key without our section."""

    def keys() -> list[str]:
        configs = [scheduler_harness.config(tiny_llama, sequences=2, **sizes) for sizes in ({}, {}, {"max_rows": 7})]
        stock = scheduler_harness.config(tiny_llama, sequences=2)
        stock.additional_config = {}
        return [config.compute_hash() for config in (*configs, stock)]

    first, same, other, stock = keys()
    assert first == same
    assert len({first, other, stock}) == 3

    real = scheduler_harness.engine_kwargs
    monkeypatch.setattr(
        scheduler_harness,
        "engine_kwargs",
        lambda sizes: {**real(sizes), "additional_config": {}, "scheduler_cls": None},
    )
    assert len(set(keys())) == 1
