# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's CPU build, in engines with steering. Faults that stay are refused by the front end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_steer.compat.internals import bgmv_expand, bgmv_expand_slice

_expand, _expand_slice = bgmv_expand, bgmv_expand_slice  # vLLM's: `expand` takes the place of the names


def expand(inputs: torch.Tensor, weights: Any, output: Any, indices: torch.Tensor, add_inputs: bool = True) -> None:
    """Run vLLM's product of LoRA rows with the second matrices, without rows that have no adapter.

    vLLM marks these rows by the index -1, and then takes the last slot for it.
    """
    _expand(_of_adapters(inputs, indices), weights, output, indices, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    weights: Any,
    output: Any,
    indices: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Run :func:`expand` for some columns of the output."""
    _expand_slice(_of_adapters(inputs, indices), weights, output, indices, slice_offset, slice_size, add_inputs)


def _of_adapters(inputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return inputs.masked_fill((indices < 0).unsqueeze(1), 0)


@contextmanager
def no_draws_for_chunks(runner: Any) -> Iterator[None]:
    """Hide the generators of requests whose prompt goes on in the next step while runner V1 samples.

    vLLM samples for them too, discards the token, and turns the generator back, which no generator on a CPU can do.
    """
    generators = runner.input_batch.generators
    unfinished = runner.discard_request_mask.np
    hidden = {i: generators.pop(i) for i in list(generators) if unfinished[i]}
    try:
        yield
    finally:
        generators.update(hidden)
