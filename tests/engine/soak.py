# SPDX-License-Identifier: Apache-2.0
"""Random requests through a small engine that must preempt; every row and token against a run alone.

    python -m tests.engine.soak --requests 2000 --seed 1

Steered, read and plain requests arrive a few at a time; prompts share prefixes, so that the cache is hit; some requests
are aborted on the way. The truth is the same request alone in an eager engine without caches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.answers import params, prompt, tokens_of
from tests.engine.captures import capture
from tests.engine.conftest import close
from tests.engine.test_mixing import program
from tests.tiny import VOCAB, make_llm, save_tiny_llama

POSITIONS: tuple[Any, ...] = ("all", "last_prompt", "all_prompt", "all_generated", [0, [3, 9], -2, [-1, None]])
TOLERANCE = 2e-3


@dataclass
class Outcome:
    """What a soak saw: counts, and a sentence for everything that was wrong."""

    compared: int = 0
    rows: int = 0
    preempted: int = 0
    aborted: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def workload(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Prompts of 4 to 90 tokens, half of them on one of eight stems; most are read, many steered, some plain."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, VOCAB, 64).tolist() for _ in range(8)]
    prompts, wanted = [], []
    for _ in range(count):
        stem = stems[rng.integers(8)] if rng.random() < 0.5 else []
        prompts.append(prompt(*stem, *rng.integers(1, VOCAB, int(rng.integers(4, 27))).tolist()))
        fields: dict[str, Any] = {}
        if rng.random() < 0.6:
            spec: dict[str, Any] = {"positions": POSITIONS[rng.integers(5)], "before": bool(rng.random() < 0.2)}
            if rng.random() < 0.5:
                spec["hooks"] = {"post_block": [int(rng.integers(4))], "post_attn": [int(rng.integers(4))]}
            fields["capture"] = capture(**spec)
        if rng.random() < 0.4:
            fields["steering"] = program(int(rng.integers(24)))
        wanted.append(params(int(rng.integers(2, 20)), logprobs=None, **fields))
    return prompts, wanted


def results(outputs: list[Any]) -> list[tuple[list[int], dict[Any, tuple[list[int], torch.Tensor]], str]]:
    """Tokens, rows by site, and capture status of each output."""
    found = []
    for output in outputs:
        captured = output.outputs[0].capture_results
        rows: dict[Any, tuple[list[int], torch.Tensor]] = {}
        status = "none"
        if captured is not None:
            result = captured["memory"]
            status = result.status
            rows = {s: (result.positions(*s).tolist(), result.tensor(*s)) for s in result.sites}
        found.append((tokens_of(output), rows, status))
    return found


def soak(folder: Path, count: int, seed: int) -> Outcome:
    """Run it; nothing is raised for wrong rows, they are in the outcome."""
    prompts, wanted = workload(count, seed)
    alone = make_llm(folder, enable_prefix_caching=False, max_num_seqs=1, max_model_len=128)
    truth = results(alone.generate(prompts, wanted, use_tqdm=False))
    close(alone)

    outcome = Outcome()
    llm = make_llm(
        folder, num_gpu_blocks_override=20, block_size=32, max_num_seqs=24, max_num_batched_tokens=96,
        max_model_len=128, steering_config={"max_rows": 24, "capture_rows": 300},
    )  # fmt: skip
    try:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        original = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            outcome.preempted += 1
            return original(*args, **kwargs)

        scheduler._preempt_request = counted
        rng = np.random.default_rng(seed + 1)
        doomed = set(rng.choice(count, count // 20, replace=False).tolist())
        waiting = list(range(count))
        finished: dict[int, Any] = {}
        while waiting or engine.has_unfinished_requests():
            while waiting and len(engine.output_processor.request_states) < 40 and rng.random() < 0.8:
                i = waiting.pop(0)
                engine.add_request(str(i), prompts[i], wanted[i])
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output
                elif int(output.request_id) in doomed:
                    engine.abort_request([output.request_id])
            for i in list(doomed):
                running = {s.external_req_id for s in engine.output_processor.request_states.values()}
                if rng.random() < 0.05 and str(i) in running:
                    engine.abort_request([str(i)])
                    outcome.aborted += 1
                    doomed.discard(i)
        order = sorted(i for i in finished if finished[i].outputs[0].finish_reason != "abort")
        for i, (tokens, rows, status) in zip(order, results([finished[i] for i in order]), strict=True):
            compare(i, (tokens, rows, status), truth[i], outcome)
            outcome.cached_tokens += finished[i].num_cached_tokens or 0
        if scheduler.steering_ledger.in_use != (0, 0, 0) or scheduler.steering_outbox.num_bytes:
            outcome.wrong.append("the books are not empty at the end")
    finally:
        close(llm)
    return outcome


def compare(i: int, got: Any, right: Any, outcome: Outcome) -> None:
    outcome.compared += 1
    if got[0] != right[0]:
        outcome.wrong.append(f"request {i}: tokens differ")
        return
    if got[2] != right[2] or list(got[1]) != list(right[1]):
        outcome.wrong.append(f"request {i}: status {got[2]} for {right[2]}")
        return
    for site, (positions, rows) in got[1].items():
        outcome.rows += len(positions)
        right_positions, right_rows = right[1][site]
        scale = right_rows.norm(dim=1).clamp(min=1.0)
        if positions != right_positions:
            outcome.wrong.append(f"request {i}, {site}: other positions")
        elif len(rows) and float(((rows - right_rows).norm(dim=1) / scale).max()) > TOLERANCE:
            outcome.wrong.append(f"request {i}, {site}: other rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    import tests.conftest  # noqa: F401 - settings that must stand before vLLM starts

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(save_tiny_llama(Path(folder, "model")), arguments.requests, arguments.seed)
    print(f"{outcome}\n{time.monotonic() - started:.0f} s")
    if outcome.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
