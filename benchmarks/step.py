# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time that steering adds to a step, in the worker and in the scheduler.

    python -m benchmarks.step --out benchmarks/results/step.json

No model runs. Steering wraps stand-ins for vLLM's runner V2 and scheduler whose methods do nothing, and the time of the
stand-ins alone is subtracted. Results are microseconds per step, the minimum of several runs.

* *Idle*: no request steers or captures.
* *Settled*: every request of a batch has one vector and decodes with the table rows of the previous step. In the
  scheduler, where decoding with a vector costs nothing, every request captures one layer.
* *Readouts*: every request of a batch decodes with 16 probes, without and with a gate on one of them. The step of the
  worker includes taking the records of a CPU, and the scheduler passes them on. Kernels do not run.
* *Waves*: many requests with equal captures, or with different vectors, arrive at once, run their prompt's step and one
  decoding step, and end.
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

from benchmarks.build import identity
from vllm_steer import Edit, SamplingParams
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.admission import AdmissionController
from vllm_steer.engine.arena import ArenaBudget, TokenLimiter
from vllm_steer.engine.cudagraph_sets import CUDAGraphSetManager
from vllm_steer.engine.model_output import attach_stats
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.record_keeper import RecordKeeper
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.engine.runner_v2 import SteeringRunnerV2, _steering_state
from vllm_steer.engine.scheduler import SteeringSchedulerMixin
from vllm_steer.engine.stats_collector import EngineStatsCollector
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.params import PROGRAM_KEY
from vllm_steer.points import points_on
from vllm_steer.program import TableAllocator, compile_program
from vllm_steer.program.program_files import MIN_PROGRAM_BYTES
from vllm_steer.request import parse_capture, parse_fields
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.ops import DeviceOps
from vllm_steer.taps.projection import products_at
from vllm_steer.taps.tables import Tables

LAYERS, HIDDEN, RUNS, STEPS, WAVES, PROMPT = 32, 4096, 7, 5000, 21, 16


class StubRunner:
    """Stand-in for vLLM's runner and its model state."""

    def execute_model(self, *args: Any) -> None: ...

    def preprocess_state(self, *args: Any) -> None: ...

    def prepare_inputs(self, *args: Any) -> None: ...

    def sample_tokens(self, *args: Any) -> Any:
        return OUTPUT


class StubScheduler:
    """Stand-in for vLLM's scheduler."""

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


class SteeringStubScheduler(SteeringSchedulerMixin, StubScheduler):
    """Steering over the stand-in for vLLM's scheduler."""


OUTPUT = SimpleNamespace(get_output=lambda: None)


def make_manager() -> WorkerSteeringManager:
    """Return the steering manager of a worker, without a model."""
    config, cpu = SteeringConfig(), torch.device("cpu")
    tables = Tables(
        config, num_sites=3 * LAYERS, hidden_size=HIDDEN, max_tokens=512, max_requests=256, dtype=torch.bfloat16,
        device=cpu,
    )  # fmt: skip
    decoder: Any = None
    return WorkerSteeringManager(
        decoder,
        ProgramStore(tables, config, LAYERS, range(LAYERS)),
        CUDAGraphSetManager(tables, config.graph_sets, 3, range(LAYERS), "the stand-in has no model"),
        DeviceOps(*[lambda *args: None] * 2, products_at, *[lambda *args: None] * 2),
        {},
        heads={},
        no_lens=None,
        captures=True,
        speculative=False,
        compare_plain_code=False,
    )


def make_scheduler() -> Any:
    made: Any = object.__new__(SteeringStubScheduler)
    config = SteeringConfig()
    made.steering_allocator = TableAllocator(
        config.max_rows, config.max_instructions, config.max_vectors, config.max_matrix_rows
    )
    made.steering_admission = AdmissionController(
        made.steering_allocator, (config.capture_mib << 20) // (2 * HIDDEN), 600
    )
    made._row_bytes = 2 * HIDDEN
    made.connector, made.max_model_len = None, 8192
    made._steering_points, made._steering_layers = frozenset(points_on(())), LAYERS
    made._capture_policy = config.capture_policy
    made.steering_row_sender, made.steering_records = RowSender(), RecordKeeper()
    made._steering_stats = EngineStatsCollector(made.steering_admission)
    made._arena = ArenaBudget(config.capture_rows, 0, speculates=False)
    made._with_program, made._malformed, made.requests = {}, {}, {}
    made._caches_behind_attention = False
    made._without_drafts, made.num_spec_tokens = set(), 0
    made._token_limiter = TokenLimiter(made._arena, made._with_program, None, 8192)
    managers = (object.__new__(FullAttentionManager),)
    made.kv_cache_manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    # Blocks are not zeroed, like on a GPU.
    made._edited_blocks, made.scheduler_config = None, None
    return made


def seconds_per_call(step: Callable[[], None]) -> float:
    least = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        least = min(least, (time.perf_counter() - started) / STEPS)
    return least


def measure_worker(batch: int) -> float:
    """Return the microseconds that steering adds to a step of ``batch`` steered requests; 0 is an idle step."""
    manager = make_manager()
    state = _steering_state(StubRunner)()
    state.steering = manager
    runner = type("SteeringStubRunner", (SteeringRunnerV2, StubRunner), {})()
    runner.steering = manager
    vector = {"post_block": {3: np.ones(HIDDEN, "f4")}}
    for slot in range(batch):
        manager.store.add(f"request-{slot}", slot, SamplingParams(steering_vectors=vector), 8)
    size = max(batch, 1)
    inputs = SimpleNamespace(
        num_reqs=size, num_tokens=size, num_tokens_after_padding=size, req_ids=[f"request-{i}" for i in range(size)],
        idx_mapping=torch.arange(size), idx_mapping_np=np.arange(size, dtype=np.int32),
        query_start_loc=torch.arange(size + 1), positions=torch.full((size,), 20),
        input_ids=torch.zeros(size, dtype=torch.int32),
        num_computed_tokens_np=np.full(size, 20, dtype=np.int32), num_scheduled_tokens=np.ones(size, dtype=np.int32),
    )  # fmt: skip

    def step() -> None:
        runner.execute_model(None)
        state.preprocess_state(inputs)
        state.prepare_inputs(inputs, None)
        attach_stats(runner.sample_tokens(None), manager.take_stats())

    def stub_step() -> None:
        stub.execute_model(None)
        stub.preprocess_state(inputs)
        stub.prepare_inputs(inputs, None)
        stub.sample_tokens(None)

    stub = StubRunner()
    OUTPUT.get_output = lambda: None
    return 1e6 * (seconds_per_call(step) - seconds_per_call(stub_step))


def measure_scheduler(batch: int, *, capture: bool = False) -> float:
    """Return the microseconds that steering adds to the scheduling of a decoding step of ``batch`` requests."""
    steering, stub, output = make_scheduler(), StubScheduler(), SimpleNamespace()
    requests = make_requests(make_programs("one layer", batch, 0) if capture else [{}] * batch)
    for request in requests:
        steering.add_request(request)
        steering._handle_blocked_waiting_request(request)
        request.status, request.num_tokens = RequestStatus.RUNNING, PROMPT + 1

    def step(scheduler: Any) -> None:
        scheduler.schedule()
        for request in requests:
            scheduler._reserve_prefill_lookahead(request, PROMPT, 1)
        scheduler.update_from_output(None, output)

    return 1e6 * (seconds_per_call(lambda: step(steering)) - seconds_per_call(lambda: step(stub)))


def measure_readouts(batch: int, *, gated: bool = False) -> dict[str, float]:
    """Return the microseconds that 16 probes add to a decoding step of ``batch`` requests."""
    manager, scheduler = make_manager(), make_scheduler()
    probes = {f"p{i}": {"probe": np.ones(HIDDEN, "f4"), "point": "post_block", "layer": 3} for i in range(16)}
    when = {"readout": "p0", "above": 0.5, "window": "previous"}
    edit = Edit(kind="add", point="post_block", layers=5, vector=np.ones(HIDDEN, "f4"), when=when)
    params = SamplingParams(readouts=probes, steering=[edit] if gated else None)
    requests = make_requests([params.extra_args] * batch)
    for slot, request in enumerate(requests):
        request.sampling_params = params
        request.is_finished = lambda: False
        scheduler.add_request(request)
        scheduler.requests[request.request_id] = request
        request.client_index = 0
        manager.store.add(request.request_id, slot, params, PROMPT)
    layout = BatchLayout(
        torch.arange(batch), torch.arange(batch + 1), torch.full((batch,), 20), torch.ones(batch, dtype=torch.int64)
    )
    first = np.full(batch, 20)
    step_batch = StepBatch(
        layout=lambda: layout, ids=[request.request_id for request in requests], request_slot=np.arange(batch),
        first=first, count=np.ones(batch, dtype=np.int64), num_padded=batch,
    )  # fmt: skip
    scheduled, output = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={}), SimpleNamespace()
    least = {"worker": float("inf"), "scheduler": float("inf")}
    for _ in range(RUNS):
        spent = dict.fromkeys(least, 0.0)
        for _ in range(STEPS // 10):
            started = time.thread_time()
            manager.begin_step(step_batch)
            manager.end_step()
            output.steering_rows = tuple(step for each in manager.take_rows() for step in each.wait())
            manager.take_stats()
            done = time.thread_time()
            scheduler.update_from_output(scheduled, output)
            spent["scheduler"] += time.thread_time() - done
            spent["worker"] += done - started
            first += 1
        least = {part: min(least[part], 1e6 * seconds / (STEPS // 10)) for part, seconds in spent.items()}
    if not output.steering_rows:
        raise RuntimeError("the step has no records")
    return least


def make_requests(extra_args: list[dict[str, bytes]]) -> list[Any]:
    """Return one request for each item of ``extra_args``, with the attributes that the scheduler reads."""
    return [
        SimpleNamespace(
            request_id=f"request-{i}", sampling_params=SimpleNamespace(extra_args=each), num_prompt_tokens=PROMPT,
            max_tokens=256, _block_hasher=None, mm_features=(), num_computed_tokens=0, resumable=False,
        )
        for i, each in enumerate(extra_args)
    ]  # fmt: skip


def make_programs(kind: str, count: int, seed: int) -> list[dict[str, bytes]]:
    """Return the ``extra_args`` of ``count`` requests. Large equal programs share one object, as in an engine."""
    rng = np.random.default_rng(seed)
    if kind.startswith("own vectors"):
        points, layers = (points_on(()), range(LAYERS)) if "96" in kind else (("post_block",), (3,))
        vectors = [
            {point: {layer: rng.standard_normal(HIDDEN, dtype="f4") for layer in layers} for point in points}
            for _ in range(count)
        ]
        return [{PROGRAM_KEY: compile_program(parse_fields({"steering_vectors": each})).to_bytes()} for each in vectors]
    spec: dict[str, Any] = {"hooks": {"post_block": [3]}, "positions": "all"}
    if kind == "16 probes at 4 layers":
        hooks = {"post_block": [LAYERS * k // 4 for k in range(4)]}
        directions = np.random.default_rng(0).standard_normal((16, HIDDEN), dtype="f4")
        spec |= {"hooks": hooks, "reduce": {"directions": directions}}
    data = compile_program([], [each for _, each in parse_capture({"memory": spec})]).to_bytes()
    return [{PROGRAM_KEY: data if len(data) >= MIN_PROGRAM_BYTES else bytes(bytearray(data))} for _ in range(count)]


def measure_wave(kind: str, batch: int) -> dict[str, float]:
    """Return the microseconds per request, in the scheduler and in the worker, for a wave of ``batch`` requests."""
    scheduler, manager = make_scheduler(), make_manager()
    spent: dict[str, list[float]] = {"scheduler": [], "worker": []}
    gc.collect()
    gc.freeze()  # as vLLM does
    for number in range(WAVES):
        requests = make_requests(make_programs(kind, batch, number))
        slots = np.arange(batch, dtype=np.int32)
        started = time.perf_counter()
        for request in requests:
            scheduler.add_request(request)
        scheduler.schedule()
        for request in requests:
            if not scheduler._handle_blocked_waiting_request(request):
                raise RuntimeError(f"{request.request_id} waits")
        admitted = time.perf_counter()
        for slot, request in enumerate(requests):
            manager.store.add(request.request_id, slot, request.sampling_params, PROMPT)
        for first, count in ((0, PROMPT), (PROMPT, 1)):
            manager.begin_step(
                StepBatch(
                    layout=lambda: None, ids=[request.request_id for request in requests], request_slot=slots,
                    first=np.full(batch, first), count=np.full(batch, count), num_padded=batch * count,
                )
            )  # fmt: skip
            manager.capture._planned = None
        for request in requests:
            manager.store.remove(request.request_id)
        manager.store.flush()
        removed = time.perf_counter()
        for request in requests:
            scheduler._free_request(request)
        freed = time.perf_counter()
        spent["scheduler"].append(admitted - started + freed - removed)
        spent["worker"].append(removed - admitted)
    gc.unfreeze()
    return {part: 1e6 * min(seconds) / batch for part, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = {
        "idle, worker": {"1": measure_worker(0)},
        "idle, scheduler": {str(batch): measure_scheduler(batch) for batch in (1, 256)},
        "settled, scheduler": {str(batch): measure_scheduler(batch, capture=True) for batch in (1, 256)},
        "settled, worker": {str(batch): measure_worker(batch) for batch in (1, 256)},
    }
    readouts = {str(batch): measure_readouts(batch) for batch in (1, 256)}
    gates = {str(batch): measure_readouts(batch, gated=True) for batch in (1, 256)}
    found |= {
        f"{name}, {part}": {batch: each[part] for batch, each in measured.items()}
        for name, measured in (("16 readouts", readouts), ("16 readouts and a gate", gates))
        for part in ("worker", "scheduler")
    }
    waves = {kind: measure_wave(kind, 256) for kind in ("own vectors", "one layer", "16 probes at 4 layers")}
    waves["own vectors at 96 sites"] = measure_wave("own vectors at 96 sites", 16)
    environment = {
        "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(),
        "python": platform.python_version(), **identity()
    }  # fmt: skip
    arguments.out.write_text(
        json.dumps({"environment": environment, "microseconds": found, "wave": waves}, indent=1) + "\n"
    )
    print(json.dumps({**found, "wave": waves}, indent=1))


if __name__ == "__main__":
    main()
