# SPDX-License-Identifier: Apache-2.0
"""Replacements for parts that vLLM 0.32 lacks for expert parallelism on CPU. Only workers import this module.

vLLM's CPU kernel gets the ids of all experts but only the weights of the rank's own experts, without a mapping. It
reads beyond the weights, and the worker ends with signal 11, also in vLLM without this package:

    VLLM_PLUGINS="" VLLM_CPU_OMP_THREADS_BIND="0|1" vllm bench latency --model MOE --dtype float32 --enforce-eager
        --tensor-parallel-size 2 --enable-expert-parallel

with any mixture-of-experts model for ``MOE``. The tests extend workers with :class:`ExpertsOfThisRank`
(``worker_extension_cls``). Importing this module makes the kernel receive the rank's own ids, and weight 0 for experts
of other ranks. vLLM still assigns experts to ranks and sums over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_kernel = CPUUnquantizedExperts.apply
_added: dict[int, torch.Tensor] = {}


def _apply(
    self: Any, *, output: Any, topk_weights: Any, topk_ids: Any, expert_map: Any, w1: Any, **given: Any
) -> None:  # fmt: skip
    if expert_map is not None:
        own = expert_map[topk_ids]
        topk_weights = topk_weights * (own >= 0)
        topk_ids = own.clamp(min=0).to(topk_ids.dtype)
    _kernel(self, output=output, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, w1=w1, **given)
    if w1.data_ptr() in _added:
        output += _added[w1.data_ptr()]


class ExpertsOfThisRank:
    """Worker extension; importing this module corrects vLLM's experts."""

    def add_to_partial_sums(self, layer: int, vector: Any) -> None:
        """Add ``vector`` to the partial sums of this rank's experts of one layer; None stops it."""
        _added.clear()
        if vector is not None:
            experts = self.get_model().model.layers[layer].mlp.experts  # type: ignore[attr-defined]
            (weights,) = (each for name, each in experts.named_parameters() if name.endswith("w13_weight"))
            _added[weights.data_ptr()] = torch.from_numpy(vector)


CPUUnquantizedExperts.apply = _apply
