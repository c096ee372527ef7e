# SPDX-License-Identifier: Apache-2.0
"""The scorer on outputs that were read from a log, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("inspect_ai")

from inspect_ai.model import ChatMessageUser, ModelName, ModelOutput
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState

from vllm_steer import SteeringError
from vllm_steer.peers.inspect import probe_scorer
from vllm_steer.peers.inspect.rows import FOLDER_SUFFIX, store

STREAM = torch.arange(12.0).reshape(1, 4, 3)
"""Rows of one layer: two tokens of the prompt, two of the answer."""


def logged(folder: Path) -> TaskState:
    """Return the state of a sample whose output was written to a log in ``folder`` and read from it."""
    tensors = {
        "residual_stream": STREAM,
        "readouts.tone.values": torch.tensor([1.0, 2.0, 3.0, 5.0]),
        "readouts.tone.positions": torch.arange(4),
    }
    stored = store(tensors, {"residual_stream": {"layers": [2]}}, f"{folder}/log{FOLDER_SUFFIX}", str(folder))
    tone = {part: stored[f"readouts.tone.{part}"] for part in ("values", "positions")}
    output = ModelOutput(
        metadata={
            "activations": {"residual_stream": stored["residual_stream"]},
            "readouts": {"tone": tone},
            "prompt_token_ids": [7, 8],
        }
    )
    read = ModelOutput.model_validate_json(output.model_dump_json())
    return TaskState(ModelName("m/m"), 1, 1, "one", [ChatMessageUser(content="one")], output=read)


@pytest.mark.parametrize(
    ("arguments", "value"), [({"readout": "tone"}, 4.0), ({"probe": torch.tensor([1.0, 0.0, 0.0]), "layer": 2}, 7.5)]
)
async def test_a_log_is_scored(tmp_path: Path, arguments: Any, value: float) -> None:
    """Catches references in a log taken for tensors, and rows that cannot be found beside the log."""
    state = logged(tmp_path)
    score = await probe_scorer(**arguments, log=str(tmp_path / "log.json"))(state, Target("yes"))
    assert score is not None
    assert score.as_float() == value
    with pytest.raises(SteeringError, match="pass the log"):
        await probe_scorer(**arguments)(state, Target("yes"))
