# SPDX-License-Identifier: Apache-2.0
"""Probes of texts whose labels depend on a planted direction, or on nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.planted import LAYER, TEXTS, labelled, written
from tests.tiny import HIDDEN
from vllm_steer import SamplingParams, SteeringError
from vllm_steer.cli import probe as commands
from vllm_steer.cli.lab import read_positions
from vllm_steer.cli.main import app
from vllm_steer.lab import TrainedProbe, check_probe, compare_probes, train_probe
from vllm_steer.lab.examples import read_examples, read_texts
from vllm_steer.lab.probe_result import ProbeResult
from vllm_steer.lab.probe_texts import distinct_texts
from vllm_steer.registry.directions import save_module
from vllm_steer.registry.vector_files import read_vector_file


@pytest.fixture(scope="module")
def trained(llm: Any, planted: list[dict[str, Any]]) -> TrainedProbe:
    return train_probe(llm, planted[:140], layers=[0, LAYER])


@pytest.fixture(scope="module")
def saved(trained: TrainedProbe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "planted.safetensors"
    trained.save(path)
    return path


def test_a_planted_direction_is_found(trained: TrainedProbe) -> None:
    """Catches labels or rows of other texts, and a layer that separates the classes worse."""
    result = trained.result
    assert trained.layer == LAYER and trained.aurocs[LAYER] > trained.aurocs[0]
    assert result.auroc > 0.95 and result.accuracy > 0.85 and result.better_than_chance, result.verdict
    assert result.verdict.startswith("better than chance: AUROC ")
    assert result.controls is not None and len(result.controls) == 20
    assert abs(np.mean(result.controls) - 0.5) < 0.15 and max(result.controls) < result.auroc


def test_random_labels_are_no_better_than_chance(llm: Any, trained: TrainedProbe, tmp_path: Path) -> None:
    """Catches scores of the texts that the probe was trained on, which separate any labels."""
    for seed in range(4):
        labels = np.random.default_rng(seed).permutation(np.arange(90) % 2)
        found = train_probe(llm, labelled(TEXTS[:90], labels), layers=LAYER, controls=5, seed=seed)
        assert found.result.verdict.startswith("no better than chance: "), found.result.verdict
        assert found.result.auroc < 0.8, "the probe was not trained on these texts"
    trained.save(tmp_path / "probe.safetensors")
    checked = check_probe(llm, tmp_path / "probe.safetensors", labelled(TEXTS[:90], labels))
    assert not checked.better_than_chance and checked.verdict.startswith("no better than chance: "), checked.verdict


def test_the_engine_serves_the_checked_scores(
    llm: Any, trained: TrainedProbe, saved: Path, planted: list[dict[str, Any]], planted_rows: np.ndarray
) -> None:
    """Catches a bias, layer, point or token that the file loses, and scores that the engine does not return."""
    module, metadata = read_vector_file(saved)
    assert (module.probes["probe"].layer, module.probes["probe"].point) == (LAYER, "post_block")
    assert metadata.provenance["result"] == trained.result.verdict
    others = planted[140:]
    checked = check_probe(llm, saved, others)
    assert checked.auroc > 0.95 and checked.better_than_chance and checked.controls is None
    llm.steering.register_file("planted", saved)
    readout = {"probe": "planted/probe", "positions": [[1, None]]}
    params = SamplingParams(
        max_tokens=1, temperature=0, readouts={"lie": readout, "odds": {**readout, "sigmoid": True}}
    )
    outputs = llm.generate([each["text"] for each in others], params, use_tqdm=False)
    served = [float(output.outputs[0].readouts["lie"].values.mean()) for output in outputs]
    np.testing.assert_allclose(checked.scores, served, atol=1e-4)
    values = outputs[0].outputs[0].readouts
    np.testing.assert_allclose(values["odds"].values, 1 / (1 + np.exp(-values["lie"].values)), atol=1e-5)
    right = [planted_rows[TEXTS.index(each["text"])] @ trained.weights + trained.bias for each in others]
    np.testing.assert_allclose(checked.scores, right, atol=1e-3)
    held = trained.result
    again = check_probe(llm, saved, labelled(held.texts, held.labels))
    np.testing.assert_allclose(again.scores, held.scores, atol=1e-4)


def test_the_last_token_is_scored_alone(llm: Any, planted: list[dict[str, Any]], tmp_path: Path) -> None:
    """Catches a check that averages the scores of a probe of last tokens."""
    found = train_probe(llm, planted[:90], layers=LAYER, pool="last", controls=2)
    found.save(tmp_path / "last.safetensors")
    held = found.result
    checked = check_probe(llm, tmp_path / "last.safetensors", labelled(held.texts, held.labels))
    np.testing.assert_allclose(checked.scores, held.scores, atol=1e-4)


def test_other_probes_are_checked_as_the_engine_reads_them(
    llm: Any, trained: TrainedProbe, planted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Catches a threshold of log-odds for probabilities, and a hidden layer that is read as a direction."""
    site = {"point": "post_block", "layer": LAYER}
    linear = {"weights": trained.weights, "bias": trained.bias, "sigmoid": True, **site}
    hidden = {"weights": [trained.weights, -trained.weights], "outputs": [1.0, -1.0], "activation": "relu", **site}
    path = tmp_path / "two.safetensors"
    save_module(path, {"probes": {"linear": linear, "hidden": hidden}}, trained.model, {})
    others = planted[140:]
    found = check_probe(llm, path, others, name="linear")
    assert found.threshold == 0.5 and 0 < found.scores.min() < 0.5 < found.scores.max() < 1 and found.auroc > 0.9
    found = check_probe(llm, path, others, name="hidden")
    exact = trained.readout()
    save_module(tmp_path / "one.safetensors", {"probes": {"p": {"weights": exact["probe"], **site}}}, "", {})
    np.testing.assert_allclose(found.scores, check_probe(llm, tmp_path / "one.safetensors", others).scores, atol=1e-4)
    with pytest.raises(SteeringError, match=r"name: .*two\.safetensors has several probes; name one of hidden, linear"):
        check_probe(llm, path, others)
    with pytest.raises(SteeringError, match=r"name: .* has no probe 'lie'; use one of hidden, linear"):
        check_probe(llm, path, others, name="lie")


def test_no_text_is_on_both_sides(llm: Any) -> None:
    """Catches a repeated text, or the other text of a pair, that is held out and trained on."""
    repeated = labelled([*TEXTS[:40], *TEXTS[:40]], [*(np.arange(40) % 2)] * 2)
    assert distinct_texts(repeated).texts == TEXTS[:40]
    random = np.random.default_rng(0)
    found = train_probe(llm, random.permutation(np.array(repeated, object)).tolist(), layers=0, controls=2)
    held = [str(text) for text in found.result.texts]
    assert len(set(held)) == len(held) == 14 and found.provenance["examples"].startswith("40 texts")
    pairs = [{"positive": TEXTS[2 * i], "negative": TEXTS[2 * i + 1]} for i in range(30)]
    result = train_probe(llm, pairs, layers=0, controls=2).result
    held = [str(text) for text in result.texts]
    assert len(held) == 20
    assert all((str(pair["positive"]) in held) == (str(pair["negative"]) in held) for pair in pairs)
    assert {str(text) for text, label in zip(result.texts, result.labels, strict=True) if label} == {
        str(pair["positive"]) for pair in pairs
    } & set(held)


def test_unusable_examples_are_refused(llm: Any, saved: Path) -> None:
    """Catches a verdict about too few texts, and labels that contradict each other."""
    refused: list[tuple[list[dict[str, Any]], str]] = [
        (labelled(TEXTS[:29], np.arange(29) % 2), "have 9 positive texts for training and 5 to hold out; give"),
        (labelled(TEXTS[:40], np.arange(40) < 14), "have 9 positive texts .* give at least 15 different texts"),
        (labelled(TEXTS[:40], np.ones(40)), "has labels of one class, true; give texts of both classes"),
        (labelled([*TEXTS[:30], TEXTS[0]], np.arange(31) % 2 == 1) + labelled([TEXTS[0]], [True]), "with both labels"),
        (labelled([*TEXTS[:30], [{"role": "user", "content": "a"}]], np.arange(31) % 2), "have conversations and"),
    ]  # fmt: skip
    for examples, message in refused:
        with pytest.raises(SteeringError, match=f"examples: .*{message}"):
            train_probe(llm, examples, layers=0)
    with pytest.raises(SteeringError, match="examples: have 4 texts of a class; give at least 5"):
        check_probe(llm, saved, labelled(TEXTS[:20], np.arange(20) < 4))
    with pytest.raises(SteeringError, match=r"layers: 40 is not a layer of .*name other layers, or start the model"):
        train_probe(llm, labelled(TEXTS[:40], np.arange(40) % 2), layers=[1, 40])


def test_probes_of_another_model_are_refused(llm: Any, trained: TrainedProbe, planted: Any, tmp_path: Path) -> None:
    """Catches scores of rows of another model, another width, or a layer that does not exist."""
    path, site = tmp_path / "probe.safetensors", {"point": "post_block", "layer": LAYER}
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"weights": trained.weights, **site}, "org/other-7b", "was trained on the model 'org/other-7b', not '"),
        ({"weights": np.ones(HIDDEN + 1), **site}, "", f"reads rows of {HIDDEN + 1} numbers, and .* has {HIDDEN}"),
        ({"weights": trained.weights, **site, "layer": 40}, "", "40 is not a layer of .*, or start the model"),
        ({"weights": trained.weights}, "", "does not name its hook point and layer; write it with both"),
    ]
    for probe, model, message in refused:
        save_module(path, {"probes": {"probe": probe}}, model, {})
        with pytest.raises(SteeringError, match=message):
            check_probe(llm, path, planted[140:])
    save_module(path, {"base": {"post_block": {"1": np.ones(HIDDEN)}}}, "", {})
    with pytest.raises(SteeringError, match="has vectors and no probe; train one"):
        check_probe(llm, path, planted[140:])


def test_the_texts_of_the_training_are_no_check(llm: Any, saved: Path, planted: list[dict[str, Any]]) -> None:
    """Catches a check that repeats the training's own labels."""
    with pytest.raises(SteeringError, match=r"examples: are the texts that .*\.safetensors was trained on; give"):
        check_probe(llm, saved, planted[:140])


def test_a_comparison_names_the_file_that_it_refuses(
    llm: Any, saved: Path, planted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Catches a refusal of one of two files that leaves open which."""
    other = tmp_path / "other.safetensors"
    train_probe(llm, planted[:130], layers=LAYER, method="mean", controls=2).save(other)
    for texts, name in ((planted[:140], saved.name), (planted[:130], other.name)):
        with pytest.raises(SteeringError, match=f"/{name} was trained on"):
            compare_probes(llm, saved, other, texts)
    trained = train_probe(llm, planted[:130], layers=LAYER, method="mean", controls=2)
    with pytest.raises(SteeringError, match="path: must be a file, not TrainedProbe; write a trained probe with its"):
        check_probe(llm, trained, planted[140:])  # type: ignore[arg-type]
    with pytest.raises(SteeringError, match=r"out: .*/probe.pt has an unknown suffix; use .safetensors$"):
        trained.save(tmp_path / "probe.pt")
    assert len(repr(trained)) < 400 and "auroc=" in repr(trained), "weights, texts and scores would fill the screen"


def test_a_missing_package_is_named(llm: Any, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in place of the command that installs the package."""
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(SteeringError, match=r'probe: .* needs the package scikit-learn; run `pip install "\.\[lab\]"`'):
        train_probe(llm, planted)


def test_statistics_of_a_result() -> None:
    """Catches rates of the other class, and a probability of chance below one of the permutations."""
    labels = np.arange(12) < 6
    scores = np.array([3.0, 2, 1, 4, 5, -1, -2, -3, -4, -5, 1.5, -6])
    result = ProbeResult([[0]] * 12, scores, labels, 0.0)
    assert (result.recall, result.false_positives, result.accuracy) == (5 / 6, 1 / 6, 10 / 12)
    assert result.auroc == pytest.approx(34 / 36)
    assert result.interval[0] < result.auroc < result.interval[1] <= 1 and 1 / 2001 <= result.chance < 0.02
    perfect = ProbeResult([[0]] * 12, np.where(labels, 1.0, 0.0), labels, 0.5)
    assert perfect.interval == (1, 1) and 1 / 2001 <= perfect.chance < 0.01 and perfect.better_than_chance
    wrong = ProbeResult([[0]] * 12, np.where(labels, 0.0, 1.0), labels, 0.5)
    assert not wrong.better_than_chance and wrong.chance > 0.99
    assert not ProbeResult([[0]] * 12, perfect.scores, labels, 0.5, np.ones(20)).better_than_chance


def test_the_commands_write_and_check_what_python_trains(
    llm: Any, planted: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches options that the commands do not pass on, a verdict of other texts, and a failed check with status 0."""
    monkeypatch.setattr(commands, "start_engine", lambda model, words, command: llm)
    out, examples = tmp_path / "lie.safetensors", written(tmp_path / "train.jsonl", planted[:90])
    words = ["--layers", "1:3", "--pool", "last", "--positions", "last_prompt", "--seed", "3", "--out", str(out)]
    done = CliRunner().invoke(app, ["probe", "train", examples, "--model", "m", *words])
    assert done.exit_code == 0, done.output
    expected = train_probe(llm, planted[:90], layers=[1, 2], pool="last", positions="last_prompt", seed=3)
    assert expected.result.verdict in done.output and f"at post_block of layer {expected.layer}" in done.output
    module, metadata = read_vector_file(out)
    np.testing.assert_allclose(module.probes["probe"].weights, expected.weights, atol=1e-5)
    assert metadata.provenance["positions"] == "last_prompt" and metadata.provenance["pool"] == "last"
    for labels in (planted[140:], labelled(TEXTS[200:260], np.arange(60) % 2)):
        others = written(tmp_path / "others.jsonl", labels)
        done = CliRunner().invoke(app, ["probe", "check", str(out), others, "--model", "m"])
        result = check_probe(llm, out, labels)
        assert result.verdict in done.output and done.exit_code == int(not result.better_than_chance)
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "few.jsonl", "--out", "a.safetensors"], "give at least 15 different texts of each class"),
        (["train", "many.jsonl", "--out", "a.gguf"], "a.gguf has an unknown suffix; use .safetensors"),
        (["train", "many.jsonl", "--out", "none/a.safetensors"], "folder not found"),
        (["train", "many.jsonl", "--out", "a.safetensors", "--layers", "x"], "layers: 'x' is not 12"),
        (["train", "many.jsonl", "--out", "a.safetensors", "--rows", "acts"], "model: give --model, or --rows with"),
        (
            ["train", "array.jsonl", "--out", "a.safetensors"],
            "array.jsonl:1: is a list of 2 values; write each on a line",
        ),
        (["train", "table.csv", "--out", "a.safetensors"], "Expecting value: line 1 column 1 (char 0); write one JSON"),
        (["train", "many.jsonl", "--out", "a.safetensors", "--positions", "last"], "use one of last_prompt"),
        (["train", "many.jsonl", "--out", "a.safetensors", "--positions", "[1.5]"], "positions[0]: must be a position"),
        (["check", "a.safetensors", "many.jsonl"], "a.safetensors cannot be read"),
        (["check", "vectors.safetensors", "many.jsonl"], "has vectors and no probe"),
    ],
)
def test_the_commands_fail_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Catches a wrong option or file that is reported only after minutes of loading."""
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))
    monkeypatch.chdir(tmp_path)
    written(Path("few.jsonl"), labelled(TEXTS[:28], np.arange(28) % 2))
    written(Path("many.jsonl"), labelled(TEXTS[:30], np.arange(30) % 2))
    Path("array.jsonl").write_text('[{"text": "a", "label": true}, {"text": "b", "label": false}]')
    Path("table.csv").write_text("text,label")
    save_module("vectors.safetensors", {"base": {"post_block": {"1": np.ones(HIDDEN)}}}, "", {})
    done = CliRunner().invoke(app, ["probe", *words, "--model", "m"])
    assert done.exit_code == 1 and message in done.output
    assert not Path("a.safetensors").exists()


def test_positions_of_a_command_are_those_of_python() -> None:
    """Catches lists of positions that the commands take for a name."""
    assert read_positions("[0, [4, null], -1]") == {"positions": [0, [4, None], -1]}
    assert read_positions("last_prompt") == {"positions": "last_prompt"} and read_positions(None) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "none"], "rows: none has no harvest.json; give a folder that `vllm-steer harvest` wrote"),
        (["--rows", "none", "--methd", "ridge"], "rows: --methd ridge is not an option of stored rows; see --help"),
        ([], "model: give --model, or --rows with the folder of a harvest"),
    ],
)
def test_wrong_options_of_stored_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Catches a misspelt option that is ignored without a model, and an error that names another option."""
    monkeypatch.chdir(tmp_path)
    written(Path("many.jsonl"), labelled(TEXTS[:30], np.arange(30) % 2))
    done = CliRunner().invoke(app, ["probe", "train", "many.jsonl", "--out", "a.safetensors", *words])
    assert done.exit_code == 1 and f"error: {message}" in done.output


def test_conversations_may_have_the_key_of_the_chat_api() -> None:
    """Catches a conversation that must be renamed, or one that replaces the text."""
    chat = [{"role": "user", "content": "Hello"}]
    read = read_examples([{"messages": chat, "label": True}, {"text": "a", "messages": chat, "label": False}])
    assert read.texts == (chat, "a")
    assert read_texts([{"messages": chat, "tag": "x"}])[0][:2] == (chat, "x")
