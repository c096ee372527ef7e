# SPDX-License-Identifier: Apache-2.0
"""Parts and probes with a hidden layer from the bound program to the records of steps, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from tests.engine.steps import make_tables
from vllm_steer import Edit, SamplingParams, SteeringConfig
from vllm_steer.engine.head_readouts import HeadReadouts
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.step_batch import StepBatch
from vllm_steer.frontend.part_markers import PartMarkers, bind_request
from vllm_steer.program.records import PART
from vllm_steer.taps import records as step_records
from vllm_steer.taps.assignment import BatchLayout, assign_arena_offsets, assign_rows
from vllm_steer.taps.ops import DeviceOps
from vllm_steer.taps.reference import apply_tap

HIDDEN, UNITS, START, END, SLOT = 8, 5, 60, 70, 1
TOKENS = [1, START, 5, 8, 9, END, 4, START, END, END, 3, START, START, 2]
PROMPT_LEN = 3


def test_parts_and_probes_step_by_step() -> None:
    """Catches a marker that counts one token late, a column of another token, and a state that a step loses."""
    rng = np.random.default_rng(0)
    config = SteeringConfig(max_rows=16, max_vectors=64, max_instructions=64, capture_rows=64, record_columns=16)
    tables = make_tables(config)
    store = ProgramStore(tables, config, 4, range(4))
    weights = rng.standard_normal((UNITS, HIDDEN)).astype("f4")
    biases, outputs = rng.standard_normal((2, UNITS)).astype("f4")
    probe = {"weights": weights, "biases": biases, "outputs": outputs, "activation": "tanh"}
    when = {"readout": "r", "above": 0.0, "window": "previous", "positions": {"outside": [START, END]}}
    site = {"kind": "add", "point": "post_block", "layers": 2, "vector": np.ones(HIDDEN)}
    params = SamplingParams(
        readouts={"r": {"probe": probe, "point": "post_block", "layer": 1, "positions": "all"}},
        steering=[Edit(**site, tokens={"between": [START, END]}), Edit(**site, tokens="generated", when=when)],
    )
    request = SimpleNamespace(
        sampling_params=params, prompt_token_ids=TOKENS[:PROMPT_LEN], prompt_is_token_ids=None, mm_features=None
    )
    bind_request(request, SimpleNamespace(tokenizer=None), PartMarkers(None, {}, ""))
    store.add("x", SLOT, request.sampling_params, PROMPT_LEN)
    store.flush()
    resolved = store.resolved_of("x")
    assert resolved.records is not None
    layout = resolved.records.layout
    ((head, _),) = resolved.token_programs[0].heads
    heads = HeadReadouts(store, {}, DeviceOps(), enabled=False, speculative=False)
    position, inside, last, seen = 0, False, None, set()
    for count in (2, *[1] * (len(TOKENS) - 2)):
        batch = BatchLayout(
            torch.tensor([SLOT]),
            torch.tensor([0, count], dtype=torch.int32),
            torch.arange(position, position + count),
            torch.tensor(TOKENS[position : position + count], dtype=torch.int32),
        )
        assign_rows(tables, batch, count)
        assign_arena_offsets(tables, count)
        step_records.begin_records(tables, batch, store.num_conditions)
        step = StepBatch(
            layout=lambda batch=batch: batch, ids=["x"], request_slot=np.array([SLOT]), first=np.array([position]),
            count=np.array([count]), num_padded=count,
        )  # fmt: skip
        heads.plan(step, np.array([0]))
        rows = rng.standard_normal((count, HIDDEN)).astype("f4")
        apply_tap(torch.from_numpy(rows), None, tables.head_column(tables.column[head.site_number]), tables)
        heads.run()
        step_records.fold_records(tables, batch, store.num_conditions)
        values = np.tanh(rows @ weights.T + biases) @ outputs
        np.testing.assert_allclose(tables.record[:count, layout.readouts[0]], values, atol=1e-5)
        for offset in range(count):
            token, before = TOKENS[position + offset], inside
            inside = (inside or token == START) and token != END
            covered = before or inside
            if position + offset >= PROMPT_LEN:
                factors = [float(tables.record[offset, column]) for column in layout.gates.values()]
                assert factors == [float(covered), float(last is not None and last > 0)], position + offset
                seen.add(tuple(factors))
                last = last if covered else float(values[offset])
        position += count
    assert len(seen) >= 3


def test_state_of_a_resumed_request() -> None:
    """Catches a part that is forgotten with the records of tokens that came from the prefix cache."""
    edit = Edit(kind="add", point="post_block", layers=2, vector=np.ones(HIDDEN), tokens={"between": [START, END]})
    request = SimpleNamespace(
        sampling_params=SamplingParams(steering=[edit]),
        prompt_token_ids=TOKENS[:PROMPT_LEN],
        prompt_is_token_ids=None,
        mm_features=None,
    )
    bind_request(request, SimpleNamespace(tokenizer=None), PartMarkers(None, {}, ""))
    config = SteeringConfig(record_columns=16)
    tables = make_tables(config)
    store = ProgramStore(tables, config, 4, range(4))
    store.add("x", SLOT, request.sampling_params, PROMPT_LEN)
    found = store.resolved_of("x").records
    assert found is not None
    (condition,) = found.conditions
    assert condition.kind == PART
    inside = True
    for stop in range(PROMPT_LEN + 1, len(TOKENS)):
        inside = (inside or TOKENS[stop - 1] == START) and TOKENS[stop - 1] != END
        generated = np.array(TOKENS[PROMPT_LEN:stop])
        records = np.zeros((1, 16), dtype=np.float32)
        state = step_records.state_after([condition], records, stop - 1, generated, PROMPT_LEN)
        assert state.tolist() == [float(inside)]
