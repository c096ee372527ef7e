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
from vllm_steer.registry.directions import Direction, Directions, save_module

UNIT = np.eye(4, dtype=np.float32)


def run(folder: Path, body: Any, *words: str) -> Result:
    file = folder / "request.json"
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    return CliRunner().invoke(app, ["explain", str(file), *words])


def edit(**changes: Any) -> dict[str, Any]:
    return {"kind": "add", "point": "post_block", "layers": 2, "vector": [3.0, 4.0, 0.0, 0.0], **changes}


def lines_of(found: Result) -> list[str]:
    assert found.exit_code == 0, found.output
    return [" ".join(line.split()) for line in found.output.splitlines()]


@pytest.fixture
def calm(tmp_path: Path) -> str:
    """Return the option with a module whose stream has length 20 at layer 2."""
    Directions({2: Direction("post_block", 2, UNIT[0], 20.0)}, "m", "mean", {}).save(tmp_path / "calm.safetensors")
    return f"--module=calm={tmp_path / 'calm.safetensors'}"


def test_says_where_and_how_much(tmp_path: Path, calm: str) -> None:
    """Catches a length without its strength or sign, a dose of another site, and a part that is left out."""
    body = {
        "model": "m", "prompt": "Hello",
        "steering": [
            edit(strength=-2, tokens="generated"),
            edit(layers=[1, 3], tokens="prompt"),
            edit(point="pre_attn"),
            edit(kind="ablate", live="x", when={"readout": "mood", "above": 1.5, "window": "previous"}),
        ],
        "readouts": {
            "mood": {"probe": [1, 0, 0, 0], "point": "pre_attn", "layer": 1, "positions": "answer"},
            "next": {"lens": {"top_k": 2}, "point": "post_block", "layers": "all"},
        },
        "stop_on": [{"readout": "mood", "below": -3, "tokens": 2}],
        "capture": {"memory": {"hooks": {"post_attn": [0]}, "positions": "last_prompt"}},
        "steering_modules": [["formal", 0.5]],
    }  # fmt: skip
    lines = lines_of(run(tmp_path, body, calm))
    assert "steering[0] add post_block of layer 2 generated -2 -10 -0.5" in lines
    assert "steering[1] add post_block of layer 1, 3 prompt 1 5" in lines
    assert "steering[2] add pre_attn of layer 2 all 1 5" in lines
    gate = "mood above 1.5 (previous), times the live strength x"
    assert f"steering[3] ablate post_block of layer 2 generated 1 {gate}" in lines
    assert "module formal, scale 0.5: its edits apply before the request's own" in lines
    assert "readout mood: probe at pre_attn of layer 1, tokens answer" in lines
    assert "readout next: lens at post_block of all layers, tokens generated" in lines
    assert "stop: mood below -3, tokens in a row: 2" in lines
    assert "capture memory: post_attn of layer 0, tokens last_prompt" in lines
    assert "What the request needs and shares depends on the module formal: add --module formal=FILE." in lines


def test_explains_an_expression(tmp_path: Path, calm: str) -> None:
    """Catches an expression that is refused although a server takes it, and a dose that is not the one that it has."""
    lines = lines_of(run(tmp_path, {"steering": "- 0.7 calm@first:20"}, calm))
    assert "steering[0] add post_block of layer 2 {'generated': [[0, 20]]} -14 -14 -0.7" in lines
    assert "max_rows 1 1024" in lines
    needs = lines_of(run(tmp_path, {"steering": "0.5 calm - 0.7 calm@first:20"}, calm))
    assert "max_rows 2 1024" in needs and "max_instructions 3 65536" in needs


def test_explains_edits_with_the_vector_of_a_module(tmp_path: Path, calm: str) -> None:
    """Catches an edit that is refused although a server takes it, and a length or a dose of another vector."""
    named = edit(vector={"module": "calm"})
    lines = lines_of(run(tmp_path, {"steering": [{**named, "dose": -0.7}, {**named, "strength": 5}]}, calm))
    assert "steering[0] add post_block of layer 2 all -14 -14 -0.7" in lines
    assert "steering[1] add post_block of layer 2 all 5 5 0.25" in lines


def test_says_which_blocks_are_shared(tmp_path: Path) -> None:
    """Catches blocks behind edited tokens that are called unedited, and live strengths whose blocks are shared.

    Also catches a digest of the request instead of the edits, and one that ignores the strength.
    """

    def shared(*edits: dict[str, Any], **fields: Any) -> str:
        found = run(tmp_path, {"steering": [*edits], **fields} if edits else fields, "--prompt-tokens", "9")
        (line,) = (line for line in lines_of(found) if line.startswith("prefix cache"))
        return line.removeprefix("prefix cache: ")

    plain = "all blocks are shared with requests without steering"
    assert shared(capture={"memory": {"hooks": {"post_attn": [0]}}}) == plain
    assert shared(edit(layers=31)) == plain  # of the last layer's output
    assert shared(edit(tokens="prompt")).startswith("all blocks are shared with requests with equal edits (")
    later = shared(edit(tokens="generated"))
    assert later.startswith("blocks before position 9 are shared with requests without steering, those from it on with")
    assert shared(edit(live="x")) == "all blocks are shared with no other request, because of live strengths"
    modules = lines_of(run(tmp_path, {"steering": [edit()], "steering_modules": ["formal"]}))
    assert modules[-1].startswith("What the request needs and shares depends on the module formal")
    assert shared(edit()) == shared(edit(layers=[2])) != shared(edit(strength=2))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"steering": [edit(kind="clamp")]}, "steering[0].low: clamp needs low, high or both"),
        ({"steerin": [edit()]}, "did you mean steering"),
        ({"prompt": "Hello"}, "runs as without steering"),
        ("[]", "must be a JSON object"),
        ({"steering": [edit(vector={"module": "calm"})]}, "steering[0].vector.module: unknown module 'calm'; give"),
        ({"steering": [edit(vector={"module": ["calm"]})]}, "steering[0].vector.module: must be a name"),
        ('{"steering": ', "request.json"),
        ({"steering": "0.7 calm"}, "steering: unknown module 'calm'; give its file with --module NAME=FILE"),
        ({"steering": [edit(layers=32)]}, "steering[0].layers: 32 is not a layer of a model with 32 layers"),
        (
            {"readouts": {"a": {"probe": [1, 0, 0, 0], "point": "pre_attn", "layer": 40}}},
            "readouts.a.layers: 40 is not",
        ),
        ({"capture": {"memory": {"hooks": {"post_attn": [3, 99]}}}}, "capture.memory.hooks.layers: 99 is not"),
        ({"extra_body": {"steering": [edit()]}}, "its extra_body has some: write them beside model"),
        ({"steering": "0.7 calm calm"}, "cannot be read from ' calm' on"),
    ],
)
def test_refuses_what_a_server_refuses(tmp_path: Path, body: Any, problem: str) -> None:
    """Catches a traceback, and a request that is explained although it would be refused."""
    found = run(tmp_path, body)
    assert found.exit_code == 1 and problem in found.output


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Catches an error number of the system in place of a sentence, and a dash in place of the name of stdin."""
    for name, problem in (("none.json", "No such file or directory"), ("", "Is a directory")):
        found = CliRunner().invoke(app, ["explain", str(tmp_path / name)])
        assert found.exit_code == 1 and f"cannot be read: {problem}; give a JSON file, or -" in found.output
    found = CliRunner().invoke(app, ["explain", "-"], input="{}")
    assert found.exit_code == 1 and "error: stdin: has none of steering_vectors, " in found.output


def test_modules_of_files_are_explained_as_a_server_applies_them(tmp_path: Path, calm: str) -> None:
    """Catches a module of a file whose edits are left out, another scale or dose, and a probe without its site."""
    found = run(tmp_path, {"steering_modules": [["calm", -3], {"module": "calm", "dose": 0.25}]}, calm)
    lines = lines_of(found)
    assert "steering_modules[0] calm add post_block of layer 2 all -3 -3 -0.15" in lines
    assert "steering_modules[1] calm add post_block of layer 2 all 5 5 0.25" in lines
    assert "max_vectors 1 2048" in lines and lines[-1].startswith(
        "prefix cache: all blocks are shared with requests with"
    )
    named = lines_of(run(tmp_path, {"steering": [edit(vector={"module": "calm"}, dose=0.5)]}, calm))
    sent = lines_of(run(tmp_path, {"steering": [edit(vector=[1.0, 0, 0, 0], strength=10)]}, calm))
    assert "steering[0] add post_block of layer 2 all 10 10 0.5" in named and named[-2:] == sent[-2:]
    probe = {"weights": UNIT[0], "bias": 1.0, "point": "pre_attn", "layer": 1}
    save_module(tmp_path / "risk.safetensors", {"probes": {"lie": probe}}, "", {})
    body = {"readouts": {"lie": {"probe": "risk/lie"}}, "stop_on": [{"readout": "lie", "above": 2}]}
    lines = lines_of(run(tmp_path, body, f"--module=risk={tmp_path / 'risk.safetensors'}"))
    assert "readout lie: probe at pre_attn of layer 1, tokens generated" in lines
    assert "max_rows 1 1024" in lines
    lines = lines_of(run(tmp_path, body))
    assert "readout lie: probe at the site that is registered with it, tokens generated" in lines
    assert "What the request needs and shares depends on the module risk: add --module risk=FILE." in lines
