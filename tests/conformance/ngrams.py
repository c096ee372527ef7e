# SPDX-License-Identifier: Apache-2.0
"""Plain torch in place of the kernels of Engram layers, which look up a memory by the n-gram that ends at a token.

The tables, the primes, the tokenizer's compressed ids, the staging and the loop over the layers are vLLM's own. Each
kernel here takes the arguments of vLLM's; ``test_ngrams.py`` compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from tests.conformance.model import VOCAB

_ENGRAM: Final = "vllm.models.deepseek_v41.common.engram"
_NEUTRAL: Final = 127
"""Exponent byte of the scale 1."""
COMPRESSED: Final = VOCAB // 2
"""Number of ids that are left when tokens that differ in case alone are one."""


class Kernel:
    """A function that is launched as a kernel, with a grid in brackets that it does not need."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self.compute = compute

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compute


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, the name and the replacement of what Engram layers need a GPU for."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    engram: Any = sys.modules[_ENGRAM]
    yield from ((engram, name, Kernel(compute)) for name, compute in KERNELS.items())
    table, layer = engram.ParallelEngramEmbedding, engram.Engram
    allocate, stage = table._allocate_weights, layer._init_staging
    yield table, "_allocate_weights", lambda self: _with_scales(self, *allocate(self))
    yield layer, "_init_staging", lambda self, *sizes: _in_float32(self, stage, *sizes)
    yield engram.triton, "next_power_of_2", lambda number: 1 << (number - 1).bit_length()
    yield CPUModelRunner, "load_model", _with_earlier_tokens(CPUModelRunner.load_model)
    yield torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1)
    yield torch.accelerator, "current_device_index", lambda: 0


def _with_scales(table: Any, weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the scales with powers of two that depend on the row of the whole table; weights are filled elsewhere."""
    row = table.vocab_start_idx + torch.arange(len(scales)).unsqueeze(-1)
    scales.copy_(_NEUTRAL + (row + torch.arange(scales.shape[1])) % 3)
    return weight, scales


def _in_float32(layer: Any, stage: Callable[..., None], *sizes: int) -> None:
    """Make the buffer for rows. vLLM's are bfloat16 and so is the model; here the projection computes in float32."""
    stage(layer, *sizes)
    layer.staged_rows = layer.staged_rows.float()


def _with_earlier_tokens(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap the CPU's runner, which does not make the buffer for earlier tokens of the prompt that runner V1 fills."""

    def load_model(runner: Any, *args: Any, **given: Any) -> None:
        load(runner, *args, **given)
        if depth := getattr(runner.model, "token_lookback_depth", 0):
            runner.lookback_token_ids = runner._make_buffer(runner.max_num_reqs, depth, dtype=torch.int32)

    return load_model


def remember_tokens(
    ids: Any, token_map: Any, dead: Any, slots: Any, cache: Any, num_tokens: int, *strides: int
) -> None:
    """Store the compressed id of each token in the slot of its cache entry."""
    dead_id = strides[-1]
    real = slots[:num_tokens] >= 0
    compressed = token_map[ids[:num_tokens].long()].masked_fill(dead[:num_tokens], dead_id)
    cache[slots[:num_tokens][real]] = compressed[real]


def hash_ids(
    ids: Any, token_map: Any, dead: Any, positions: Any, blocks: Any, starts: Any, multipliers: Any, primes: Any,
    offsets: Any, cache: Any, before: Any, before_dead: Any, output: Any, num_tokens: int, num_slots: int,
    pad_id: int, *, cache_block_size: int, dead_id: int, **others: Any,
) -> None:  # fmt: skip
    """Hash the n-grams that end at each token, for each order, head and layer.

    An earlier token is in this step, or among those that the runner names (``before``, the newest first), or in the
    slot that the request's block table gives.
    """

    def compressed(tokens: torch.Tensor, are_dead: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = token_map[tokens.long()].masked_fill(are_dead, dead_id)
        return found

    own = compressed(ids, dead)
    named = compressed(before.clamp(min=0), before_dead)
    grams = torch.full((num_tokens, multipliers.shape[1]), pad_id, dtype=torch.int64)
    requests = (torch.arange(num_tokens).unsqueeze(-1) >= starts[1:]).sum(-1).clamp(max=len(starts) - 2)
    for token, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        first = int(positions[min(int(starts[request]), num_tokens - 1)])
        for shift in range(min(position + 1, grams.shape[1])):
            at = position - shift
            known = first - 1 - at
            if at >= first:
                found = own[token - shift]
            elif known < before.shape[1] and before[request, known] >= 0:
                found = named[request, known]
            elif cache is None:
                found = torch.tensor(pad_id)
            else:
                # vLLM warms its kernels up with a table of one block.
                at = min(at, blocks.shape[1] * cache_block_size - 1)
                found = cache[int(blocks[request, at // cache_block_size]) * cache_block_size + at % cache_block_size]
            if found == dead_id:
                # Neither this token nor those before it belong to the n-gram.
                break
            grams[token, shift] = found
    for layer in range(len(multipliers)):
        mixed = torch.zeros(num_tokens, dtype=torch.int64)
        columns = []
        for shift, factor in enumerate(multipliers[layer].tolist()):
            mixed = mixed ^ (grams[:, shift] * factor)
            if shift:
                columns.append(mixed.unsqueeze(-1) % primes[layer, shift - 1])
        output[:, layer] = (torch.cat(columns, -1) + offsets[layer]).to(output.dtype)


def look_up(
    weight: Any, scales: Any, ids: Any, unused: Any, out: Any, start: int, end: int, *sizes: int, HEAD_START: int,
    LOCAL_HEADS: int, TOTAL_HEADS: int, QUANT_BLOCK: int, SORTED: bool, PACKED: bool, **others: Any,
) -> None:  # fmt: skip
    """Write the rows of this rank's heads; zeros where a hash or a head is not its own."""
    if SORTED or PACKED:
        raise NotImplementedError("sorted or packed rows, which only some GPUs use")
    wanted = torch.full((len(ids), LOCAL_HEADS), -1)
    heads = ids[:, HEAD_START : min(HEAD_START + LOCAL_HEADS, TOTAL_HEADS)]
    wanted[:, : heads.shape[1]] = heads
    own = (wanted >= start) & (wanted < end)
    rows = _rows(weight, scales, (wanted - start).where(own, 0), QUANT_BLOCK)
    out[: len(ids)] = (rows * own.unsqueeze(-1)).to(out.dtype)


def _rows(weight: torch.Tensor, scales: torch.Tensor, at: torch.Tensor, block: int) -> torch.Tensor:
    factor = torch.exp2(scales[at].float() - _NEUTRAL).repeat_interleave(block, dim=-1)
    return weight[at].float() * factor


def add_gated(
    streams: Any, kv: Any, q: Any, k: Any, keep: Any, output: Any, num_rows: int, *sizes: Any, HAS_MASK: bool,
    **others: Any,
) -> None:  # fmt: skip
    """Write each stream plus the value of the n-gram, gated by how well its key matches the stream."""
    eps, least = sizes[-2:]
    output.copy_(gated(streams, kv, q, k, keep if HAS_MASK else None, eps, least))


def gated(streams: Any, kv: Any, q: Any, k: Any, keep: Any, eps: float, least: float) -> torch.Tensor:
    """Return the streams with the value added to each, by the formula of docs/reference/streams.md."""

    def unit(rows: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()

    count, width = streams.shape[1:]
    wide, keys, value = streams.float(), kv[:, :-width].float().unflatten(-1, (count, width)), kv[:, -width:].float()
    match = (unit(wide) * q.float() * k.float() * unit(keys)).sum(-1) / width**0.5
    root = match.abs().clamp(min=least).sqrt()
    gate = torch.sigmoid(torch.where(match < 0, -root, root))
    if keep is not None:
        gate = gate * keep.unsqueeze(-1)
    sums: torch.Tensor = wide + gate.unsqueeze(-1) * value.unsqueeze(1)
    return sums.to(streams.dtype)


def with_memory(engram: Any, streams: torch.Tensor, hashes: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the streams behind an Engram layer's memory, from its tables and parameters; on one rank."""
    table = engram.embed_tokens
    found = _rows(table.weight, table.weight_scale_inv, hashes[:, engram.layer_hash_index].long(), table.block_size)
    kv = engram.wkv(found.flatten(-2).to(streams.dtype))
    return gated(streams, kv, engram.q_weight, engram.k_weight, keep, engram.eps, engram.clamp_value)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with two tokens of each word, which differ in case; Engram layers hash what is left of both."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = [f"{letter}{number}" for number in range(COMPRESSED) for letter in "Tt"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


KERNELS: Final[dict[str, Callable[..., None]]] = {
    "_write_hash_cache_kernel": remember_tokens,
    "_hash_ids_kernel": hash_ids,
    "_engram_lookup_kernel": look_up,
    "_fused_engram_post_wkv_kernel": add_gated,
}
"""Kernels by their names in vLLM's module."""
