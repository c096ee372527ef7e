# SPDX-License-Identifier: Apache-2.0
"""Files of repeng and steering-vectors steer the engine as these libraries steer the same model in HF Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine.answers import tokens_of
from vllm_steer import SamplingParams
from vllm_steer.cli.main import app

DATA = Path(__file__).parents[1] / "vectors" / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "steered.json").read_text())


def tokens(llm: Any, *modules: str) -> list[int]:
    extra = {"steering_modules": list(modules)} if modules else {}
    params = SamplingParams(temperature=0, max_tokens=len(RECORDED["steered"]["plain"]), ignore_eos=True, **extra)
    return list(tokens_of(llm.generate({"prompt_token_ids": RECORDED["prompt"]}, params, use_tqdm=False)[0]))


@pytest.mark.parametrize(
    ("library", "file", "options"),
    [
        ("repeng", "repeng.gguf", None),
        ("repeng", "cvector-generator.gguf", ["--format", "control-vector"]),
        ("steering-vectors", "layers.safetensors", ["--point", "post_block"]),
    ],
)
def test_a_file_steers_as_its_library_does(
    llm: Any, tmp_path: Path, library: str, file: str, options: list[str] | None
) -> None:
    """Catches vectors of another layer or hook point than the library's, whose text differs."""
    path = DATA / file
    if options is not None:
        path = tmp_path / "converted.safetensors"
        done = CliRunner().invoke(app, ["convert", str(DATA / file), str(path), *options])
        assert done.exit_code == 0, done.output
    llm.steering.register_file("foreign", path)
    assert tokens(llm, "foreign") == RECORDED["steered"][library]


def test_another_layer_gives_another_text(llm: Any, tmp_path: Path) -> None:
    """Negative control: the model is the recorded one, and the text tells an error of one layer."""
    path = tmp_path / "shifted.safetensors"
    options = ["convert", str(DATA / "cvector-generator.gguf"), str(path), "--format", "cvector-generator"]
    assert CliRunner().invoke(app, options).exit_code == 0
    llm.steering.register_file("shifted", path)
    assert tokens(llm) == RECORDED["steered"]["plain"]
    assert tokens(llm, "shifted") not in RECORDED["steered"].values()
