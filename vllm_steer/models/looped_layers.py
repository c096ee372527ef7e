# SPDX-License-Identifier: Apache-2.0
"""Order in which looped models run their layers.

A layer's number counts runs, as vLLM counts the key-value caches of these models and HF Transformers its caches: run
``r`` of layer ``i`` of a stack of ``n`` is layer ``r * n + i``. So a layer and a pass are named by one number, and an
edit "at every layer" is one at every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def loop_coder_runs(model: nn.Module, config: Any) -> Sequence[tuple[nn.Module, int]]:
    """Return the layers of IQuest-LoopCoder: the whole stack runs ``loop_num`` times."""
    body: Any = next(each for each in model.modules() if hasattr(each, "gate_projections"))
    return [(layer, loop) for loop in range(getattr(config, "loop_num", 2)) for layer in body.layers]


def hrm_text_runs(model: nn.Module, config: Any) -> Sequence[tuple[nn.Module, int]]:
    """Return the layers of HRM-Text: in each high cycle the low stack runs ``L_cycles`` times, then the high stack."""
    body: Any = next(each for each in model.modules() if hasattr(each, "L_module"))
    steps = range(config.H_cycles * (config.L_cycles + 1))
    is_high = [step % (config.L_cycles + 1) == config.L_cycles for step in steps]
    return [(layer, step) for step in steps for layer in (body.H_module if is_high[step] else body.L_module).layers]


def hrm_text_gaps(config: Any) -> Sequence[int]:
    """Return the first layer of each run of a stack: it reads the sum of both states, behind a norm."""
    stack = config.num_layers_per_stack
    return range(stack, stack * config.H_cycles * (config.L_cycles + 1), stack)


def solar_gaps(config: Any) -> Sequence[int]:
    """Return the layers of Solar that read a mixture of the stream with an earlier one."""
    return [*config.bskcn_3, *config.bskcn_4]


def every_gap(config: Any) -> Sequence[int]:
    """Return all layers but the first: each reads a prediction from all streams of the layer before."""
    return range(1, config.num_hidden_layers)


def engram_gaps(config: Any) -> Sequence[int]:
    """Return the layers of DeepSeek V4.1 that add a memory to the streams before they read them."""
    return getattr(config, "engram_layer_ids", None) or ()
