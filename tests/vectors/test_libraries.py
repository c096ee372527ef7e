# SPDX-License-Identifier: Apache-2.0
"""Vectors of a file, added in HF Transformers at our hook points, steer as the library of the file does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import save_tiny_llama
from vllm_steer.registry.vector_files import read_vector_file
from vllm_steer.vectors import Choice

DATA = Path(__file__).parent / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "steered.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(save_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


@contextmanager
def adding(model: Any, file: str, choice: Choice) -> Iterator[None]:
    """Add the vectors of a file to the outputs of the decoder layers, which are post_block."""
    with ExitStack() as hooks:
        for edit in read_vector_file(DATA / file, choice)[0].base:
            assert edit.point == "post_block"
            vector = torch.from_numpy(edit.vector.copy())
            layer = model.model.layers[edit.layers[0]]
            hooks.callback(layer.register_forward_hook(lambda *args, v=vector: args[2] + v).remove)
        yield


def generate(model: Any) -> list[int]:
    tokens = list(RECORDED["prompt"])
    with torch.no_grad():
        for _ in RECORDED["steered"]["plain"]:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(RECORDED["prompt"]) :]


@pytest.mark.parametrize(
    ("library", "file", "choice"),
    [
        ("repeng", "repeng.gguf", Choice()),
        ("repeng", "cvector-generator.gguf", Choice("control-vector")),
        ("steering-vectors", "layers.safetensors", Choice(point="post_block")),
    ],
)
def test_a_file_steers_as_its_library_does(model: Any, library: str, file: str, choice: Choice) -> None:
    """Catches vectors of another layer or hook point than the library's, whose text differs."""
    with adding(model, file, choice):
        assert generate(model) == RECORDED["steered"][library]


def test_another_layer_gives_another_text(model: Any) -> None:
    """Negative control: the model is the recorded one, and the text tells an error of one layer."""
    assert generate(model) == RECORDED["steered"]["plain"]
    with adding(model, "cvector-generator.gguf", Choice("cvector-generator")):
        assert generate(model) not in RECORDED["steered"].values()
