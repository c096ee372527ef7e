# SPDX-License-Identifier: Apache-2.0
"""Rows of texts in capture files: complete, exact, and resumed after kills."""

from __future__ import annotations

import json
import os
import random
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import close
from tests.lab.hf import Hooked
from tests.tiny import VOCAB, make_llm
from vllm_steer import open_captures
from vllm_steer.lab import harvest

RANDOM = np.random.default_rng(7)
TEXTS = [RANDOM.integers(0, VOCAB, RANDOM.integers(2, 20)).tolist() for _ in range(120)]
SITES: dict[str, Any] = {"layers": [1, 3]}
module = import_module("vllm_steer.lab.harvest")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_TEXTS", 4)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[np.ndarray]:
    """Rows of each text without the first token, ``[layers, tokens, hidden]``."""
    hooked = Hooked(folder)
    return [hooked.run(text)[:, 1:] for text in TEXTS]


def check(root: Path, rows: list[np.ndarray], *, whole: bool = True) -> int:
    """Check that no text is stored twice and each has its own rows; return their number."""
    captures = open_captures(root, run="harvest") if whole else open_captures(root)
    numbers = [request.submission for request in captures]
    assert len(set(numbers)) == len(numbers), "stored twice"
    assert not whole or numbers == list(range(len(TEXTS)))
    for number, request in zip(numbers, captures, strict=True):
        assert number is not None and request.sites == (("post_block", 1), ("post_block", 3))
        assert request.token_ids("post_block", 1).tolist() == TEXTS[number][1:]
        for layer in (1, 3):
            np.testing.assert_allclose(request.numpy("post_block", layer), rows[number][layer], rtol=1e-3, atol=1e-4)
    return len(numbers)


def test_ten_kills_lose_and_double_nothing(folder: Path, tmp_path: Path, rows: list[np.ndarray]) -> None:
    """Catches rows that a SIGKILL loses or doubles, half a text shown as whole, and a harvest that begins anew.

    Each child of this process has the engine's copy, whose threads start in the child, and is killed while it works.
    """
    generator = random.Random(3)
    engine = make_llm(folder)
    stored = 0
    try:
        for _ in range(10):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    torch.set_num_threads(1)  # the other threads of the pool are not in this process
                    write = module.RotatingLayout.write

                    def noted(self: Any, captured: Any, write: Any = write, pipe: int = writing) -> Any:
                        os.write(pipe, b".")
                        return write(self, captured)

                    module.RotatingLayout.write = noted
                    harvest(engine, TEXTS, tmp_path, **SITES)
                finally:
                    os._exit(1)
            os.close(writing)
            with os.fdopen(reading, "rb", buffering=0) as begun:
                for _ in range(generator.randint(0, 12)):
                    begun.read(1)
                for _ in range(generator.randrange(3000)):  # another moment of the next text
                    pass
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            before, stored = stored, check(tmp_path, rows, whole=False)
            assert before <= stored < len(TEXTS)
        assert stored > 20
        found = harvest(engine, TEXTS, tmp_path, **SITES)
    finally:
        close(engine)
    assert check(tmp_path, rows) == found.stored == found.texts == len(TEXTS)
    assert found.rows == sum(len(text) - 1 for text in TEXTS)
    assert json.loads((tmp_path / "harvest.json").read_text())["rows"] == found.rows
