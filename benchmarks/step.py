# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time of the engine core's thread per step and per new request beside stock vLLM without this package.

    python -m benchmarks.step --out benchmarks/results/step.json

Stock vLLM without plugins and each way of `WAYS` have an engine in a process of its own, so that none pays for the
memory of another. They take turns in several rounds, in another order each round. Only ratios within a round are
meaningful; results are medians over the rounds.

* *Running*: 256 requests start together and decode for 64 steps.
* *Spread*: 512 requests with prompts of 16 to 47 tokens and answers of 16 to 79 tokens, at most 256 at one time, so a
  step has 3.5 new requests on average. The ratio of the means over all steps is what the aims are about.
* *Arrivals*: 256 requests of one token each, of which the time per request beyond stock vLLM's is shown.

The time is that of vLLM's scheduler and runner with everything that this package adds to them, from the arrival of a
request in the engine core to the outputs of a step. Work that a GPU would do is left out or measured apart. The model
returns prepared hidden states and logits, so that its arithmetic does not share caches with the code that is measured.
This package's functions beside the model are measured apart ("operations"): row assignment, products and records. On a
CPU these run as torch operations on the same thread; on a GPU the host launches one kernel for each. The time to launch
kernels is missing here, and so is the time of copies from and to a device. The
CPU's engine uses vLLM's model runner V1, whose batches change their order when requests end; GPUs use V2 where vLLM
chooses it. Python's garbage collections are off unless `--collect` is given, because in one process they visit
the front end's objects too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.build import identity

STOCK, IDLE = "stock vLLM", "idle"
WAYS = (IDLE, "one shared vector", "own vectors", "16 probes", "16 readouts", "one layer captured")
"""Ways of the engine with steering. In all but `IDLE`, every request steers or captures at one site."""
TARGETS: Mapping[str, float | None] = {
    IDLE: 1.01, "one shared vector": 1.03, "own vectors": 1.03, "16 probes": 1.05, "16 readouts": None,
    "one layer captured": None,
}  # fmt: skip
"""Ratios to aim for, with lengths that are spread."""
RUNNING, SPREAD, ARRIVALS = LOADS = ("running", "spread", "arrivals")
REQUESTS, TOKENS, HIDDEN, LAYER = 256, 8192, 512, 2


def fields(way: str, number: int) -> dict[str, Any]:
    """Return the fields of a request; ``number`` makes it differ from others where its way is to."""
    random = np.random.default_rng(0)
    vector, directions = 1e-9 * random.standard_normal(HIDDEN), random.standard_normal((16, HIDDEN)).astype("f4")
    capture = {"hooks": {"post_block": [LAYER]}, "positions": "all_generated"}
    if way == "own vectors":
        vector = 1e-9 * np.random.default_rng(number + 1).standard_normal(HIDDEN)
    if way in ("one shared vector", "own vectors"):
        return {"steering_vectors": {"post_block": {LAYER: vector.astype("f4")}}}
    if way == "16 probes":
        return {"capture": {"memory": capture | {"reduce": {"directions": directions}}}}
    if way == "16 readouts":
        probe = {"point": "post_block", "layer": LAYER}
        return {"readouts": {f"r{k}": {**probe, "probe": each} for k, each in enumerate(directions)}}
    return {"capture": {"memory": capture}} if way == "one layer captured" else {}


def lengths(load: str, seed: int) -> list[tuple[int, int]]:
    """Return the number of prompt tokens and of generated tokens of each request of a load."""
    random = np.random.default_rng(seed)
    if load == SPREAD:
        shape = 2 * REQUESTS
        return list(zip(random.integers(16, 48, shape).tolist(), random.integers(16, 80, shape).tolist(), strict=True))
    return [(each, 64 if load == RUNNING else 1) for each in random.integers(8, 24, REQUESTS).tolist()]


class Clock:
    """CPU seconds of this thread within functions, by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return ``function`` with its time added to ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - started
                self.calls[part] += 1

        return call

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replace a function or method of ``owner`` by its timed one."""
        setattr(owner, name, self.timed(getattr(owner, name), part))

    def take(self, requests: int) -> dict[str, float]:
        """Return the figures of a load and start again."""
        spent, steps = self.seconds, self.calls["step"]
        found: dict[str, float] = {
            "host": spent["step"] + spent["arrival"] - spent["operations"], "operations": spent["operations"],
            "steps": steps, "requests": requests,
        }  # fmt: skip
        self.seconds.clear()
        self.calls.clear()
        return found


def make_engine(clock: Clock, model: str, steering: bool) -> Any:
    """Return an engine in this process whose parts are timed and whose model is not computed."""
    import vllm
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    import vllm_steer

    if steering:
        import vllm_steer.engine.model_setup
        from vllm_steer.engine.runner_v1 import SteeringRunnerV1

        # Only on a CPU, blocks of edited requests are zeroed before they are used again.
        clock.wrap(SteeringRunnerV1, "_zero_block_ids", "operations")
        setup: Any = vllm_steer.engine.model_setup
        choose = setup.device_ops

        def timed_ops(*args: Any) -> Any:
            ops = choose(*args)
            names = [each.name for each in dataclasses.fields(ops)]
            return dataclasses.replace(
                ops, **{name: clock.timed(getattr(ops, name), "operations") for name in names}
            )  # fmt: skip

        setup.device_ops = timed_ops
    made: Any = (vllm_steer if steering else vllm).LLM(
        model=model, enforce_eager=True, dtype="float32", max_model_len=512, skip_tokenizer_init=True, seed=0,
        disable_log_stats=False, max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS, num_gpu_blocks_override=1280,
        **({"enable_steering": True} if steering else {}),
    )  # fmt: skip
    # Only now, because this package checks its taps on start.
    states, logits = torch.zeros(TOKENS, HIDDEN), torch.zeros(REQUESTS, 128)
    runner: Any = GPUModelRunner
    runner._model_forward = lambda _, input_ids, **__: states[: len(input_ids)]
    model_class: Any = LlamaForCausalLM
    model_class.compute_logits = lambda _, hidden: logits[: len(hidden)].clone()
    core = made.llm_engine.engine_core.engine_core
    clock.wrap(core, "step_fn", "step")
    clock.wrap(core, "preprocess_add_request", "arrival")
    clock.wrap(core, "add_request", "arrival")
    return made.llm_engine


def serve(pipe: Any, model: str, way: str, collects: bool) -> None:
    """Run an engine: receive loads, and send the figures of each."""
    steering = way != STOCK
    # Before vLLM is imported.
    os.environ["VLLM_PLUGINS"] = "steering" if steering else "none"
    clock = Clock()
    engine = make_engine(clock, model, steering)
    import vllm

    import vllm_steer

    make_params: Any = (vllm_steer if steering else vllm).SamplingParams
    number, random = 0, np.random.default_rng(0)
    if not collects:
        gc.disable()
    pipe.send(None)
    while (given := pipe.recv()) is not None:
        load, seed = given
        requests = lengths(load, seed)
        gc.collect()
        gc.freeze()  # as vLLM does in an engine of its own process, so that no way pays for objects of another one
        clock.take(0)
        for prompt, generated in requests:
            number += 1
            params = make_params(
                max_tokens=generated, ignore_eos=True, temperature=0, detokenize=False, **fields(way, number)
            )
            engine.add_request(str(number), {"prompt_token_ids": random.integers(1, 127, prompt).tolist()}, params)
        while engine.has_unfinished_requests():
            engine.step()
        pipe.send(clock.take(len(requests)))


def per_step(found: Mapping[str, float], *parts: str) -> float:
    """Return the microseconds of some parts per step."""
    return 1e6 * sum(found[part] for part in parts) / found["steps"]


def summary(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians over rounds, by load and way."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load in (RUNNING, SPREAD):
        for way in rounds[0][load]:
            pairs = [(each[load][way], each[load][STOCK]) for each in rounds]
            ratios = [per_step(own, "host") / per_step(stock, "host") for own, stock in pairs]
            with_operations = [
                per_step(own, "host", "operations") / per_step(stock, "host") for own, stock in pairs
            ]  # fmt: skip
            found.setdefault(load, {})[way] = {
                "ratio": round(statistics.median(ratios), 3),
                "least ratio": round(min(ratios), 3),
                "most ratio": round(max(ratios), 3),
                "ratio with operations": round(statistics.median(with_operations), 3),
                **{
                    f"{part}, us per step": round(statistics.median(per_step(own, part) for own, _ in pairs), 1)
                    for part in ("host", "operations")
                },
            }
    found[ARRIVALS] = {
        way: {
            "us per request beyond stock": round(
                statistics.median(
                    1e6 * (each[ARRIVALS][way]["host"] - each[ARRIVALS][STOCK]["host"]) / REQUESTS for each in rounds
                ),
                1,
            )
        }
        for way in rounds[0][ARRIVALS]
        if way != STOCK
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--collect", action="store_true", help="with Python's garbage collections")
    parser.add_argument("--beside", default="nothing", help="other load on the machine, for the record")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from vllm_steer.testing.fuzz.model import prepare_environment, save_tiny_llama

    prepare_environment()
    context, random, pipes, rounds = multiprocessing.get_context("spawn"), np.random.default_rng(0), {}, []
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 3, "initializer_range": 0.05}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
        model = str(save_tiny_llama(Path(folder), **sizes, **heads))
        for way in (STOCK, *arguments.ways):
            pipes[way], other = context.Pipe()
            context.Process(target=serve, args=(other, model, way, arguments.collect), daemon=True).start()
            other.close()  # so that the end of the process ends the pipe
            pipes[way].recv()  # has started
        for number in range(arguments.rounds + 1):  # the first one warms up
            taken: dict[str, dict[str, dict[str, float]]] = {load: {} for load in LOADS}
            for load in LOADS:
                for way in random.permutation(list(pipes)).tolist():
                    pipes[way].send((load, number))
                    taken[load][way] = pipes[way].recv()
            if number:
                rounds.append(taken)
        for pipe in pipes.values():
            pipe.send(None)
    found = summary(rounds)
    environment = {
        "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(),
        "python": platform.python_version(), "beside": arguments.beside,
        "collections": arguments.collect, **identity()
    }  # fmt: skip
    note = f"CPU engine, beside: {arguments.beside}"
    arguments.out.write_text(
        json.dumps({"environment": environment, "note": note, **found, "rounds": rounds}, indent=1) + "\n"
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
