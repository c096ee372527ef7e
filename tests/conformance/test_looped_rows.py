# SPDX-License-Identifier: Apache-2.0
"""Budgets of the scheduler for looped models: a token stores rows of every run of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.cases import PROMPTS, STREAM_FIELDS, Case
from tests.conformance.engine import generate, steered_engine
from tests.conformance.model import LAYERS
from tests.conformance.no_reference import NO_REFERENCE, random_weights, save_config
from vllm_steer.engine.arena import ArenaBudget

LOOPED = next(tiny for tiny in NO_REFERENCE if tiny.name == "iquestloopcoder")
ROWS = len(STREAM_FIELDS) * LAYERS
"""Rows of a token that is captured everywhere."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = save_config(LOOPED, tmp_path_factory.mktemp("looped"))
    with random_weights(LOOPED) as settings:
        tiny = dataclasses.replace(LOOPED, engine=settings)
        with steered_engine(tiny, path, "eager") as started:
            yield started


def test_scheduler_counts_the_rows_of_every_run(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of later runs that no budget counts; a scheduler that counts modules is the control."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    # Room for the rows of two tokens, so that a prompt takes many steps.
    monkeypatch.setattr(scheduler._arena, "rows", 2 * ROWS)
    counted: list[int] = []
    original = ArenaBudget.add_request

    def add_request(arena: Any, request_id: str, resolved: Any) -> None:
        counted.append(resolved.max_captures)
        original(arena, request_id, resolved)

    monkeypatch.setattr(ArenaBudget, "add_request", add_request)
    answer = generate(llm, [Case("everywhere", PROMPTS[0])], list(STREAM_FIELDS), new_tokens=2)[0]
    assert {stream.shape[:2] for stream in answer.streams.values()} == {(LAYERS, len(PROMPTS[0]) + 1)}
    assert counted == [ROWS]
    monkeypatch.setattr(scheduler, "_steering_layers", LAYERS // 2)
    generate(llm, [Case("everywhere", PROMPTS[1])], ["pre_attn"], new_tokens=1)
    assert counted[1:] == [LAYERS // 2]
