# SPDX-License-Identifier: Apache-2.0
"""The kernels of Engram layers in plain torch (``ngrams.py``), against vLLM's own, which Triton interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import ngrams
from tests.conformance.shard import selected

DEAD = -1
PAD, BLOCK, ORDERS, HEADS, DEPTH = 3, 4, 4, 2, 3
VOCAB, COMPRESSED = 40, 20
ROW = "deepseek_v41_engram"
Call = tuple[str, tuple[int, ...], list[Any], dict[str, Any]]
"""Kernel, grid, arguments, and arguments by name."""

pytestmark = pytest.mark.skipif(not selected(ROW), reason="belongs to another part of the architectures")


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_random())


def _numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_random(), dtype=torch.int32)


def memory() -> Call:
    """Write streams plus gated values; one token is masked, and one key is the negative of its stream."""
    tokens, count, width = 5, 4, 8
    streams, kv, output = _rows(tokens, count, width), _rows(tokens, (count + 1) * width), torch.zeros(5, 4, 8)
    kv[2, : count * width] = -streams[2].flatten()
    q, k = _rows(count, width).abs(), _rows(count, width).abs()
    keep = torch.tensor([True, False, True, True, True])
    strides = [*streams.stride(), *kv.stride(), *q.stride(), *k.stride(), *keep.stride(), *output.stride()]
    args = [streams, kv, q, k, keep, output, tokens, *strides, 1e-5, 1e-6]
    return "_fused_engram_post_wkv_kernel", (tokens * count,), args, {
        "DIM": width, "HC_MULT": count, "BLOCK_SIZE": width, "HAS_MASK": True,
    }  # fmt: skip


def lookup(start: int, end: int, first_head: int, heads: int) -> Call:
    """Write the rows of some heads; of six columns with hashes of ten each, the last two are out of the table."""
    columns, width, block = 6, 32, 16
    weight = _rows(end - start, width).to(torch.float8_e4m3fn)
    scales = (ngrams._NEUTRAL + _numbers(3, end - start, width // block)).to(torch.uint8)
    ids = _numbers(10, 7, columns) + 10 * torch.arange(columns, dtype=torch.int32)
    out = torch.zeros(7, heads, width, dtype=torch.bfloat16)
    args = [weight, scales, ids, ids, out, start, end, 7 * heads, *ids.stride()]
    return "_engram_lookup_kernel", (2,), args, {
        "HEAD_START": first_head, "LOCAL_HEADS": heads, "TOTAL_HEADS": columns, "DIM": width, "QUANT_BLOCK": block,
        "BLOCK_R": 4, "GRID": 2, "SORTED": False, "PACKED": False, "OUT_STRIDE": out.stride(0),
    }  # fmt: skip


def stored() -> Call:
    """Store tokens; one has no slot, and one is dead."""
    ids = _numbers(VOCAB, 6)
    dead = torch.tensor([False, True, False, False, False, False])
    slots = torch.tensor([5, 6, 7, -1, 16, 17])
    args = [ids, _token_map(), dead, slots, _cache(), 6, ids.stride(0), dead.stride(0), slots.stride(0), 256, DEAD]
    return "_write_hash_cache_kernel", (1,), args, {}


def hashes(cached: bool) -> Call:
    """Hash four requests: a whole prompt, a later part of one, one generated token, and none."""
    positions = torch.tensor([0, 1, 2, 3, 4, 9, 10, 11, 6])
    starts = torch.tensor([0, 5, 8, 9, 9], dtype=torch.int32)
    ids = _numbers(VOCAB, len(positions))
    dead = torch.zeros(len(positions), dtype=torch.bool)
    dead[1] = True
    # The newest first. The third request's last two are generated, which runner V1 does not name.
    before = torch.tensor([[-1, -1, -1], [8, 9, 10], [-1, -1, 12], [-1, -1, -1]], dtype=torch.int32)
    before_dead = before == 9
    blocks = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 7, 0], [0, 0, 0]], dtype=torch.int32)
    primes = torch.tensor([[[53, 59], [61, 67], [71, 73]], [[79, 83], [89, 97], [101, 103]]])
    offsets = torch.cumsum(primes.flatten(1), 1) - primes.flatten(1)
    multipliers = torch.tensor([[3, 1 << 50 | 1, 7, 11], [13, 17, 1 << 51 | 1, 23]])
    output = torch.zeros(len(positions), 2, (ORDERS - 1) * HEADS, dtype=torch.int32)
    cache = _cache() if cached else None
    args = [ids, _token_map(), dead, positions, blocks, starts, multipliers, primes, offsets, cache, before,
            before_dead, output, len(positions), 32 if cached else 0, PAD]  # fmt: skip
    return "_hash_ids_kernel", (1, 2), args, {
        "input_stride": 1, "mask_stride": 1, "position_stride": 1, "table_stride": blocks.stride(0),
        "table_col_stride": blocks.stride(1), "query_stride": 1, "num_query_rows": len(starts) - 1,
        "num_table_rows": len(blocks), "max_blocks": blocks.shape[1], "cache_block_size": BLOCK,
        "MAX_NGRAM": ORDERS, "num_heads": HEADS, "BLOCK_T": 16, "BLOCK_H": HEADS, "dead_id": DEAD,
        "lookback_depth": DEPTH, "lookback_row_stride": DEPTH, "lookback_col_stride": 1,
        "lookback_mask_row_stride": DEPTH, "lookback_mask_col_stride": 1,
    }  # fmt: skip


def _token_map() -> torch.Tensor:
    return torch.arange(VOCAB, dtype=torch.int32) // (VOCAB // COMPRESSED)


def _cache() -> torch.Tensor:
    """Return compressed ids of 32 slots; the fifth of each eight is dead."""
    cache = torch.arange(32, dtype=torch.int32) % COMPRESSED
    cache[4::8] = DEAD
    return cache


CALLS = (memory(), lookup(0, 60, 0, 6), lookup(20, 50, 2, 3), lookup(40, 60, 4, 4), stored(), hashes(True),
         hashes(False))  # fmt: skip


@pytest.fixture(scope="module")
def by_vllm(tmp_path_factory: pytest.TempPathFactory) -> Sequence[list[Any]]:
    """Return the arguments of the calls after vLLM's kernels ran."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save(list(CALLS), folder / "calls")
    command = [sys.executable, "-m", "tests.conformance.interpreted", str(folder / "calls"), str(folder / "results")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "1"})
    results: list[list[Any]] = torch.load(folder / "results")
    return results


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda number: f"{CALLS[number][0]}-{number}")
def test_computes_what_the_kernel_computes(number: int, by_vllm: Sequence[list[Any]]) -> None:
    """Catches hashes of other tokens, rows of another rank's heads, and gates without their mask or their sign."""
    name, grid, args, kwargs = CALLS[number]
    ours = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    ngrams.Kernel(ngrams.KERNELS[name])[grid](*ours, **kwargs)
    changed = 0
    for before, one, other in zip(args, ours, by_vllm[number], strict=True):
        if isinstance(before, torch.Tensor):
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-6, atol=1e-6)
            changed += not torch.equal(before.float(), other.float())
    assert changed == 1, "the kernel wrote nothing"
