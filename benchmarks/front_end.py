# SPDX-License-Identifier: Apache-2.0
"""CPU time that steering adds in the front end per request, from the request's fields to the engine message.

    python benchmarks/front_end.py --out benchmarks/results/front-end.json

No engine runs. The script parses and compiles the vectors, composes and checks the request, clones it as vLLM does and
encodes it with vLLM's encoder. The time of the same request without steering is subtracted. Every request has its own
vectors, except in the cases with equal vectors. Times are CPU milliseconds, as the median over the requests, for hidden
size 4,096.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_steer import SamplingParams
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.requests import check_engine_request, complete_params
from vllm_steer.params import strip_for_engine
from vllm_steer.program.program_files import ProgramFileCache
from vllm_steer.registry.registry import SteeringRegistry

LAYERS, HIDDEN, REQUESTS, WARM_UP = 32, 4096, 128, 8
POINTS = ("pre_attn", "post_attn", "post_block")
PROBES = [f"p{i}" for i in range(16)]


def vectors(layers: int, seed: int) -> dict[str, dict[int, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {point: {i: rng.standard_normal(HIDDEN, dtype="f4") for i in range(layers)} for point in POINTS}


def probes() -> np.ndarray:
    """Return sixteen directions."""
    return np.random.default_rng(2).standard_normal((len(PROBES), HIDDEN), dtype="f4")


def projected(**reduce: Any) -> dict[str, Any]:
    """Return the fields of a capture with projections at four layers."""
    hooks = {"post_block": [LAYERS * k // 4 for k in range(4)]}
    return {"capture": {"memory": {"hooks": hooks, "positions": "all", "reduce": reduce}}}


def make_context() -> EngineContext:
    capabilities = Capabilities(LAYERS, HIDDEN, 8192, "bfloat16", {}, SteeringConfig())
    registry = SteeringRegistry(capabilities, None)
    registry.register("calm", base=vectors(1, 0))
    registry.register("bench", probes=dict(zip(PROBES, probes(), strict=True)))
    return EngineContext(
        capabilities, CaptureManager(capabilities, "model", {}), registry, program_files=ProgramFileCache()
    )


def measure(fields: Callable[[int], dict[str, Any]], context: EngineContext) -> float:
    """Return the milliseconds per request."""
    processor = SimpleNamespace(_steering_context=context)
    encoder = MsgpackEncoder()
    spent: list[float] = []
    for i in range(REQUESTS):
        given = fields(i)
        started = time.process_time()
        params = complete_params(context, SamplingParams(max_tokens=16, temperature=0, **given)).clone()
        request = EngineCoreRequest(
            request_id=f"request-{i}", prompt_token_ids=[1] * 16, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        check_engine_request(processor, request)
        strip_for_engine(request, context.program_files)
        encoder.encode(request)
        spent.append(time.process_time() - started)
    return 1000 * statistics.median(spent[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    context = make_context()
    equal, directions = vectors(LAYERS, 1), probes()
    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        "own vectors at 3 sites": lambda i: {"steering_vectors": vectors(1, i + 10)},
        "own vectors at 96 sites": lambda i: {"steering_vectors": vectors(LAYERS, i + 10)},
        "the same vectors at 96 sites": lambda i: {"steering_vectors": equal},
        "a module of 3 sites by name": lambda i: {"steering_modules": ["calm"]},
        "16 probes at 4 layers": lambda i: projected(directions=directions),
        "16 probes by name": lambda i: projected(probes=[f"bench/{name}" for name in PROBES]),
    }
    plain = measure(lambda i: {}, context)
    found = {name: measure(fields, context) - plain for name, fields in cases.items()}
    environment = {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    result = {"environment": environment, "plain_ms": plain, "added_ms_per_request": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
