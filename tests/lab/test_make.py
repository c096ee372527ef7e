# SPDX-License-Identifier: Apache-2.0
"""Directions of an engine's captures, against hooks on the same model in HF Transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.hf import Hooked, cosine
from tests.tiny import LAYERS, VOCAB
from vllm_steer import SteeringError
from vllm_steer.cli import lab as commands
from vllm_steer.cli.main import app
from vllm_steer.lab import activations, make
from vllm_steer.registry.vector_files import read_vector_file

RANDOM = np.random.default_rng(5)
PAIRS = [
    {"positive": RANDOM.integers(0, VOCAB // 2, 9).tolist(), "negative": RANDOM.integers(VOCAB // 2, VOCAB, 6).tolist()}
    for _ in range(20)
]
"""Token ids of two halves of the vocabulary; more texts than are captured together."""


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[np.ndarray]:
    """Rows of each text without the first token, ``[layers, tokens, hidden]``."""
    hooked = Hooked(folder)
    return [hooked.run(text)[:, 1:] for pair in PAIRS for text in (pair["positive"], pair["negative"])]


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_means_and_components_are_those_of_hooks(llm: Any, rows: list[np.ndarray], pool: Any) -> None:
    """Catches rows of another layer, token or text, the first token's row, and a component of the pooled texts."""
    pooled = np.stack([text[:, -1] if pool == "last" else text.mean(1) for text in rows], axis=1).astype(np.float64)
    differences = pooled[:, 0::2] - pooled[:, 1::2]
    means = make(llm, PAIRS, pool=pool)
    components = make(llm, PAIRS, pool=pool, method="pca", layers=[1, 3])
    assert list(means) == list(range(LAYERS)) and list(components) == [1, 3]
    for layer, found in means.items():
        right = differences[layer].mean(0)
        assert cosine(found.unit, right) > 0.9999
        np.testing.assert_allclose(found.vector, right, atol=1e-3 * np.linalg.norm(right))
        lengths = np.concatenate([np.linalg.norm(text[layer], axis=1) for text in rows])
        assert found.stream == pytest.approx(np.median(lengths), rel=1e-4)
    for layer, found in components.items():
        vector = np.linalg.eigh(differences[layer].T @ differences[layer])[1][:, -1]
        assert cosine(found.unit, vector * np.sign(vector @ differences[layer].mean(0))) > 0.9999
    other = pooled[1, 0::2].mean(0) - pooled[1, 1::2].mean(0)
    assert cosine(means[2].unit, other) < 0.9999, "negative control: layers are told apart"


def test_probes_tell_the_classes_apart(llm: Any) -> None:
    """Catches labels or rows in another order than the texts."""
    labelled = [{"text": pair[name], "label": name == "positive"} for pair in PAIRS for name in pair]
    found = make(llm, labelled, method="probe", layers=2)
    assert cosine(found[2].unit, make(llm, PAIRS, layers=2)[2].unit) > 0.2
    assert make(llm, labelled[::-1], method="probe", layers=2)[2].unit @ found[2].unit > 0.999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [1, 40]}, r"layers: 40 is not a layer of .*, which has layers 0 to 3"),
        ({"layers": "some"}, "layers: must be a layer number"),
        ({"point": "attn_out"}, r"point: attn_out is not read by this engine; use one of pre_attn, post_attn"),
        ({"method": "median"}, "method: 'median' is not valid; use one of mean, pca, probe"),
        ({"pool": "first"}, "pool: 'first' is not valid"),
    ],
)
def test_arguments_of_another_model_are_refused(llm: Any, arguments: dict[str, Any], message: str) -> None:
    """Catches an error of the engine in the middle of a run, without the argument that caused it."""
    with pytest.raises(SteeringError, match=message):
        make(llm, PAIRS, **arguments)


def test_texts_without_difference_are_refused(llm: Any) -> None:
    """Catches texts of one token, which have no rows, and a difference in the first token alone at layer 0's input."""
    with pytest.raises(
        SteeringError,
        match=r"texts\[0\]: has 1 tokens, and none at the positions \[\[1, None\]\]; remove it, or use ",
    ):
        make(llm, [{"positive": [1], "negative": [2]}])
    with pytest.raises(SteeringError, match="pre_attn of layer 0: the two classes have the same mean"):
        make(llm, [{"positive": [1, 5], "negative": [2, 5]}], point="pre_attn", layers=0)


def test_the_command_writes_what_python_makes(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches options that the command does not pass on, and errors that appear after the model was loaded."""
    monkeypatch.setattr(commands, "start_engine", lambda model, words, command: llm)
    examples, out = tmp_path / "pairs.jsonl", tmp_path / "calm.safetensors"
    examples.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    command = ["make", "pca", str(examples), "--model", "m", "--out", str(out), "--layers", "1:4", "--pool", "last"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    expected = make(llm, PAIRS, method="pca", layers=range(1, 4), pool="last")
    module, metadata = read_vector_file(out)
    assert [edit.layers for edit in module.base] == [(1,), (2,), (3,)]
    for edit in module.base:
        np.testing.assert_allclose(edit.vector, expected[int(edit.layers[0])].vector, rtol=1e-4, atol=1e-5)
    assert metadata.provenance["method"] == "pca" and metadata.provenance["pool"] == "last"
    done = CliRunner().invoke(app, [*command, "--best"])
    assert done.exit_code == 0 and f"best layer {expected.best}" in done.output
    assert [edit.layers for edit in read_vector_file(out)[0].base] == [(expected.best,)]
    monkeypatch.setattr(activations, "_OUTLIER", 1.0)
    done = CliRunner().invoke(app, [*command, "--pool", "mean", "--positions", "[[1, 3]]"])
    before, _, warned = done.output.partition("warning: at layer ")
    assert done.exit_code == 0 and f"best layer {expected.best}" not in warned and "best layer" in before
    assert "\nwarning: at layer " in done.stderr and "(in a command, --positions " in done.stderr
    positions = re.search(r"--positions \"(.*)\"\)", done.stderr)
    assert positions is not None and commands.read_positions(positions[1]) == {"positions": [[3, None]]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "8:x"], "layers: '8:x' is not 12, 8,12, 8:24, 8:24:4 or all"),
        (["--layers", "3:3"], "layers: is empty"),
        (["--pool", "first"], "pool: 'first' is not valid"),
        (["--out", "calm.pt"], "calm.pt has an unknown suffix; use .safetensors or .gguf"),
        (["--out", "none/calm.gguf"], "folder not found"),
    ],
)
def test_the_command_fails_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Catches a wrong option that is told after minutes of loading."""
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    command = ["make", "mean", "pairs.jsonl", "--model", "m", "--out", "calm.gguf", *words]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and message in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
