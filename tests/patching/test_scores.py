# SPDX-License-Identifier: Apache-2.0
"""Scores of studies: engines that return other ones, metrics that fail, and files that keep the results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.patching.test_study import study
from vllm_steer import SteeringError
from vllm_steer.client.patching import HttpRunner
from vllm_steer.patching import PatchingResult
from vllm_steer.patching.metrics import LogProbs
from vllm_steer.patching.offline import OfflineRunner

CAPABILITIES = {"num_layers": 2, "hidden_size": 4, "points": [{"name": "post_block", "on": True}]}


def offline(mode: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the facts of an engine in this process."""
    known = SimpleNamespace(num_layers=2, hidden_size=4, config=SimpleNamespace(points=()), max_model_len=8)
    context = SimpleNamespace(capabilities=known, model_name="tiny")
    monkeypatch.setattr("vllm_steer.patching.offline.engine_context", lambda engine: context)
    config = SimpleNamespace(logprobs_mode=mode, logits_processors=None, get_vocab_size=lambda: 16, max_logprobs=20)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    return OfflineRunner(SimpleNamespace(llm_engine=engine, generate=None)).facts


def over_http(mode: str | None) -> Any:
    """Return the facts of a server that reports this mode."""
    client: Any = SimpleNamespace(model="tiny", capabilities=lambda: {**CAPABILITIES, "logprobs_mode": mode})
    return HttpRunner(client).facts


def test_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ``logprob`` and ``kl`` computed from logits, in this process and with one request per cell."""
    for mode in ("raw_logprobs", "processed_logprobs"):
        assert offline(mode, monkeypatch).num_layers == 2
    for mode in ("raw_logits", "processed_logits"):
        with pytest.raises(SteeringError, match="so the engine returns logits"):
            offline(mode, monkeypatch)
        with pytest.raises(SteeringError, match="so the engine returns logits"):
            over_http(mode)


def test_scores_that_other_requests_change_are_refused_over_http() -> None:
    """Catches processed scores of a server, where another request's ``top_p`` filters the whole batch."""
    assert over_http("raw_logprobs").num_layers == over_http(None).num_layers == 2
    with pytest.raises(SteeringError, match="scores that other settings change"):
        over_http("processed_logprobs")


def test_a_metric_that_fails_in_a_cell_is_the_error_of_the_cell() -> None:
    """Catches a sweep that ends without results because a user's metric divides by zero in one cell."""
    calls = iter([False] * 4 + [True] + [False] * 100)

    def metric(logprobs: LogProbs) -> float:
        return 1 / 0 if next(calls) else logprobs.answer

    result = study().sweep(metric=metric, progress=False)
    assert [each["error"] for each in result.failed()] == ["ZeroDivisionError: division by zero"]
    assert np.isnan(result.cells[..., 0]).sum() == 1


def test_the_noise_of_recovered_needs_a_difference() -> None:
    """Catches a ``ZeroDivisionError`` for pairs whose clean and corrupt runs are equal."""
    result = study(corrupt="the red car is").sweep(progress=False)
    for statistic in (result.noise_floor, result.control):
        with pytest.raises(SteeringError, match="recovered divides by clean - corrupt"):
            statistic("recovered")


@pytest.mark.parametrize("name", ["x" * 255, "\u7814" * 85], ids=["letters", "bytes"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    """Catches the results of a sweep lost at its end because its temporary file has a longer name."""
    result = study().sweep(file=tmp_path / name, progress=False)
    assert PatchingResult.load(tmp_path / name).info == result.info
    assert [each.name for each in tmp_path.iterdir()] == [name]
