# SPDX-License-Identifier: Apache-2.0
"""Steps of captured rows on their way from the scheduler to the front ends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_steer.capture.row_payload import ROWS_REQUEST_ID, decode_step, encode_missing_reason
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.row_sender import RowSender


def step(*names: str) -> StepRows:
    """Return a step in which each request stores two rows of one position, filled with its name."""
    rows = np.repeat(np.array([ord(name) for name in names], dtype=np.uint8), 2)
    one = np.ones(len(names), dtype=np.int64)
    return StepRows(RowIndex(names, ((4, 10),) * len(names)), 3 * one, one, np.repeat(rows[:, None], 300, axis=1))


def sent(live: dict[str, int], *steps: StepRows) -> dict[int, list[EngineCoreOutput]]:
    """Return the outputs of one update by client; client 0 has an output of its own.

    ``live`` maps request ids to clients.
    """
    sender = RowSender()
    requests = {name: SimpleNamespace(request_id=name, client_index=client) for name, client in live.items()}
    sender.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: steps}), requests)
    outputs = {0: EngineCoreOutputs(outputs=[EngineCoreOutput("own", [1])])}
    sender.attach_to(outputs)
    assert sender.num_bytes == 0
    return {client: each.outputs for client, each in outputs.items()}


def names_of(output: EngineCoreOutput) -> tuple[str, ...]:
    assert output.request_id == ROWS_REQUEST_ID
    return decode_step(output.kv_transfer_params, output.routed_experts).index.request_ids


def test_sends_whole_steps_ahead_of_the_outputs() -> None:
    """Catches captured rows that arrive after the request's final output, and copied rows with a single client."""
    first, second = step("a", "b"), step("b", "a")
    rows, more, own = sent({"a": 0, "b": 0}, first, second)[0]
    assert own.request_id == "own"
    assert (names_of(rows), names_of(more)) == (("a", "b"), ("b", "a"))
    assert rows.routed_experts is first.rows and more.routed_experts is second.rows


def test_each_client_gets_its_own_rows() -> None:
    """Catches rows sent to another API server, and clients without an output in this update that get none."""
    outputs = sent({"a": 0, "b": 1, "c": 0}, step("a", "b", "c"))
    assert names_of(outputs[0][0]) == ("a", "c") and names_of(outputs[1][0]) == ("b",)
    assert outputs[0][0].routed_experts[:, 0].tolist() == [*map(ord, "aacc")]
    assert outputs[1][0].routed_experts[:, 0].tolist() == [*map(ord, "bb")]


def test_changed_batch_updates_the_clients() -> None:
    """Catches rows sent by the request order of the previous batch."""
    sender = RowSender()
    requests = {name: SimpleNamespace(request_id=name, client_index=client) for client, name in enumerate("ab")}
    for names in (("a", "b"), ("a", "b"), ("b", "a"), ("b",)):
        sender.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: (step(*names),)}), requests)
        outputs: dict[int, EngineCoreOutputs] = {}
        sender.attach_to(outputs)
        assert {client: names_of(each.outputs[0]) for client, each in outputs.items()} == {
            requests[name].client_index: (name,) for name in names
        }


def test_select_keeps_positions() -> None:
    """Catches positions and counts of entries that were not selected."""
    entries = RowIndex(("a", "b", "c"), ((4,), (4, 10), (4,)))
    rows = np.arange(8, dtype=np.uint8)[:, None]
    whole = StepRows(entries, np.array([5, 0, 9]), np.array([1, 2, 3]), rows)
    chosen = whole.select([1, 2])
    assert chosen.index == RowIndex(("b", "c"), ((4, 10), (4,)))
    assert (chosen.start.tolist(), chosen.count.tolist()) == ([0, 9], [2, 3])
    assert chosen.rows[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_rows_of_finished_requests_are_dropped() -> None:
    """Catches rows of the surplus step of async scheduling."""
    assert [each.request_id for each in sent({}, step("a"))[0]] == ["own"]


def test_rows_are_a_separate_frame() -> None:
    """Catches rows copied into the message, and rows that vLLM's decoder does not restore."""
    (rows, _) = sent({"a": 0}, step("a"))[0]
    head, *frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[rows]))
    assert len(head) < 300 and [bytes(frame) for frame in frames] == [rows.routed_experts.tobytes()]
    (back,) = MsgpackDecoder(EngineCoreOutputs).decode([head, *frames]).outputs
    assert np.array_equal(back.routed_experts, rows.routed_experts)
    assert names_of(back) == ("a",)


def test_missing_reason_goes_to_the_client() -> None:
    """Catches a reason sent to another front end, or dropped without an output."""
    sender = RowSender()
    sender.report_missing(SimpleNamespace(request_id="a", client_index=2), "no room")
    outputs: dict[int, EngineCoreOutputs] = {}
    sender.attach_to(outputs)
    assert outputs[2].outputs[0].kv_transfer_params == encode_missing_reason("a", "no room")
