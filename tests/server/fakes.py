# SPDX-License-Identifier: Apache-2.0
"""A fake engine without a model, with the attributes that the front end reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm_steer.capture.manager import CaptureManager
from vllm_steer.config import SteeringConfig, engine_kwargs
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import EngineContext
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.registry.storage import RegistryStore

HIDDEN, LAYERS, MAX_MODEL_LEN = 8, 4, 64
REPORT: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "max_model_len": MAX_MODEL_LEN,
    "dtype": "float32",
    "refused": {"post_attn": {"2": "this block is parallel"}},
    "unread": {"post_attn": {"3": "this branch is a partial sum"}},
}


class FakeEngine:
    """Engine that responds to the one RPC and records its calls."""

    def __init__(self, *, steering: bool = True) -> None:
        additional = engine_kwargs()["additional_config"] if steering else {}
        self.vllm_config = SimpleNamespace(additional_config=additional, num_speculative_tokens=0)
        self.vllm_config.parallel_config = SimpleNamespace(pipeline_parallel_size=1, distributed_executor_backend="uni")
        self.vllm_config.model_config = SimpleNamespace(served_model_name="tiny")
        self.input_processor = SimpleNamespace()
        self.output_processor = SimpleNamespace()
        self.calls: list[str] = []

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        self.calls.append(method)
        return [REPORT]


def engine_context(
    consumers: Mapping[str, Mapping[str, Any]] | None = None, store: RegistryStore | None = None
) -> EngineContext:
    capabilities = Capabilities.merge([REPORT], SteeringConfig())
    manager = CaptureManager(capabilities, "tiny", consumers or {})
    return EngineContext(capabilities, manager, SteeringRegistry(capabilities, store))


def vector(value: float = 1.0) -> list[float]:
    return [value] * HIDDEN
