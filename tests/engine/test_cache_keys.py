# SPDX-License-Identifier: Apache-2.0
"""Tests of prefix-cache keys with vLLM's own hasher and requests."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.request import Request

from tests.engine import scheduler_harness
from vllm_steer.engine.cache_keys import steering_hasher
from vllm_steer.program import compile_program, resolve
from vllm_steer.request import Edit

BLOCK, LAYERS = 4, 3
HASH = get_hash_fn_by_name("sha256")


@pytest.fixture(autouse=True, scope="module")
def _none_hash() -> None:
    init_none_hash(HASH)


def edit(seed: int = 0, tokens: Any = "all", layers: Any = 0) -> Edit:
    vector = np.random.default_rng(seed).standard_normal(4)
    return Edit(kind="add", point="pre_attn", layers=layers, vector=vector, tokens=tokens)


def keys(
    edits: list[Edit],
    prompt: list[int],
    output: list[int] | None = None,
    salt: str | None = None,
    items: list[Any] | None = None,
    bidirectional: bool = True,
    ahead: int = 0,
) -> list[bytes]:
    request = Request(
        "r", list(prompt), VllmSamplingParams(max_tokens=50), None, cache_salt=salt,
        block_hasher=block_hasher(ahead), mm_features=items,
    )  # fmt: skip
    if edits:
        resolved = resolve(compile_program(edits), len(prompt), LAYERS)
        request._block_hasher = steering_hasher(
            request._block_hasher, resolved, BLOCK, HASH, bidirectional=bidirectional
        )
        request.block_hashes = []
        request.update_block_hashes()
    for token in output or []:
        request.append_output_token_ids(token)
    return list(request.block_hashes)


def block_hasher(ahead: int) -> Any:
    """Return vLLM's block hasher. With drafts, the keys of 0.33 also cover the ``ahead`` tokens after each block."""
    if not ahead:
        return get_request_block_hasher(BLOCK, HASH)
    if "num_hash_lookahead_tokens" in inspect.signature(get_request_block_hasher).parameters:
        return get_request_block_hasher(BLOCK, HASH, ahead)

    def hasher(request: Any) -> list[Any]:
        chain, tokens = list(request.block_hashes), request.all_token_ids
        for end in range((len(chain) + 1) * BLOCK, request.num_tokens - ahead + 1, BLOCK):
            extra = (None, *tokens[end : end + ahead])
            chain.append(hash_block_tokens(HASH, chain[-1] if chain else None, tokens[end - BLOCK : end], extra))
        return chain[len(request.block_hashes) :]

    return hasher


PROMPT, OUTPUT = list(range(10, 20)), list(range(30, 40))


def shared(a: list[bytes], b: list[bytes]) -> int:
    """Return how many leading blocks two requests share."""
    equal = [x == y for x, y in zip(a, b, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def test_edited_prompt_shares_no_block_with_a_plain_one() -> None:
    """Catches steered KV served to a plain request through the prefix cache."""
    assert shared(keys([edit()], PROMPT), keys([], PROMPT)) == 0
    assert not set(keys([edit()], PROMPT, OUTPUT)) & set(keys([], PROMPT, OUTPUT))


@pytest.mark.failure(13)
def test_keys_depend_on_the_content_of_edits() -> None:
    """Catches old KV served under a name that has been registered again with other content."""
    assert keys([edit(1)], PROMPT, OUTPUT) == keys([edit(1)], PROMPT, OUTPUT)
    assert shared(keys([edit(1)], PROMPT), keys([edit(2)], PROMPT)) == 0
    assert shared(keys([edit(1, layers=0)], PROMPT), keys([edit(1, layers=1)], PROMPT)) == 0


def test_edits_of_generated_tokens_share_the_prompt() -> None:
    """Catches a prompt that is not shared. Of 10 prompt tokens in blocks of 4, two blocks are whole."""
    steered = keys([edit(1, "generated")], PROMPT, OUTPUT)
    assert shared(steered, keys([], PROMPT, OUTPUT)) == 2
    assert shared(steered, keys([edit(2, "generated")], PROMPT, OUTPUT)) == 2


def test_shares_the_blocks_before_the_first_edit() -> None:
    """Catches a key that includes edits of later positions."""
    assert shared(keys([edit(1, [[9, None]])], PROMPT, OUTPUT), keys([], PROMPT, OUTPUT)) == 2


def test_shares_an_edited_prefix_across_prompt_lengths() -> None:
    """Catches a key that includes the prompt length where nothing depends on it yet."""
    assert shared(keys([edit(1, "prompt")], PROMPT), keys([edit(1, "prompt")], [*PROMPT, 7, 7, 7, 7])) == 2


def test_keys_depend_on_the_end_of_an_edited_prompt() -> None:
    """Catches equal keys after the end of the shorter of two edited prompts with the same tokens."""
    short = keys([edit(1, "prompt")], PROMPT[:6], PROMPT[6:] + OUTPUT)
    long = keys([edit(1, "prompt")], PROMPT, OUTPUT)
    assert shared(short, long) == 1


@pytest.mark.feature("`cache_salt`", "steer")
def test_cache_salt_still_separates() -> None:
    """Catches a key that replaces vLLM's own extra keys, and one that equals a plain request's salted key."""
    assert shared(keys([edit(1)], PROMPT, salt="a"), keys([], PROMPT, salt="a")) == 0
    late = edit(1, [[9, None]])
    assert shared(keys([late], PROMPT, OUTPUT, "a"), keys([], PROMPT, OUTPUT, "a")) == 2
    assert shared(keys([late], PROMPT, OUTPUT, "a"), keys([], PROMPT, OUTPUT)) == 0
    assert shared(keys([edit(1)], PROMPT, salt="a"), keys([edit(1)], PROMPT, salt="b")) == 0
    assert keys([edit(1)], PROMPT, salt="a") == keys([edit(1)], PROMPT, salt="a")


def test_edits_after_the_last_attention_keep_vllm_keys() -> None:
    """Catches needless misses for edits that change no keys or values."""
    last = Edit(kind="add", point="post_block", layers=LAYERS - 1, vector=np.ones(4))
    assert keys([last], PROMPT, OUTPUT) == keys([], PROMPT, OUTPUT)


LONG = list(range(40))


def shared_with_image(tokens: Any, others: Any, *items: Any, **settings: bool) -> int:
    """Return how many leading blocks edits of ``tokens`` and of ``others`` (None: no edit) of a prompt share."""
    both = [
        keys([] if each is None else [edit(1, each)], LONG, items=list(items), **settings) for each in (tokens, others)
    ]
    first = shared(*both)
    assert not set(both[0][first:]) & set(both[1][first:])
    return first


@pytest.mark.parametrize(
    ("tokens", "others", "blocks"),
    [
        ([[15, 18]], None, 1),
        ([[15, 18]], [[15, 20]], 1),
        ([[15, 18]], [[16, 18]], 1),
        ([[2, 15]], [[2, 18]], 1),
        ([25], None, 1),
        ([26], None, 6),
        ([[2, 26]], [[2, 30]], 6),
        ("generated", None, 10),
    ],
)
def test_blocks_of_an_image_depend_on_edits_up_to_its_end(tokens: Any, others: Any, blocks: int) -> None:
    """Catches a plain request, or one with another edit, that hits blocks whose tokens attended to edited ones.

    The tokens 6 to 25 are an image whose tokens attend to all of it. Also catches needless misses of other blocks.
    """
    assert shared_with_image(tokens, others, scheduler_harness.image_item(6, 20)) == blocks


def test_images_do_not_depend_on_each_other() -> None:
    """Catches blocks of an image that miss because of an edit in the next image."""
    images = scheduler_harness.image_item(4, 8), scheduler_harness.image_item(12, 8)
    assert shared_with_image([18], None, *images) == 3
    assert shared_with_image([10], None, *images) == 1


def test_blocks_of_causal_items_depend_on_earlier_edits_only() -> None:
    """Negative control: needless misses in models whose images are causal, and for audio."""
    image, audio = scheduler_harness.image_item(6, 20), scheduler_harness.image_item(6, 20, "audio")
    assert shared_with_image([[15, 18]], None, image, bidirectional=False) == 3
    assert shared_with_image([[15, 18]], None, audio) == 3


@pytest.mark.parametrize(("bidirectional", "blocks"), [(True, 1), (False, 3)])
def test_scheduler_keys_follow_the_attention_of_the_model(tiny_llama: Path, bidirectional: bool, blocks: int) -> None:
    """Catches a scheduler that does not pass on whether images are bidirectional."""
    made = scheduler_harness.config(tiny_llama, sequences=2)
    made.model_config.model_arch_config = replace(made.model_config.model_arch_config, is_mm_prefix_lm=bidirectional)
    scheduler = scheduler_harness.make(made, blocks=12)
    both = []
    late = Edit(kind="add", point="post_block", layers=1, vector=np.ones(64), tokens=[[60, 65]])
    for name, edits in (("plain", None), ("edited", [late])):
        request = scheduler_harness.request(name, list(range(90)), 4, steering=edits)
        request.mm_features = [scheduler_harness.image_item(20, 60)]
        request.block_hashes.clear()
        request.update_block_hashes()
        scheduler.add_request(request)
        both.append(list(request.block_hashes))
    assert shared(*both) == blocks


def test_appended_blocks_have_the_keys_of_a_prompt() -> None:
    """Catches a chain that continues from re-keyed hashes, after which a follow-up prompt never hits."""
    everywhere = edit(1)
    assert keys([everywhere], PROMPT, OUTPUT) == keys([everywhere], PROMPT + OUTPUT)


@pytest.mark.parametrize("ahead", [1, 3])
def test_keys_that_look_ahead_over_drafts_include_edits(ahead: int) -> None:
    """Catches blocks that are keyed late and miss their edits, or that change with edits after their end."""
    plain, whole = keys([], PROMPT, OUTPUT, ahead=ahead), keys([], PROMPT + OUTPUT, ahead=ahead)
    assert plain == whole
    assert len(plain) == (len(PROMPT + OUTPUT) - ahead) // BLOCK
    for first in (0, BLOCK, BLOCK + 1, 2 * BLOCK):
        edited = keys([edit(1, tokens=[[first, 20]])], PROMPT, OUTPUT, ahead=ahead)
        assert edited == keys([edit(1, tokens=[[first, 20]])], PROMPT + OUTPUT, ahead=ahead)
        assert len(edited) == len(plain)
        assert shared(edited, plain) == first // BLOCK
        assert not set(edited[first // BLOCK :]) & set(plain)


def test_a_cleared_list_is_keyed_anew() -> None:
    """Catches a request without keys after vLLM has cleared them, as 0.33 does for inputs that are streamed."""
    request = Request(
        "r", list(PROMPT), VllmSamplingParams(max_tokens=50), None, block_hasher=get_request_block_hasher(BLOCK, HASH)
    )
    resolved = resolve(compile_program([edit(1)]), len(PROMPT), LAYERS)
    request._block_hasher = steering_hasher(request._block_hasher, resolved, BLOCK, HASH)
    for _ in range(2):
        request.block_hashes.clear()
        request.update_block_hashes()
        assert list(request.block_hashes) == keys([edit(1)], PROMPT)


def test_only_pre_attn_of_the_last_layer_changes_keys() -> None:
    """Catches needless misses for edits after the last layer's attention."""

    def at(point: Any) -> list[bytes]:
        vector = np.ones(4)
        return keys([Edit(kind="add", point=point, layers=LAYERS - 1, vector=vector)], PROMPT, OUTPUT)

    assert at("post_attn") == at("post_block") == keys([], PROMPT, OUTPUT)
    assert shared(at("pre_attn"), keys([], PROMPT, OUTPUT)) == 0


@pytest.mark.feature("KV connectors and offloading", "steer")
def test_connectors_see_the_same_keys(tiny_llama: Path) -> None:
    """Catches keys that change after a connector has seen a request, which would store steered blocks as plain."""
    scheduler = scheduler_harness.make(scheduler_harness.config(tiny_llama, sequences=2), blocks=12)
    seen: dict[str, list[bytes]] = {}

    class Spy:
        def on_new_request(self, request: Any) -> None:
            seen[request.request_id] = list(request.block_hashes)

    scheduler.connector = Spy()
    for name, seed in (("plain", None), ("one", 1), ("same", 1), ("other", 2)):
        fields = {} if seed is None else {"steering_vectors": {"pre_attn": {1: np.full(64, float(seed), "f4")}}}
        scheduler.add_request(scheduler_harness.request(name, list(range(40)), 4, **fields))
    assert seen["one"] == seen["same"]
    assert len({tuple(seen[name]) for name in ("plain", "one", "other")}) == 3
    for name in seen:
        assert len(seen[name]) == 2
        assert seen[name] == scheduler.requests[name].block_hashes
