# SPDX-License-Identifier: Apache-2.0
"""Steering's overrides of runner V2, which runs on GPUs only, with arrays as that runner has them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_steer.engine.runner_v2 import SteeringRunnerV2, _step_batch
from vllm_steer.taps.records import accepted_tokens


def test_step_batch_is_trimmed_and_int64() -> None:
    """Catches int32 counts, which the front end would decode as int64, and arrays longer than the batch."""
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=5,
        num_tokens_after_padding=8,
        req_ids=["a", "b"],
        idx_mapping=torch.tensor([3, 1, 0], dtype=torch.int32),
        idx_mapping_np=np.array([3, 1, 0], dtype=np.int32),
        query_start_loc=torch.tensor([0, 4, 5, 5], dtype=torch.int32),
        positions=torch.arange(8),
        input_ids=torch.arange(8, dtype=torch.int32),
        num_computed_tokens_np=np.array([7, 9, 0], dtype=np.int32),
        num_scheduled_tokens=np.array([4, 1], dtype=np.int32),
    )
    step = _step_batch(batch)
    assert (step.first.dtype, step.count.dtype) == (np.int64, np.int64)
    assert (step.first.tolist(), step.count.tolist(), step.request_slot.tolist()) == ([7, 9], [4, 1], [3, 1])
    layout = step.layout()
    assert (layout.start.tolist(), len(layout.position), step.num_padded) == ([0, 4, 5], 5, 8)


class Runner:
    """Stand-in for vLLM's runner that records its profiling run and dummy runs."""

    max_num_tokens = 512

    def __init__(self, compiled: list[Any]) -> None:
        self.ran: list[Any] = []
        sets = SimpleNamespace(
            compile_untapped=lambda *given: compiled.extend(given),
            restore_model=lambda: self.ran.append("rest"),
            memory_of_all_sets=lambda one_set: one_set + 150,
        )
        heads = SimpleNamespace(warm_up=lambda: self.ran.append("heads"))
        self.steering = SimpleNamespace(graph_sets=sets, heads=heads)

    def profile_run(self, randomize_inputs: bool = False) -> None:
        self.ran.append(("profile", randomize_inputs))

    def profile_cudagraph_memory(self) -> int:
        self.ran.append("graphs")
        return 100

    def _dummy_run(self, tokens: int, **how: bool) -> tuple[str, str]:
        self.ran.append((tokens, how))
        return "hidden states", "of samples"


def test_untapped_model_is_compiled_after_the_profiling_run() -> None:
    """Catches an untapped model compiled before vLLM measures memory, or with a small batch."""
    compiled: list[Any] = []
    runner: Any = type("Steered", (SteeringRunnerV2, Runner), {})(compiled)
    runner.profile_run(randomize_inputs=True)
    assert runner.ran == [("profile", True), "heads"]
    run, most_tokens = compiled
    assert (run(7), most_tokens) == ("hidden states", 512)
    assert runner.ran[2:] == [(7, {"skip_attn": True, "is_profile": True})]


def test_graph_memory_covers_all_sets() -> None:
    """Catches the memory of a single set, and a model without its taps after profiling."""
    runner: Any = type("Steered", (SteeringRunnerV2, Runner), {})([])
    assert runner.profile_cudagraph_memory() == 250
    assert runner.ran == ["graphs", "rest"]


class Sampler:
    """Stand-in for vLLM's runner that has accepted some drafts."""

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        # Requests with 3, 3 and 0 drafts, and a prompt that is not complete.
        return "tokens", torch.tensor([4, 2, 1, 0]), torch.tensor([0, 2, 0, 0])


def test_strengths_are_forgotten_before_requests_are_added() -> None:
    """Catches a new request that starts with the strengths of an ended one with its id."""
    order: list[Any] = []

    class Base:
        steering = SimpleNamespace(
            store=SimpleNamespace(forget_strengths=lambda ended: order.append(("forget", ended))),
            receive_replays=lambda scheduled: order.append("replays"),
        )

        def add_requests(self, scheduled: Any) -> None:
            order.append("add")

    runner: Any = type("Steered", (SteeringRunnerV2, Base), {})()
    runner.add_requests(SimpleNamespace(finished_req_ids={"a"}))
    assert order == [("forget", {"a"}), "add", "replays"]


def test_wrong_drafts_count_as_rejected() -> None:
    """Catches a draft that was computed with another token's factor and is accepted."""
    runner: Any = type("Steered", (SteeringRunnerV2, Sampler), {})()
    batch = SimpleNamespace(num_reqs=4, cu_num_logits=torch.tensor([0, 4, 8, 9, 10, 10], dtype=torch.int32))
    wrong = torch.tensor([[False, True, False], [True, False, False], [True, True, True], [False] * 3])
    done: list[str] = []
    more = {"heads": SimpleNamespace(joined=lambda model: nullcontext()), "finish_readouts": lambda: done.append("")}
    runner.model = None
    runner.steering = SimpleNamespace(accepted_tokens=lambda drafts: accepted_tokens(wrong, drafts()), **more)
    _, sampled, rejected = runner.sample(None, batch, None)
    assert (sampled.tolist(), rejected.tolist()) == ([2, 2, 1, 0], [2, 2, 0, 0])
    runner.steering = SimpleNamespace(accepted_tokens=lambda drafts: None, **more)
    assert runner.sample(None, batch, None)[1].tolist() == [4, 2, 1, 0]
    assert len(done) == 2
