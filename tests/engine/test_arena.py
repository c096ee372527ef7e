# SPDX-License-Identifier: Apache-2.0
"""Room for captured rows in a step: who gets how many tokens, by the numbers and in vLLM's scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import DraftTokenIds

from tests.engine import scheduler_alone
from vllm_steer.engine.arena import ArenaBudget, unsplit_spans
from vllm_steer.engine.scheduler import LAST_WORD
from vllm_steer.program import Resolved, compile_program, resolve
from vllm_steer.spec import parse_capture

LAYERS, EVERY = 4, 12
"""Rows of a token that is read everywhere."""
EVERYWHERE = {"pre_attn": "all", "post_attn": "all", "post_block": "all"}
DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def reads(positions: Any = "all") -> dict[str, Any]:
    return {"capture": {"memory": {"hooks": EVERYWHERE, "positions": positions}}}


def resolved(positions: Any = "all", prompt_len: int = 60) -> Resolved:
    specs = [spec for _, spec in parse_capture(reads(positions)["capture"])]
    return resolve(compile_program([], specs), prompt_len, LAYERS)


def test_what_must_stay_together_is_not_cut() -> None:
    """Catches an image of which one step sees a part, under attention that looks at all of it."""
    arena = ArenaBudget(20 * EVERY, 0, speculates=False)
    image = [(12, 30)]
    assert arena.take(resolved(), 0, 48, False, image) == 12
    arena.begin_step()
    assert arena.take(resolved(), 12, 48, False, image) == 20
    arena.begin_step()
    assert arena.take(resolved(), 0, 48, False, []) == 20
    arena.begin_step()
    # Taken up in part by another one: the image waits, and leaves what there is.
    assert arena.take(resolved(), 0, 10, False, []) == 10
    assert arena.take(resolved(), 12, 48, False, image) == 0
    assert arena.take(resolved(), 40, 10, False, []) == 10


def test_drafts_come_with_their_request_or_not_at_all() -> None:
    """Catches a request that starts with some of its draft tokens, which ends the engine."""
    arena = ArenaBudget(5 * EVERY, DRAFTS, speculates=True)
    assert arena.take(resolved(), 60, 1 + DRAFTS, True, []) == 1 + DRAFTS
    assert arena.take(resolved(), 60, 1 + DRAFTS, True, []) == 0
    assert arena.take(resolved(), 60, 1 + DRAFTS, False, []) == 1


@pytest.mark.parametrize(
    ("rows", "drafts", "spans", "fits"),
    [
        (4 * EVERY, DRAFTS, [], True),
        (4 * EVERY - 1, DRAFTS, [], False),
        (18 * EVERY, 0, [(12, 30)], True),
        (18 * EVERY - 1, 0, [(12, 30)], False),
        (EVERY, 0, [], True),
    ],
)
def test_what_can_never_be_computed_does_not_wait_for_ever(
    rows: int, drafts: int, spans: list[tuple[int, int]], fits: bool
) -> None:
    """Catches an image or drafts whose rows no step has room for, and all requests behind that wait with them."""
    reason = ArenaBudget(rows, drafts, speculates=drafts > 0).why_never(resolved(), spans)
    assert (reason is None) == fits
    assert fits or f"room for {rows} " in str(reason)


def test_readers_wait_for_their_turn_and_those_that_do_not_read_yet_do_not() -> None:
    """Catches a small reader that overtakes a large one for ever, and a prompt that waits for rows it does not take."""
    arena = ArenaBudget(EVERY, 0, speculates=False)
    late = resolved("all_generated")
    assert arena.lets_in(resolved(), 0, []) and arena.lets_in(late, 0, [])
    arena.take(resolved(), 0, 1, False, [])
    assert arena.lets_in(late, 0, [])
    assert not arena.lets_in(resolved(), 0, [])
    assert not arena.lets_in(late, 0, [])
    arena.begin_step()
    assert arena.lets_in(resolved(), 0, [])


def test_what_must_stay_together_waits_together() -> None:
    """Catches a prompt that begins with an image and is let in for its first token alone."""
    arena = ArenaBudget(20 * EVERY, 0, speculates=False)
    arena.take(resolved(), 40, 3, False, [])
    assert arena.lets_in(resolved(), 0, [(0, 17)]) and arena.lets_in(resolved(), 0, [(1, 19)])
    assert not arena.lets_in(resolved(), 0, [(0, 18)])


def test_those_that_have_ended_are_not_counted_on() -> None:
    """Catches a scheduler that looks at every reader in each step, for room that ended requests would need."""
    arena = ArenaBudget(3 * EVERY, 0, speculates=False)
    for name in "abcd":
        assert arena.sure
        arena.follow(name, resolved())
    assert not arena.sure
    for name in "abcd":
        arena.forget(name)
    assert arena.sure and not arena.has_readers


def test_only_where_the_model_needs_it_are_items_kept_whole() -> None:
    place = SimpleNamespace(mm_position=SimpleNamespace(offset=3, length=5))
    request = SimpleNamespace(mm_features=[place])
    assert unsplit_spans(request, SimpleNamespace(disable_chunked_mm_input=True)) == [(3, 8)]
    assert unsplit_spans(request, SimpleNamespace(disable_chunked_mm_input=False)) == []


def first_step_of(scheduler: Any, name: str) -> int:
    for number in range(60):
        scheduled = scheduler.schedule()
        if name in scheduled.num_scheduled_tokens:
            return number
        scheduler_alone.answer(scheduler, scheduled)
    raise AssertionError(f"{name} never starts")


def test_a_full_arena_is_no_matter_of_those_who_read_nothing(tiny_llama: Path) -> None:
    """Catches a reader without room at the head of the queue, behind which nobody starts."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=2 * EVERY)
    scheduler = scheduler_alone.make(made, blocks=60)
    for i in range(2):
        scheduler.add_request(scheduler_alone.request(f"reads-{i}", list(range(i, i + 48)), 4, **reads()))
    scheduler.add_request(scheduler_alone.request("plain", list(range(60, 70)), 4))
    assert first_step_of(scheduler, "plain") == 0


@pytest.mark.parametrize("image", [False, True])
def test_a_reader_that_could_begin_nowhere_holds_nobody_up(tiny_llama: Path, image: bool) -> None:
    """Catches a reader whose first token is not read and cached, or begins an image, and finds no room where it does
    begin: vLLM ends its round there, and whoever is behind waits until another reader has ended."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=(18 if image else 1) * EVERY)
    made.scheduler_config.disable_chunked_mm_input = image
    scheduler = scheduler_alone.make(made, blocks=60)
    prompt = list(range(1, 50))
    scheduler.add_request(scheduler_alone.request("first", prompt, 1))
    while scheduler.has_unfinished_requests():
        scheduler_alone.answer(scheduler, scheduler.schedule())
    scheduler.add_request(scheduler_alone.request("runs", [7], 20, **reads("all_generated")))
    for _ in range(2):
        scheduler_alone.answer(scheduler, scheduler.schedule())
    waits = scheduler_alone.request("waits", prompt[::-1] if image else prompt, 2, **reads("all" if image else [48]))
    if image:
        scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = image_of(waits, 0, 18)
    scheduler.add_request(waits)
    scheduler.add_request(scheduler_alone.request("plain", list(range(60, 70)), 4))
    scheduled = scheduler.schedule().num_scheduled_tokens
    assert scheduled == {"runs": 1, "plain": 10}


def test_cached_prompts_that_are_read_do_not_end_the_engine_under_speculation(tiny_llama: Path) -> None:
    """Catches the assertion in vLLM's scheduler that a request it starts with drafts has got them all."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=5 * EVERY, speculative_config=NGRAM)
    scheduler = scheduler_alone.make(made, blocks=60)
    prompt = list(range(1, 66))
    scheduler.add_request(scheduler_alone.request("first", prompt, 1))
    while scheduler.has_unfinished_requests():
        scheduler_alone.answer(scheduler, scheduler.schedule())
    for name in ("one", "other"):
        scheduler.add_request(scheduler_alone.request(name, prompt, 2, **reads("all_generated")))
    seen: list[dict[str, int]] = []
    while scheduler.has_unfinished_requests() and len(seen) < 40:
        scheduled = scheduler.schedule()
        seen.append(dict(scheduled.num_scheduled_tokens))
        scheduler_alone.answer(scheduler, scheduled)
    assert not scheduler.has_unfinished_requests()
    assert any(each.get("one") == 1 + DRAFTS for each in seen)


def image_of(request: Any, offset: int, length: int) -> tuple[int, Any]:
    """Put an image into a request; the budget and the cache for it, which a text model's scheduler has not."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    place = PlaceholderRange(offset=offset, length=length)
    request.mm_features = [
        MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=place, mm_hash="i")
    ]
    return 1000, EncoderCacheManager(1000)


@pytest.mark.parametrize(("reading", "chunks"), [(False, [48, 12]), (True, [12, 40, 8])])
def test_an_image_is_one_steps(tiny_llama: Path, reading: bool, chunks: list[int]) -> None:
    """Catches an image that the arena's limit cuts after vLLM has seen to it that it stays whole."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=40 * EVERY)
    made.scheduler_config.disable_chunked_mm_input = True  # as on CUDA, where attention looks both ways
    scheduler = scheduler_alone.make(made, blocks=60)
    request = scheduler_alone.request("r", list(range(60)), 2, **(reads() if reading else {}))
    scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = image_of(request, 12, 36)
    scheduler.add_request(request)
    seen: list[int] = []
    while sum(seen) < 60:
        scheduled = scheduler.schedule()
        seen.append(scheduled.num_scheduled_tokens.get("r", 0))
        scheduler_alone.answer(scheduler, scheduled)
    assert seen == chunks


def test_a_request_whose_drafts_never_fit_ends_with_a_reason(tiny_llama: Path) -> None:
    """Catches a request that waits for ever, or takes the engine with it."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=2 * EVERY, speculative_config=NGRAM)
    scheduler = scheduler_alone.make(made, blocks=60)
    scheduler.add_request(scheduler_alone.request("never", list(range(20)), 2, **reads()))
    outputs = scheduler_alone.answer(scheduler, scheduler.schedule())
    assert [str(output.finish_reason) for output in outputs] == ["error"]
    assert "room for 24" in outputs[0].stop_reason


READS: tuple[dict[str, Any], ...] = (
    {},
    reads(),
    reads("all_generated"),
    reads("last_prompt"),
    {"capture": {"memory": {"hooks": {"post_block": [2]}, "positions": [[3, 30]]}}},
)


def arrivals(seed: int) -> list[list[tuple[str, list[int], int, dict[str, Any]]]]:
    """Requests by the step in which they come: name, prompt, most tokens, and what is read."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 100, size).tolist() for size in rng.integers(1, 60, 6)]
    return [
        [
            (f"r{step}-{i}", prompts[rng.integers(6)], int(rng.integers(1, 30)), READS[rng.integers(len(READS))])
            for i in range(rng.integers(0, 5) if step % 12 == 0 else 0)
        ]
        for step in range(72)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("rows", [2 * (1 + DRAFTS), 12, 40, 200])
@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_what_is_looked_at_late_is_what_is_looked_at_at_once(
    tiny_llama: Path, speculative: Any, rows: int, policy: str
) -> None:
    """Catches a step in which somebody gets other tokens because those before him were only written down."""
    made = scheduler_alone.config(tiny_llama, sequences=8, capture_rows=rows * EVERY, speculative_config=speculative)
    made.scheduler_config.policy = policy
    late, settled = 0, 0
    for seed in range(4):
        both = [scheduler_alone.make(made, blocks=14) for _ in range(2)]
        both[1]._last_word = lambda upstream: None
        coming = arrivals(seed)
        for step in range(400):
            seen = []
            for scheduler in both:
                rng = np.random.default_rng((seed, step))
                for name, tokens, most, read in coming[step] if step < len(coming) else ():
                    request = scheduler_alone.request(name, tokens, most, **read)
                    request.priority = int(rng.integers(3))
                    scheduler.add_request(request)
                scheduled = scheduler.schedule()
                late += bool(scheduler._asked)
                settled += scheduler is both[0] and LAST_WORD not in vars(scheduler)
                seen.append((scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens))
                scheduler_alone.answer(scheduler, scheduled)
                if speculative is not None:
                    names = list(scheduled.num_scheduled_tokens)
                    drafts = [[1] * int(rng.integers(0, DRAFTS + 1)) for _ in names]
                    scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
            assert seen[0] == seen[1]
            if step > len(coming) and not both[0].has_unfinished_requests():
                break
        assert not any(scheduler.has_unfinished_requests() for scheduler in both)
    assert settled
    assert late or rows < 12
