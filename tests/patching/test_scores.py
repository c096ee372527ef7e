# SPDX-License-Identifier: Apache-2.0
"""Refusal of studies on engines that return other scores than log-probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_steer import SteeringError
from vllm_steer.client.patching import HttpRunner
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
