# SPDX-License-Identifier: Apache-2.0
"""Modules and registries without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.server.fakes import HIDDEN, REPORT
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.storage import RegistryStore

CAPABILITIES = Capabilities.merge([REPORT], SteeringConfig())


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(HIDDEN).astype("f4")


def content(seed: int = 0) -> dict[str, Any]:
    """Return content for every part of a module."""
    return {
        "base": {"post_block": {"1": {"vector": vector(seed), "scale": 2.0}, "0": vector(seed + 1)}},
        "prefill": {"pre_attn": {2: vector(seed + 2)}},
        "decode": {"pre_attn": {3: vector(seed + 3)}},
        "edits": [
            {"kind": "ablate", "point": "post_block", "layers": "all", "vector": vector(seed + 4)},
            {"kind": "clamp", "point": "pre_attn", "layers": [0, 1], "vector": vector(seed + 5), "low": 0.0,
             "tokens": [[0, 3], -1]},
        ],
        "probes": {
            "joy": vector(seed + 6),
            "anger": vector(seed + 7),
            "whole": {"weights": vector(seed + 6), "bias": 0.75, "sigmoid": True, "point": "pre_attn", "layer": 2},
            "deep.weights": {"weights": np.stack([vector(seed + 8), vector(seed + 9)]), "outputs": [1.0, -2.0],
                             "biases": [0.5, 0.25], "activation": "tanh", "bias": -0.5, "layer": 1},
        },
    }  # fmt: skip


def module(seed: int = 0) -> Module:
    return parse_module(content(seed))


def registry(store: RegistryStore | None = None, **limits: int) -> SteeringRegistry:
    return SteeringRegistry(CAPABILITIES, store, RegistryLimits(**limits))
