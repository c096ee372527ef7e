# SPDX-License-Identifier: Apache-2.0
"""What steering adds to the host's work for a step: the Python around the forward pass and the scheduler's.

    python -m benchmarks.step --out benchmarks/results/step.json

Without a model: the parts that wrap vLLM's runner V2 and its scheduler stand around methods that do nothing, and what
those take alone is taken off. Microseconds per step, the least of several runs. *Idle*: nobody steers. *Settled*: each
request of a batch has one vector, and decodes with the rows of the step before; in the scheduler, where decoding with a
vector is nothing, each is read at one layer. *Waves*: requests with equal reads, or with vectors of their own, come at
once, have the step of their prompts and one more, and are gone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from vllm_steer import SamplingParams
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.admission import AdmissionController
from vllm_steer.engine.arena import ArenaBudget, TokenLimiter
from vllm_steer.engine.cudagraph_sets import CUDAGraphSetManager
from vllm_steer.engine.model_output import attach_stats
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.engine.runner_v2 import SteeringRunnerV2, _steering_state
from vllm_steer.engine.scheduler import SteeringScheduler
from vllm_steer.engine.stats_collector import EngineStatsCollector
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.params import EXTRA_KEY
from vllm_steer.points import points_on
from vllm_steer.program import TableAllocator, compile_program
from vllm_steer.program.program_files import MIN_PROGRAM_BYTES
from vllm_steer.spec import parse_capture, parse_fields
from vllm_steer.taps.ops import DeviceOps
from vllm_steer.taps.tables import Tables

LAYERS, HIDDEN, RUNS, STEPS, WAVES, PROMPT = 32, 4096, 7, 5000, 21, 16


class Runner:
    """In the place of vLLM's runner and of its model state."""

    def execute_model(self, *args: Any) -> None: ...

    def preprocess_state(self, *args: Any) -> None: ...

    def prepare_inputs(self, *args: Any) -> None: ...

    def sample_tokens(self, *args: Any) -> Any:
        return OUTPUT


class Scheduler:
    """In the place of vLLM's scheduler."""

    pause_state = PauseState.UNPAUSED

    def schedule(self) -> None: ...

    def _reserve_prefill_lookahead(self, *args: Any) -> int:
        return 1

    def update_from_output(self, *args: Any) -> dict[int, Any]:
        return {}

    def add_request(self, request: Any) -> None: ...

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return True

    def _free_request(self, request: Any) -> None: ...


OUTPUT = SimpleNamespace(get_output=lambda: None)


def steering() -> WorkerSteeringManager:
    """As an engine rank has it, without a model."""
    config, cpu = SteeringConfig(), torch.device("cpu")
    tables = Tables(
        config, num_sites=3 * LAYERS, hidden_size=HIDDEN, max_tokens=512, max_requests=256, dtype=torch.bfloat16,
        device=cpu,
    )  # fmt: skip
    decoder: Any = None
    return WorkerSteeringManager(
        decoder,
        ProgramStore(tables, config, LAYERS, range(LAYERS)),
        CUDAGraphSetManager(tables, config.graph_sets, 3, range(LAYERS)),
        DeviceOps(lambda *args: None, lambda *args: None),
        {},
        captures=True,
        speculative=False,
    )


def scheduler() -> Any:
    made: Any = object.__new__(SteeringScheduler)
    config = SteeringConfig()
    made.steering_allocator = TableAllocator(config.max_rows, config.max_instructions, config.max_vectors)
    made.steering_admission = AdmissionController(
        made.steering_allocator, (config.capture_mib << 20) // (2 * HIDDEN), 600
    )
    made._row_bytes = 2 * HIDDEN
    made.connector, made.max_model_len = None, 8192
    made._steering_points, made._steering_layers = frozenset(points_on(())), LAYERS
    made._capture_policy = config.capture_policy
    made.steering_row_sender, made._steering_stats = RowSender(), EngineStatsCollector(made.steering_admission)
    made._arena = ArenaBudget(config.capture_rows, 0, speculates=False)
    made._with_program, made._malformed, made.requests = {}, {}, {}
    made._token_limiter = TokenLimiter(made._arena, made._with_program, None)
    managers = (object.__new__(FullAttentionManager),)
    made.kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    # No blocks are zeroed, as on a GPU.
    made._edited_blocks, made.scheduler_config = None, None
    return made


def seconds(step: Callable[[], None]) -> float:
    """Of one step."""
    least = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        least = min(least, (time.perf_counter() - started) / STEPS)
    return least


def worker(batch: int) -> float:
    """Microseconds that a step of ``batch`` steered requests adds; 0: nobody steers."""
    ours = steering()
    state = _steering_state(Runner)()
    state.steering = ours
    runner = type("Steered", (SteeringRunnerV2, Runner), {})()
    runner.steering = ours
    vector = {"post_block": {3: np.ones(HIDDEN, "f4")}}
    for slot in range(batch):
        ours.store.add(f"request-{slot}", slot, SamplingParams(steering_vectors=vector), 8)
    size = max(batch, 1)
    described = SimpleNamespace(
        num_reqs=size, num_tokens=size, num_tokens_after_padding=size, req_ids=[f"request-{i}" for i in range(size)],
        idx_mapping=torch.arange(size), idx_mapping_np=np.arange(size, dtype=np.int32),
        query_start_loc=torch.arange(size + 1), positions=torch.full((size,), 20),
        num_computed_tokens_np=np.full(size, 20, dtype=np.int32), num_scheduled_tokens=np.ones(size, dtype=np.int32),
    )  # fmt: skip

    def step() -> None:
        runner.execute_model(None)
        state.preprocess_state(described)
        state.prepare_inputs(described, None)
        attach_stats(runner.sample_tokens(None), ours.take_stats())

    def bare() -> None:
        plain.execute_model(None)
        plain.preprocess_state(described)
        plain.prepare_inputs(described, None)
        plain.sample_tokens(None)

    plain = Runner()
    OUTPUT.get_output = lambda: None
    return 1e6 * (seconds(step) - seconds(bare))


def scheduling(batch: int, *, reading: bool = False) -> float:
    """Microseconds that a decoding step of ``batch`` requests, all read or all plain, adds in the scheduler."""
    ours, plain, output = scheduler(), Scheduler(), SimpleNamespace()
    requests = made_requests(programs("one layer", batch, 0) if reading else [{}] * batch)
    for request in requests:
        ours.add_request(request)
        ours._handle_blocked_waiting_request(request)
        request.status, request.num_tokens = RequestStatus.RUNNING, PROMPT + 1

    def step(of: Any) -> None:
        of.schedule()
        for request in requests:
            of._reserve_prefill_lookahead(request, PROMPT, 1)
        of.update_from_output(None, output)

    return 1e6 * (seconds(lambda: step(ours)) - seconds(lambda: step(plain)))


def made_requests(extra: list[dict[str, bytes]]) -> list[Any]:
    """With these ``extra_args``, as they reach the scheduler."""
    return [
        SimpleNamespace(
            request_id=f"request-{i}", sampling_params=SimpleNamespace(extra_args=each), num_prompt_tokens=PROMPT,
            max_tokens=256, _block_hasher=None, mm_features=(), num_computed_tokens=0, resumable=False,
        )
        for i, each in enumerate(extra)
    ]  # fmt: skip


def programs(kind: str, count: int, seed: int) -> list[dict[str, bytes]]:
    """``extra_args`` of as many requests; of probes one object, as the engine has where many ask for the same."""
    rng = np.random.default_rng(seed)
    if kind.startswith("own vectors"):
        points, layers = (points_on(()), range(LAYERS)) if "96" in kind else (("post_block",), (3,))
        given = [
            {point: {layer: rng.standard_normal(HIDDEN, dtype="f4") for layer in layers} for point in points}
            for _ in range(count)
        ]
        return [{EXTRA_KEY: compile_program(parse_fields({"steering_vectors": each})).to_bytes()} for each in given]
    spec: dict[str, Any] = {"hooks": {"post_block": [3]}, "positions": "all"}
    if kind == "16 probes at 4 layers":
        hooks = {"post_block": [LAYERS * k // 4 for k in range(4)]}
        directions = np.random.default_rng(0).standard_normal((16, HIDDEN), dtype="f4")
        spec |= {"hooks": hooks, "reduce": {"directions": directions}}
    data = compile_program([], [each for _, each in parse_capture({"memory": spec})]).to_bytes()
    return [{EXTRA_KEY: data if len(data) >= MIN_PROGRAM_BYTES else bytes(bytearray(data))} for _ in range(count)]


def wave(kind: str, batch: int) -> dict[str, float]:
    """Microseconds per request, in the scheduler and in the worker, of a wave of ``batch`` requests."""
    ours, there = scheduler(), steering()
    spent: dict[str, list[float]] = {"scheduler": [], "worker": []}
    gc.collect()
    gc.freeze()  # as vLLM does
    for number in range(WAVES):
        requests = made_requests(programs(kind, batch, number))
        slots = np.arange(batch, dtype=np.int32)
        started = time.perf_counter()
        for request in requests:
            ours.add_request(request)
        ours.schedule()
        for request in requests:
            if not ours._handle_blocked_waiting_request(request):
                raise RuntimeError(f"{request.request_id} waits")
        arrived = time.perf_counter()
        for slot, request in enumerate(requests):
            there.store.add(request.request_id, slot, request.sampling_params, PROMPT)
        for first, count in ((0, PROMPT), (PROMPT, 1)):
            there.begin_step(
                StepBatch(
                    layout=lambda: None, ids=[request.request_id for request in requests], slot=slots,
                    first=np.full(batch, first), count=np.full(batch, count), num_padded=batch * count,
                )
            )  # fmt: skip
            there.capture._stored = None
        for request in requests:
            there.store.remove(request.request_id)
        there.store.flush()
        gone = time.perf_counter()
        for request in requests:
            ours._free_request(request)
        ended = time.perf_counter()
        spent["scheduler"].append(arrived - started + ended - gone)
        spent["worker"].append(gone - arrived)
    gc.unfreeze()
    return {part: 1e6 * min(seconds) / batch for part, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = {
        "idle, worker": {str(batch): worker(0) for batch in (1,)},
        "idle, scheduler": {str(batch): scheduling(batch) for batch in (1, 256)},
        "settled, scheduler": {str(batch): scheduling(batch, reading=True) for batch in (1, 256)},
        "settled, worker": {str(batch): worker(batch) for batch in (1, 256)},
    }
    waves = {kind: wave(kind, 256) for kind in ("own vectors", "one layer", "16 probes at 4 layers")}
    waves["own vectors at 96 sites"] = wave("own vectors at 96 sites", 16)
    environment = {
        "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(),
        "python": platform.python_version(),
    }  # fmt: skip
    arguments.out.write_text(
        json.dumps({"environment": environment, "microseconds": found, "wave": waves}, indent=1) + "\n"
    )
    print(json.dumps({**found, "wave": waves}, indent=1))


if __name__ == "__main__":
    main()
