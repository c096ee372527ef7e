# SPDX-License-Identifier: Apache-2.0
"""Dose studies on a tiny engine: what is run, and what of it again after an interruption."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.hf import Hooked
from tests.tiny import HIDDEN, VOCAB
from vllm_steer import Edit, SamplingParams, SteeringError
from vllm_steer.cli import lab as commands
from vllm_steer.cli.main import app
from vllm_steer.lab import DoseResult, ProbeScore, dose, dose_study, make
from vllm_steer.registry.directions import Direction, Directions, save_module

RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(0, VOCAB, 6).tolist() for _ in range(8)]
WEIGHTS = RANDOM.standard_normal(HIDDEN).astype(np.float32)
READOUT = {"probe": WEIGHTS, "point": "post_block", "layer": 1}
SETTINGS: dict[str, Any] = {"score": ProbeScore(READOUT), "doses": [0.5, 1.0], "controls": 3, "max_tokens": 5}


def directions(*layers: int, model: str = "llama") -> Directions:  # a model type, as files of other tools name it
    units = np.random.default_rng(1).standard_normal((4, HIDDEN)).astype(np.float32)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    return Directions({n: Direction("post_block", n, units[n], 1.0) for n in layers}, model, "mean", {})


def test_the_probe_of_a_module_scores(llm: Any) -> None:
    """Catches a name that is read as numbers, and scores that differ from the scores with the probe's weights."""
    llm.steering.register("judge", probes={"joy": {"weights": WEIGHTS, **{k: READOUT[k] for k in ("point", "layer")}}})
    try:
        named = dose(llm, directions(0), PROMPTS, **{**SETTINGS, "score": ProbeScore({"probe": "judge/joy"})})
    finally:
        llm.steering.delete("judge")
    assert named.verdict == dose(llm, directions(0), PROMPTS, **SETTINGS).verdict


def test_texts_are_scored_without_steering(llm: Any, folder: Path) -> None:
    """Catches a probe that reads the added vector, rows of the prompt, and a perplexity of the steered model."""
    hooked = Hooked(folder)
    found = dose(llm, directions(0), PROMPTS, **SETTINGS)
    stream = np.median([np.linalg.norm(row) for text in PROMPTS for row in hooked.run(text)[0, 1:]])
    vector = directions(0)[0].unit * np.float32(stream)
    outputs: dict[Any, list[int]] = {}
    for amount in (0.0, 0.5):
        edits = [Edit("add", point="post_block", layers=0, vector=vector, strength=amount)]
        params = SamplingParams(temperature=0, max_tokens=5, steering=edits)
        answers = llm.generate([{"prompt_token_ids": text} for text in PROMPTS], params, use_tqdm=False)
        outputs.update(((amount, number), list(each.outputs[0].token_ids)) for number, each in enumerate(answers))
    compared = 0
    for sample in found.samples:
        if sample.kind not in ("plain", "vector") or sample.dose not in (0.0, 0.5):
            continue
        text = outputs[sample.dose, sample.prompt]
        rows = hooked.run([*PROMPTS[sample.prompt], *text])
        np.testing.assert_allclose(sample.score, (rows[1, 6:] @ WEIGHTS).mean(), rtol=1e-3, atol=1e-3)
        logprobs = hooked.logits.log_softmax(-1).numpy()
        np.testing.assert_allclose(sample.loss, -np.mean([logprobs[5 + i, t] for i, t in enumerate(text)]), rtol=1e-3)
        compared += 1
    assert compared == 8 + 8, "all prompts plain, and each prompt once at dose 0.5: to choose, or held out"


def test_an_interrupted_study_goes_on(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches texts that are generated twice or lost after an interruption, and a result that depends on it."""
    monkeypatch.setattr(dose_study, "_QUEUE", 7)
    whole = dose(llm, directions(0, 2), PROMPTS, **SETTINGS)
    assert len(whole.samples) == 8 + 2 * 2 * 4 + 2 * 4 * (2 + 3)
    path, batch = tmp_path / "dose.jsonl", dose_study._Answer.__call__
    batches: list[int] = []

    def killed(self: Any, llm: Any, work: Any) -> Any:
        batches.append(len(work))
        if len(batches) == 5:
            raise KeyboardInterrupt
        return batch(self, llm, work)

    monkeypatch.setattr(dose_study._Answer, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        dose(llm, directions(0, 2), PROMPTS, **SETTINGS, out=path)
    done = sum(batches[:-1])
    assert len(path.read_text().splitlines()) == 1 + done
    batches[:] = [0] * 6
    again = dose(llm, directions(0, 2), PROMPTS, **SETTINGS, out=path)
    assert done + sum(batches) == len(again.samples) == len(whole.samples)
    assert again.verdict == whole.verdict == DoseResult.load(path).verdict
    assert {each.key: each.text for each in again.samples} == {each.key: each.text for each in whole.samples}
    with pytest.raises(SteeringError, match=r"another study \(other .*seed"):
        dose(llm, directions(0, 2), PROMPTS, **SETTINGS, out=path, seed=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": PROMPTS[:7]}, "prompts: has the length 7; give at least 8 prompts"),
        ({"prompts": [*PROMPTS, PROMPTS[1]]}, rf"prompts\[{len(PROMPTS)}\]: is prompts\[1\] again; give each"),
        ({"doses": [0.5, -1]}, "doses: must be positive numbers"),
        ({"doses": []}, "doses: must be positive numbers"),
        ({"doses": [0.5, 2000]}, r"doses\[1\]: a dose must be between .*, not 2000; beyond, rounding loses the stream"),
        ({"controls": 1}, "controls: must be 2 to 1000, not 1"),
        ({"layers": [0, 3]}, r"layers: has no vector of layer 3; use some of \[0, 2\]"),
        ({"max_tokens": 507}, "max_tokens: is 507, with which a prompt needs 514 tokens"),
        ({"score": lambda prompt, text: float("nan")}, "score: is nan for prompt 0"),
        ({"score": lambda prompt, text: 1 / 0}, "score: failed for prompt 0: ZeroDivisionError"),
        ({"score": "probe.safetensors"}, r"score: must be .*, not str; a probe scores with ProbeScore\(readout\)"),
        ({"vectors": directions(0, model="org/other-7b")}, "vectors: were made for the model 'org/other-7b', not '"),
        ({"score": ProbeScore(READOUT, "other")}, "score: is a probe that was trained on the model 'other', not '"),
        ({"vectors": "none.gguf"}, r"none\.gguf cannot be read"),
    ],
)
def test_bad_input_is_refused(llm: Any, changed: dict[str, Any], message: str) -> None:
    """Catches an error without the argument that caused it."""
    given = {"vectors": directions(0, 2), "prompts": PROMPTS, **SETTINGS, **changed}
    with pytest.raises(SteeringError, match=message):
        dose(llm, **given)


def test_vectors_of_another_model_are_refused(llm: Any) -> None:
    """Catches a vector of another width, which the engine would refuse in the middle of the study."""
    narrow = Directions({1: Direction("post_block", 1, np.ones(8, np.float32), 1.0)}, "m", "mean", {})
    with pytest.raises(SteeringError, match=r"vectors: have 8 numbers, and the stream of .* 64; start the model"):
        dose(llm, narrow, PROMPTS, **SETTINGS)


def test_the_command_runs_the_study(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches options that do not arrive, and files that are not written."""
    monkeypatch.setattr(commands, "start_engine", lambda model, words, command: llm)
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": {json.dumps(prompt)}}}\n' for prompt in PROMPTS))
    Path("judge.py").write_text("def length(prompt, text):\n    return len(text)\n")
    pairs = [{"positive": [1, n], "negative": [2, n + 9]} for n in range(8)]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    make(llm, pairs, layers=[0, 2]).save("v.safetensors")
    command = ["dose", "v.safetensors", "--prompts", "prompts.jsonl", "--model", "m", "--out", "dose.jsonl"]
    command += ["--doses", "0.5", "--controls", "3", "--max-tokens", "4", "--layers", "2", "--examples", "pairs.jsonl"]
    files = ["--html", "dose.html", "--plot", "dose.svg", "--parquet", "dose.parquet"]
    given: list[Any] = []
    monkeypatch.setattr(commands, "start_engines", lambda *arguments: given.append(arguments) or nullcontext(llm))
    done = CliRunner().invoke(app, [*command, "--score", "judge:length", *files, "--ray"])
    assert done.exit_code == 0 and given == [("m", [], "dose")], done.output
    study = DoseResult.load("dose.jsonl").study
    assert (study.layers, study.doses, study.controls, study.shuffles) == ((2,), (0.5,), 3, 5)
    assert study.score == "function judge.length" and DoseResult.load("dose.jsonl").verdict in done.output
    assert all(Path(name).stat().st_size for name in files[1::2])
    hidden = {"weights": WEIGHTS[None] / 100, "outputs": np.ones(1), "activation": "tanh"}
    for name, probe in (("linear", {"weights": WEIGHTS}), ("hidden", hidden)):
        content = {"probes": {"p": {**probe, "point": "post_block", "layer": 1}}}
        save_module("probe.safetensors", content, "", {})
        done = CliRunner().invoke(app, [*command, "--score", "probe.safetensors", "--out", f"{name}.jsonl"])
        assert done.exit_code == 0, done.output
        scores = [sample.score for sample in DoseResult.load(f"{name}.jsonl").samples]
        assert (max(map(abs, scores)) <= 1) == (name == "hidden") and len(set(scores)) > 8
    save_module("probe.safetensors", content, "m", {})
    done = CliRunner().invoke(app, [*command, "--score", "probe.safetensors", "--out", "other.jsonl"])
    assert done.exit_code == 1 and "score: is a probe that was trained on the model 'm', not '" in done.output
    for words, message in (
        ([], "score: give --words or --score"),
        (["--score", "judge:none"], "judge:none cannot be imported"),
        (["--words", "a", "--doses", "x"], "doses: 'x' is not a list of numbers"),
        (["--words", "a", "--plot", "dose.xyz"], "unknown suffix .xyz"),
        (["--words", "two words"], "score.positive: 'two words' is not one word"),
    ):
        monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))
        done = CliRunner().invoke(app, [*command, *words])
        assert done.exit_code == 1 and message in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "none/out.jsonl", "--words", "good"], "folder not found: "),
        (["--out", "out.jsonl", "--score", "v.safetensors"], "has vectors and no probe"),
        (["--out", "out.jsonl", "--score", "nothing:here"], "give MODULE:FUNCTION"),
    ],
)
def test_the_command_fails_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Catches an output or a score that is refused only after minutes of loading, and vectors taken for a probe."""
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))
    monkeypatch.chdir(tmp_path)
    directions(0).save("v.safetensors")
    Path("p.jsonl").write_text("".join(f'"{i}"\n' for i in range(8)))
    done = CliRunner().invoke(app, ["dose", "v.safetensors", "--prompts", "p.jsonl", "--model", "m", *words])
    assert done.exit_code == 1 and message in done.output and not Path("out.jsonl").exists()
