# SPDX-License-Identifier: Apache-2.0
"""Proof of a model that HF Transformers does not know, and rows that are not numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.cli.doctor import _run_module
from vllm_steer.testing.prove import engine
from vllm_steer.testing.prove.engine import MARK
from vllm_steer.testing.prove.reference import STREAMS


@pytest.mark.slow
def test_proof_without_reference_is_conclusive(tmp_path: Path) -> None:
    """Catches weights so small that no hop is conclusive."""
    found = _run_module("vllm_steer.testing.prove.engine", MARK, "demo/model", str(tmp_path / "none"))
    assert (found["kind"], found["hops"], found["conclusive"]) == ("identities inside vLLM", 8, 8)
    assert (found["value_error"], found["agrees"]) == (None, True)


@pytest.mark.parametrize("run", [None, 0, 1])
def test_rows_that_are_not_numbers_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: int | None
) -> None:
    """Catches a proof of a model whose rows are NaN behind its first layer, or after an edit only."""
    streams = np.ones((4, 2, 8), np.float32)
    np.savez(tmp_path / STREAMS, plain=streams, edited=streams, vector=np.ones(8, np.float32))

    def tensor(number: int, layer: int) -> torch.Tensor:
        return torch.full((2, 8), float("nan") if number == run and layer > 0 else 1.0)

    def output(number: int) -> Any:
        rows = SimpleNamespace(tensor=lambda point, layer: tensor(number, layer))
        return SimpleNamespace(capture_results={"memory": rows})

    facts = {"self_check": {"hops": 3, "conclusive": 3}}
    llm = SimpleNamespace(collective_rpc=lambda _: [facts], generate=lambda *_, **__: [output(0), output(1)])
    monkeypatch.setattr("vllm_steer.LLM", lambda **_: llm)
    monkeypatch.setattr("vllm_steer.models.dry_run.import_architecture", lambda _: None)
    found = engine.prove("", tmp_path)
    assert found["agrees"] is (run is None)
    assert [bool(np.isnan(found[name])) for name in ("value_error", "cause_error")] == [run == 0, run == 1]
