# SPDX-License-Identifier: Apache-2.0
"""An engine of the tiny model, and texts with planted labels, for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import close
from tests.lab.hf import Hooked
from tests.lab.planted import LAYER, PLANTED, TEXTS, Examples, labelled
from tests.tiny import make_llm, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    engine = make_llm(folder)
    yield engine
    close(engine)


@pytest.fixture(scope="module")
def planted_rows(folder: Path) -> np.ndarray:
    """Mean row of each text at the layer, without the first token, by hooks on HF Transformers."""
    hooked = Hooked(folder)
    return np.stack([hooked.run(text)[LAYER, 1:].mean(0) for text in TEXTS])


@pytest.fixture(scope="module")
def planted(planted_rows: np.ndarray) -> Examples:
    """Texts with a small or a large component along the planted direction."""
    along = planted_rows @ PLANTED
    low, high = np.quantile(along, [0.35, 0.65])
    chosen = np.flatnonzero((along < low) | (along > high))
    return labelled([TEXTS[i] for i in chosen], along[chosen] > high)
