# SPDX-License-Identifier: Apache-2.0
"""Tests of how many tokens capturing requests get in a step, alone and in vLLM's scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds

from tests.engine import scheduler_harness
from tests.tiny import direction
from vllm_steer.engine.arena import ArenaBudget, TokenLimiter, block_ahead, unsplit_spans
from vllm_steer.program import Resolved, compile_program, resolve
from vllm_steer.request import parse_capture

LAYERS, EVERY = 4, 12
"""Rows of a token that is captured at every site."""
EVERYWHERE = {"pre_attn": "all", "post_attn": "all", "post_block": "all"}
DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def captures(positions: Any = "all") -> dict[str, Any]:
    return {"capture": {"memory": {"hooks": EVERYWHERE, "positions": positions}}}


def resolved(positions: Any = "all", prompt_len: int = 60) -> Resolved:
    specs = [spec for _, spec in parse_capture(captures(positions)["capture"])]
    return resolve(compile_program([], specs), prompt_len, LAYERS)


def test_spans_are_not_split() -> None:
    """Catches an image that is computed in two steps under attention that needs all of it."""
    arena = ArenaBudget(20 * EVERY, 0, speculates=False)
    image = [(12, 30)]
    assert arena.take(resolved(), 0, 48, False, image) == 12
    arena.begin_step()
    assert arena.take(resolved(), 12, 48, False, image) == 20
    arena.begin_step()
    assert arena.take(resolved(), 0, 48, False, []) == 20
    arena.begin_step()
    # Another request has taken some of the room: the image waits and leaves the rest.
    assert arena.take(resolved(), 0, 10, False, []) == 10
    assert arena.take(resolved(), 12, 48, False, image) == 0
    assert arena.take(resolved(), 40, 10, False, []) == 10


def test_rest_of_a_span_is_not_split() -> None:
    """Catches an image of which the first part is cached and the rest is computed in two steps.

    Tokens of the first step cannot attend to later ones, so their rows, keys and values are wrong.
    """
    everything, image, start, rest = resolved(prompt_len=300), [(16, 272)], 112, 160
    arena = ArenaBudget((rest + 64) * EVERY, 0, speculates=False)
    assert arena.can_start(everything, start, image)
    assert arena.take(everything, start, rest + 28, False, image) == rest + 28
    assert not arena.can_start(everything, start, image)
    arena.begin_step()
    assert arena.take(everything, 0, rest + 8, False, []) == rest + 8
    assert arena.take(everything, start, rest, False, image) == 0
    assert arena.take(everything, 271, 29, False, image) == 29


@pytest.mark.parametrize(
    ("spans", "position", "start"),
    [
        ([], 119, 112),
        ([(16, 272)], 119, 16),
        ([(20, 272)], 119, 16),
        ([(16, 272)], 20, 16),
        ([(16, 112)], 119, 112),
        ([(120, 272)], 119, 112),
        ([(3, 20), (20, 40)], 39, 0),
        ([(0, 64)], 63, 0),
    ],
)
def test_cut_hit_does_not_end_within_a_span(spans: list[tuple[int, int]], position: int, start: int) -> None:
    """Catches a start within an image, also one that moves from an image into the one ahead, and needless moves."""
    assert block_ahead(spans, position, scheduler_harness.BLOCK) == start


def test_starting_drafts_are_all_or_nothing() -> None:
    """Catches a request that starts with some of its draft tokens, which stops the engine."""
    arena = ArenaBudget(5 * EVERY, DRAFTS, speculates=True)
    assert arena.take(resolved(), 60, 1 + DRAFTS, True, []) == 1 + DRAFTS
    assert arena.take(resolved(), 60, 1 + DRAFTS, True, []) == 0
    assert arena.take(resolved(), 60, 1 + DRAFTS, False, []) == 1


@pytest.mark.parametrize(
    ("rows", "drafts", "spans", "possible"),
    [
        (4 * EVERY, DRAFTS, [], True),
        (4 * EVERY - 1, DRAFTS, [], False),
        (18 * EVERY, 0, [(12, 30)], True),
        (18 * EVERY - 1, 0, [(12, 30)], False),
        (EVERY, 0, [], True),
    ],
)
def test_rejects_impossible_requests(rows: int, drafts: int, spans: list[tuple[int, int]], possible: bool) -> None:
    """Catches an image or drafts that fit no step and wait forever, with every request behind them."""
    reason = ArenaBudget(rows, drafts, speculates=drafts > 0).reason_impossible(resolved(), spans)
    assert (reason is None) == possible
    assert possible or f"the engine has {rows} " in str(reason)


def test_capturing_requests_start_in_order() -> None:
    """Catches (1) a small capture that starves a large one and (2) a prompt that waits for rows it does not store."""
    arena = ArenaBudget(EVERY, 0, speculates=False)
    late = resolved("all_generated")
    assert arena.can_start(resolved(), 0, []) and arena.can_start(late, 0, [])
    arena.take(resolved(), 0, 1, False, [])
    assert arena.can_start(late, 0, [])
    assert not arena.can_start(resolved(), 0, [])
    assert not arena.can_start(late, 0, [])
    arena.begin_step()
    assert arena.can_start(resolved(), 0, [])


def test_first_span_needs_room_as_a_whole() -> None:
    """Catches a prompt that begins with an image and starts with room for one token only."""
    arena = ArenaBudget(20 * EVERY, 0, speculates=False)
    arena.take(resolved(), 40, 3, False, [])
    assert arena.can_start(resolved(), 0, [(0, 17)]) and arena.can_start(resolved(), 0, [(1, 19)])
    assert not arena.can_start(resolved(), 0, [(0, 18)])


def test_removed_requests_are_not_counted() -> None:
    """Catches a guarantee that still includes the rows of requests that have ended."""
    arena = ArenaBudget(3 * EVERY, 0, speculates=False)
    for name in "abcd":
        assert arena.guaranteed_tokens
        arena.add_request(name, resolved())
    assert not arena.guaranteed_tokens
    for name in "abcd":
        arena.remove_request(name)
    assert arena.guaranteed_tokens == 1


def test_spans_follow_the_scheduler_setting() -> None:
    """Catches images that are kept together for models that can chunk them."""
    item = SimpleNamespace(mm_position=SimpleNamespace(offset=3, length=5))
    request = SimpleNamespace(mm_features=[item])
    assert unsplit_spans(request, SimpleNamespace(disable_chunked_mm_input=True)) == [(3, 8)]
    assert unsplit_spans(request, SimpleNamespace(disable_chunked_mm_input=False)) == []


def first_step_of(scheduler: Any, name: str) -> int:
    for number in range(60):
        scheduled = scheduler.schedule()
        if name in scheduled.num_scheduled_tokens:
            return number
        scheduler_harness.finish_step(scheduler, scheduled)
    raise AssertionError(f"{name} does not start")


def test_plain_requests_start_while_the_arena_is_full(tiny_llama: Path) -> None:
    """Catches a capturing request without room that blocks the queue behind it."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=2 * EVERY)
    scheduler = scheduler_harness.make(made, blocks=60)
    for i in range(2):
        scheduler.add_request(scheduler_harness.request(f"reads-{i}", list(range(i, i + 48)), 4, **captures()))
    scheduler.add_request(scheduler_harness.request("plain", list(range(60, 70)), 4))
    assert first_step_of(scheduler, "plain") == 0


@pytest.mark.parametrize("image", [False, True])
def test_request_without_room_where_it_starts_does_not_block(tiny_llama: Path, image: bool) -> None:
    """Catches a check of the first position for a request that starts after cached tokens or with an image.

    vLLM would stop there, and the requests behind would wait until another capture ends.
    """
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=(18 if image else 1) * EVERY)
    made.scheduler_config.disable_chunked_mm_input = image
    scheduler = scheduler_harness.make(made, blocks=60)
    prompt = list(range(1, 50))
    scheduler.add_request(scheduler_harness.request("first", prompt, 1))
    scheduler_harness.finish(scheduler)
    scheduler.add_request(scheduler_harness.request("runs", [7], 20, **captures("all_generated")))
    for _ in range(2):
        scheduler_harness.finish_step(scheduler, scheduler.schedule())
    waits = scheduler_harness.request(
        "waits", prompt[::-1] if image else prompt, 2, **captures("all" if image else [48])
    )
    if image:
        scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = image_of(waits, 0, 18)
    scheduler.add_request(waits)
    scheduler.add_request(scheduler_harness.request("plain", list(range(60, 70)), 4))
    scheduled = scheduler.schedule().num_scheduled_tokens
    assert scheduled == {"runs": 1, "plain": 10}


def test_captured_cached_prompts_start_with_all_drafts(tiny_llama: Path) -> None:
    """Catches a failed assertion in vLLM's scheduler, which expects all drafts of a request that it starts."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=5 * EVERY, speculative_config=NGRAM)
    scheduler = scheduler_harness.make(made, blocks=60)
    prompt = list(range(1, 66))
    scheduler.add_request(scheduler_harness.request("first", prompt, 1))
    scheduler_harness.finish(scheduler)
    for name in ("one", "other"):
        scheduler.add_request(scheduler_harness.request(name, prompt, 2, **captures("all_generated")))
    seen: list[dict[str, int]] = []
    while scheduler.has_unfinished_requests() and len(seen) < 40:
        scheduled = scheduler.schedule()
        seen.append(dict(scheduled.num_scheduled_tokens))
        scheduler_harness.finish_step(scheduler, scheduled)
    assert not scheduler.has_unfinished_requests()
    assert any(each.get("one") == 1 + DRAFTS for each in seen)


def test_requests_with_live_strengths_start_without_drafts(tiny_llama: Path) -> None:
    """Catches drafts with which vLLM pads the first step of a request: the positions of its next steps are uncertain.

    The next step of an asynchronous engine is scheduled before the drafts are rejected.
    """
    made = scheduler_harness.config(tiny_llama, sequences=8, speculative_config=NGRAM)
    scheduler = scheduler_harness.make(made, blocks=60)
    scheduler.add_request(scheduler_harness.request("first", list(range(1, 20)), 9))
    scheduler_harness.finish_step(scheduler, scheduler.schedule())
    edit = {"kind": "add", "point": "post_block", "layers": 1, "vector": direction(1), "live": "calm"}
    for name, fields in (("plain", {}), ("live", {"steering": [edit]})):
        scheduler.add_request(scheduler_harness.request(name, [5], 4, **fields))
    scheduled = scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"first": 1, "plain": 1 + DRAFTS, "live": 1}
    assert list(scheduled.scheduled_spec_decode_tokens) == ["plain"]
    assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens.values())
    assert scheduler.requests["live"].num_computed_tokens == 1


def image_of(request: Any, offset: int, length: int) -> tuple[int, Any]:
    """Add an image to a request and return the encoder budget and cache that a text model's scheduler lacks."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    request.mm_features = [scheduler_harness.image_item(offset, length)]
    request.block_hashes.clear()
    request.update_block_hashes()
    return 1000, EncoderCacheManager(1000)


@pytest.mark.parametrize(("capturing", "chunks"), [(False, [48, 12]), (True, [12, 40, 8])])
def test_image_is_computed_in_one_step(tiny_llama: Path, capturing: bool, chunks: list[int]) -> None:
    """Catches an arena limit that splits an image which vLLM has kept together."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=40 * EVERY)
    made.scheduler_config.disable_chunked_mm_input = True  # as on CUDA, where attention looks both ways
    scheduler = scheduler_harness.make(made, blocks=60)
    request = scheduler_harness.request("r", list(range(60)), 2, **(captures() if capturing else {}))
    scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = image_of(request, 12, 36)
    scheduler.add_request(request)
    seen: list[int] = []
    while sum(seen) < 60:
        scheduled = scheduler.schedule()
        seen.append(scheduled.num_scheduled_tokens.get("r", 0))
        scheduler_harness.finish_step(scheduler, scheduled)
    assert seen == chunks


@pytest.mark.parametrize(("whole", "hit"), [(True, 16), (False, 48)])
def test_captured_image_is_computed_from_its_start(tiny_llama: Path, whole: bool, hit: int) -> None:
    """Catches a hit that is cut within an image: vLLM keeps an image together only ahead of its first token."""
    made = scheduler_harness.config(tiny_llama, sequences=8)
    made.scheduler_config.disable_chunked_mm_input = whole
    scheduler = scheduler_harness.make(made, blocks=60)
    asked: dict[str, dict[str, Any]] = {
        "first": {},
        "reads": {"capture": {"memory": {"hooks": {"post_block": [2]}, "positions": [[50, 52]]}}},
    }
    for name, fields in asked.items():
        request = scheduler_harness.request(name, list(range(1, 100)), 1, **fields)
        scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = image_of(request, 20, 40)
        scheduler.add_request(request)
        if name == "reads":
            assert scheduler._get_local_prefix_cache_hit(request)[1] == hit
        scheduler_harness.finish(scheduler)


@pytest.mark.parametrize(("non_causal", "chunks"), [(True, [0, 35]), (False, [30, 5])])
def test_prompt_of_a_prefix_model_is_computed_in_one_step(
    tiny_llama: Path, non_causal: bool, chunks: list[int]
) -> None:
    """Catches a prompt that is split although each of its tokens attends to all of them (HRM-Text)."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=40 * EVERY)
    if non_causal:
        made.scheduler_config.enable_chunked_prefill = False  # as in vLLM's EngineCore
    scheduler = scheduler_harness.make(made, blocks=60, non_causal=non_causal)
    for name, length in (("first", 10), ("second", 35)):
        scheduler.add_request(scheduler_harness.request(name, list(range(length)), 4, **captures()))
    seen = []
    for _ in chunks:
        scheduled = scheduler.schedule()
        seen.append(scheduled.num_scheduled_tokens.get("second", 0))
        scheduler_harness.finish_step(scheduler, scheduled)
    assert seen == chunks
    scheduler.add_request(scheduler_harness.request("long", list(range(45)), 4, **captures()))
    reasons = [output.stop_reason for output in scheduler_harness.finish_step(scheduler, scheduler.schedule())]
    assert any("needs 540 rows in one step" in str(reason) for reason in reasons) == non_causal


def test_request_whose_drafts_never_fit_ends_with_a_reason(tiny_llama: Path) -> None:
    """Catches a request that waits forever or stops the engine."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=2 * EVERY, speculative_config=NGRAM)
    scheduler = scheduler_harness.make(made, blocks=60)
    scheduler.add_request(scheduler_harness.request("never", list(range(20)), 2, **captures()))
    outputs = scheduler_harness.finish_step(scheduler, scheduler.schedule())
    assert [str(output.finish_reason) for output in outputs] == ["error"]
    assert "the engine has 24" in outputs[0].stop_reason


CAPTURES: tuple[dict[str, Any], ...] = (
    {},
    captures(),
    captures("all_generated"),
    captures("last_prompt"),
    {"capture": {"memory": {"hooks": {"post_block": [2]}, "positions": [[3, 30]]}}},
)


def arrivals(seed: int) -> list[list[tuple[str, list[int], int, dict[str, Any]]]]:
    """Return random requests by the step in which they arrive: name, prompt, max_tokens and capture."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 100, size).tolist() for size in rng.integers(1, 60, 6)]
    return [
        [
            (f"r{step}-{i}", prompts[rng.integers(6)], int(rng.integers(1, 30)), CAPTURES[rng.integers(len(CAPTURES))])
            for i in range(rng.integers(0, 5) if step % 12 == 0 else 0)
        ]
        for step in range(72)
    ]


class ExactLimiter(TokenLimiter):
    """A limiter that reserves the rows of every request at once."""

    def begin_step(self) -> bool:
        super().begin_step()
        self._limits = True
        self._reserve_recorded()
        return True


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("rows", [2 * (1 + DRAFTS), 12, 40, 200])
@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_recorded_requests_get_the_tokens_of_an_exact_limiter(
    tiny_llama: Path, speculative: Any, rows: int, policy: str
) -> None:
    """Catches a step in which recording requests without reserving rows, or no limit, changes a request's tokens."""
    made = scheduler_harness.config(tiny_llama, sequences=8, capture_rows=rows * EVERY, speculative_config=speculative)
    made.scheduler_config.policy = policy
    recorded, exact, limited = 0, 0, 0
    for seed in range(4):
        both = [scheduler_harness.make(made, blocks=14) for _ in range(2)]
        both[1]._token_limiter.__class__ = ExactLimiter
        coming = arrivals(seed)
        for step in range(400):
            seen = []
            for scheduler in both:
                rng = np.random.default_rng((seed, step))
                for name, tokens, most, capture in coming[step] if step < len(coming) else ():
                    request = scheduler_harness.request(name, tokens, most, **capture)
                    request.priority = int(rng.integers(3))
                    scheduler.add_request(request)
                scheduled = scheduler.schedule()
                limiter = scheduler._token_limiter
                recorded += bool(limiter._recorded)
                exact += scheduler is both[0] and limiter._limits and not limiter._recordable_tokens
                limited += scheduler is both[0] and limiter._limits
                seen.append((scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens))
                scheduler_harness.finish_step(scheduler, scheduled)
                if speculative is not None:
                    names = list(scheduled.num_scheduled_tokens)
                    drafts = [[1] * int(rng.integers(0, DRAFTS + 1)) for _ in names]
                    scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
            assert seen[0] == seen[1]
            if step > len(coming) and not both[0].has_unfinished_requests():
                break
        assert not any(scheduler.has_unfinished_requests() for scheduler in both)
    assert bool(limited) == bool(exact) == (rows < 200)
    assert recorded or not 12 <= rows < 200
