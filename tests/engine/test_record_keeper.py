# SPDX-License-Identifier: Apache-2.0
"""Records of rejected drafts and of the tokens that replace them, when the width of a step's records changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_steer.capture.row_assembler import RowAssembler
from vllm_steer.capture.row_payload import RECORDS
from vllm_steer.capture.row_receiver import RowReceiver
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.record_keeper import REPLAYS_ATTRIBUTE, RecordKeeper
from vllm_steer.program.records import STOP_COLUMN

DRAFTS = 3
# First position and width of each step. Two drafts of the first step and none of the second one are accepted; the
# records of the second step are as wide as those of another request that takes part in it.
STEPS = [(10, 4), (13, 8), (14, 4)]
LAST = {10: 0, 11: 0, 12: 0, 13: 1, 14: 2, 15: 2, 16: 2, 17: 2}
"""The last step that computed each position."""


def step(number: int, names: tuple[str, ...] = ("a",)) -> StepRows:
    """Return the records of a step: its number and the position in the last two of four columns, then zeros."""
    first, width = STEPS[number]
    records = np.zeros((len(names) * (DRAFTS + 1), width), np.float32)
    records[:, 2] = number
    records[:, 3] = np.tile(np.arange(first, first + DRAFTS + 1), len(names))
    index = RowIndex(names, ((width,),) * len(names), RECORDS)
    size = np.ones(len(names), dtype=np.int64)
    return StepRows(index, first * size, (DRAFTS + 1) * size, records.view(np.uint8))


def check(positions: Any, records: Any) -> None:
    assert positions.tolist() == list(LAST)
    assert records[:, 2].tolist() == list(LAST.values())
    assert records[:, 3].tolist() == list(LAST)


def test_last_record_of_a_position_counts() -> None:
    """Catches the record of a rejected draft that wins over a later one, which was appended to an earlier run."""
    receiver, assembler = RowReceiver(), RowAssembler(0, 0, torch.float32)
    receiver.add_request("a", assembler)
    for number in range(len(STEPS)):
        receiver.add_step(step(number))
    receiver.flush("a")
    check(*assembler.records(18))


def test_replay_has_no_rejected_drafts() -> None:
    """Catches a preempted request that is resumed with the records of rejected drafts."""
    keeper = RecordKeeper()
    keeper.add_request("a")
    for number in range(len(STEPS)):
        output: Any = SimpleNamespace()
        setattr(output, ROWS_ATTRIBUTE, (step(number),))
        assert keeper.receive(output) == {}
    request = SimpleNamespace(num_tokens=19, num_prompt_tokens=11, output_token_ids=list(range(8)))
    scheduled = SimpleNamespace(preempted_req_ids={"a"}, num_scheduled_tokens={"a": 19})
    keeper.attach_replays(scheduled, {"a": request})
    replay = getattr(scheduled, REPLAYS_ATTRIBUTE)["a"]
    check(np.arange(replay.start, replay.stop), replay.records)
    assert replay.generated.tolist() == list(range(7))


def test_a_stop_ahead_of_min_tokens_hides_no_later_one() -> None:
    """Catches a stop that is lost because an earlier one of the same step, which has drafts, is ignored."""
    keeper = RecordKeeper()
    keeper.add_request("a", first_stop=12)
    keeper.add_request("b")
    given = step(0, ("a", "b"))
    given.rows.view(np.float32)[:, STOP_COLUMN] = 1.0
    output: Any = SimpleNamespace()
    setattr(output, ROWS_ATTRIBUTE, (given,))
    fired = keeper.receive(output)
    assert {name: (stop.position, stop.offset) for name, stop in fired.items()} == {"a": (12, 2), "b": (10, 0)}
    keeper.remove_request("a")
    keeper.add_request("a")
    assert keeper.receive(output)["a"].position == 10
