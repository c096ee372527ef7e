# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from vllm_steer.cli.main import app
from vllm_steer.registry.directions import Direction, Directions

UNIT = np.eye(4, dtype=np.float32)


def run(folder: Path, body: Any, *words: str) -> Result:
    file = folder / "request.json"
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    return CliRunner().invoke(app, ["explain", str(file), *words])


def edit(**changes: Any) -> dict[str, Any]:
    return {"kind": "add", "point": "post_block", "layers": 2, "vector": [3.0, 4.0, 0.0, 0.0], **changes}


def test_says_where_how_much_and_what_is_shared(tmp_path: Path) -> None:
    """Catches a length without its strength, a dose of another site, and blocks that are said to be shared wrongly."""
    Directions({2: Direction("post_block", 2, UNIT[0], 20.0)}, "m", "mean", {}).save(tmp_path / "calm.safetensors")
    body = {
        "model": "m", "prompt": "Hello",
        "steering": [
            edit(strength=-2, tokens="generated"),
            edit(layers=[1, 2], kind="ablate", when={"readout": "mood", "above": 1.5, "window": "previous"}),
        ],
        "readouts": {"mood": {"probe": [1, 0, 0, 0], "point": "pre_attn", "layer": 1}},
        "stop_on": [{"readout": "mood", "below": -3}],
        "capture": {"memory": {"hooks": {"post_attn": [0]}, "positions": "last_prompt"}},
        "steering_modules": [["formal", 0.5]],
    }  # fmt: skip
    found = run(tmp_path, body, "--layers", "4", "--prompt-tokens", "9", "--stream", str(tmp_path / "calm.safetensors"))
    assert found.exit_code == 0, found.output
    lines = [" ".join(line.split()) for line in found.output.splitlines()]
    assert "steering[0] add post_block of layer 2 generated length 10, dose 0.5" in lines
    assert "steering[1] ablate post_block of layer 1, 2 generated strength 1 mood, previous" in lines
    assert "module formal, times 0.5: its edits apply before those of the request" in lines
    assert "readout mood: probe at pre_attn of layer 1, tokens generated" in lines
    assert "stop: mood below -3 at 1 tokens in a row" in lines
    assert "capture: post_attn of layer 0, tokens last_prompt" in lines
    assert any(line.startswith("capture_rows 1 ") for line in lines)
    assert "0 as without steering" in lines
    assert any(line.startswith("9 (generated) shared with equal edits (") for line in lines)


def test_equal_edits_have_equal_digests(tmp_path: Path) -> None:
    """Catches a digest of the request instead of the edits, and one that ignores the strength."""

    def shared(**changes: Any) -> str:
        (line,) = (
            line for line in run(tmp_path, {"steering": [edit(**changes)]}).output.splitlines() if "equal" in line
        )
        return line

    assert shared() == shared(layers=[2]) != shared(strength=2)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"steering": [edit(kind="clamp")]}, "steering[0].low: clamp needs low, high or both"),
        ({"steerin": [edit()]}, "did you mean steering"),
        ({"prompt": "Hello"}, "runs as without steering"),
        ("[]", "must be a JSON object"),
        ('{"steering": ', "request.json"),
        ({"steering": "0.7 calm"}, "pass Expression.parse(text).edits(vectors)"),
    ],
)
def test_refuses_what_a_server_refuses(tmp_path: Path, body: Any, problem: str) -> None:
    """Catches a traceback, and a request that is explained although it would be refused."""
    found = run(tmp_path, body)
    assert found.exit_code == 1 and problem in found.output
