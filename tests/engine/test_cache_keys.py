# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache keys, with vLLM's own hasher and requests: who may share which block with whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_steer.engine.cache_keys import steering_hasher
from vllm_steer.program import compile_program, resolve
from vllm_steer.spec import Edit

BLOCK, LAYERS = 4, 3
HASH = get_hash_fn_by_name("sha256")


@pytest.fixture(autouse=True, scope="module")
def _none_hash() -> None:
    init_none_hash(HASH)


def edit(seed: int = 0, tokens: Any = "all", layers: Any = 0) -> Edit:
    vector = np.random.default_rng(seed).standard_normal(4)
    return Edit(kind="add", point="pre_attn", layers=layers, vector=vector, tokens=tokens)


def keys(edits: list[Edit], prompt: list[int], output: list[int] | None = None, salt: str | None = None) -> list[bytes]:
    request = Request(
        "r", list(prompt), VllmSamplingParams(max_tokens=50), None, cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, HASH),
    )  # fmt: skip
    if edits:
        resolved = resolve(compile_program(edits), len(prompt), LAYERS)
        request._block_hasher = steering_hasher(request._block_hasher, resolved, BLOCK, HASH)
        request.block_hashes = []
        request.update_block_hashes()
    for token in output or []:
        request.append_output_token_ids(token)
    return list(request.block_hashes)


PROMPT, OUTPUT = list(range(10, 20)), list(range(30, 40))


def shared(a: list[bytes], b: list[bytes]) -> int:
    """How many leading blocks two requests share."""
    equal = [x == y for x, y in zip(a, b, strict=False)]
    return equal.index(False) if False in equal else len(equal)


def test_an_edited_prompt_shares_no_block_with_a_plain_one() -> None:
    """Failure: steered KV served to a plain request through the prefix cache."""
    assert shared(keys([edit()], PROMPT), keys([], PROMPT)) == 0
    assert not set(keys([edit()], PROMPT, OUTPUT)) & set(keys([], PROMPT, OUTPUT))


def test_equal_content_shares_and_other_content_does_not() -> None:
    """Failure: a name re-registered with other content serving the old content's KV."""
    assert keys([edit(1)], PROMPT, OUTPUT) == keys([edit(1)], PROMPT, OUTPUT)
    assert shared(keys([edit(1)], PROMPT), keys([edit(2)], PROMPT)) == 0
    assert shared(keys([edit(1, layers=0)], PROMPT), keys([edit(1, layers=1)], PROMPT)) == 0


def test_edits_of_generated_tokens_share_the_prompt_with_everybody() -> None:
    """10 prompt tokens, blocks of 4: two whole prompt blocks are shared, the mixed third is not."""
    steered = keys([edit(1, "generated")], PROMPT, OUTPUT)
    assert shared(steered, keys([], PROMPT, OUTPUT)) == 2
    assert shared(steered, keys([edit(2, "generated")], PROMPT, OUTPUT)) == 2


def test_an_edit_of_late_positions_shares_the_blocks_before_it() -> None:
    assert shared(keys([edit(1, [[9, None]])], PROMPT, OUTPUT), keys([], PROMPT, OUTPUT)) == 2


def test_prompts_of_other_lengths_share_their_common_edited_prefix() -> None:
    """Catches a key that holds the prompt's length where nothing depends on it yet."""
    assert shared(keys([edit(1, "prompt")], PROMPT), keys([edit(1, "prompt")], [*PROMPT, 7, 7, 7, 7])) == 2


def test_where_the_prompt_ends_is_part_of_the_key_once_it_matters() -> None:
    """The same tokens and the same edits, but one prompt ends earlier: later blocks differ."""
    short = keys([edit(1, "prompt")], PROMPT[:6], PROMPT[6:] + OUTPUT)
    long = keys([edit(1, "prompt")], PROMPT, OUTPUT)
    assert shared(short, long) == 1


def test_a_users_salt_still_separates() -> None:
    """Catches a key that replaces vLLM's own extra keys."""
    assert shared(keys([edit(1)], PROMPT, salt="a"), keys([edit(1)], PROMPT, salt="b")) == 0
    assert keys([edit(1)], PROMPT, salt="a") == keys([edit(1)], PROMPT, salt="a")


def test_edits_that_touch_no_key_or_value_fork_nothing() -> None:
    last = Edit(kind="add", point="post_block", layers=LAYERS - 1, vector=np.ones(4))
    assert keys([last], PROMPT, OUTPUT) == keys([], PROMPT, OUTPUT)


def test_blocks_appended_one_by_one_have_the_keys_of_blocks_hashed_at_once() -> None:
    """Catches a chain that is continued from re-keyed hashes: a follow-up prompt would then never hit."""
    everywhere = edit(1)
    assert keys([everywhere], PROMPT, OUTPUT) == keys([everywhere], PROMPT + OUTPUT)
