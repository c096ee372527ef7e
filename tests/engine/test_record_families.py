# SPDX-License-Identifier: Apache-2.0
"""Every window, fold, stop and live change in five families, against a token-by-token reference in HF Transformers.

``test_gates.py`` and ``test_live.py`` have the same cases for Llama, with failures that the comparison must notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import model as conformance
from tests.conformance.engine import steered_engine
from tests.conformance.zoo import BY_NAME
from tests.engine.record_cases import PROMPTS, bounds_of, cases, check_all, expect, run_all
from tests.engine.record_reference import Reference
from tests.engine.test_live import check_changes, drive

TEXTS = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
FAMILIES = ("gemma2", "gpt2", "cohere", "mixtral", "granitemoehybrid")
"""Scaled embeddings and norms behind sublayers, learned positions, parallel branches, experts, and Mamba layers."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Reference]]:
    """Return an engine and the reference on the same weights."""
    tiny = BY_NAME[request.param]
    path: Path = conformance.save(tiny, tmp_path_factory.mktemp(request.param))
    model = conformance.build(tiny)
    with steered_engine(tiny, path, "eager") as llm:
        yield llm, Reference(model, model.get_submodule(tiny.blocks))


def test_every_window_fold_and_stop(family: tuple[Any, Reference]) -> None:
    """Catches a gate or stop of another token, and scores of another place in the blocks of a family."""
    llm, reference = family
    made = cases(bounds_of(reference, TEXTS))
    expected = expect(reference, made, TEXTS)
    undecided = {
        name
        for name in made
        if len({round(float(f), 3) for n in range(len(TEXTS)) for f in expected[name, n].factors.ravel()}) < 2
        and not any(expected[name, n].stop for n in range(len(TEXTS)))
    }
    assert len(undecided) < len(made) / 4, f"these cases decide nothing: {undecided}"
    check_all(run_all(llm, made, TEXTS), expected, TEXTS)


def test_live_changes(family: tuple[Any, Reference]) -> None:
    """Catches a change that takes effect at another token than the reported one."""
    llm, reference = family
    outputs, changed = drive(llm, [1, 3])
    assert changed
    check_changes(reference, outputs, changed, 1)
    check_changes(reference, outputs, {}, 3)
    with pytest.raises(AssertionError):
        check_changes(reference, outputs, {start + 1: value for start, value in changed.items()}, 1)
