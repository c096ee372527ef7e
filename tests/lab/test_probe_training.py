# SPDX-License-Identifier: Apache-2.0
"""Methods of training a probe, and training on the rows of a harvest."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn import neural_network
from typer.testing import CliRunner

from tests.lab.planted import LAYER, TEXTS, Examples, labelled, written
from vllm_steer import SteeringError
from vllm_steer.cli import probe as commands
from vllm_steer.cli.main import app
from vllm_steer.lab import check_probe, compare_probes, harvest, methods, train_probe
from vllm_steer.lab.activations import Pool
from vllm_steer.lab.methods import ProbeMethod, fit_probe, probe_scores
from vllm_steer.lab.statistics import auroc


@pytest.mark.parametrize("method", ["logistic", "ridge", "mean", "mlp"])
def test_each_method_is_served_as_it_was_trained(
    llm: Any,
    planted: Examples,
    tmp_path: Path,
    method: ProbeMethod,
) -> None:
    """Catches weights that are not folded back to rows as they are, and a hidden layer that the file loses."""
    pool: Pool = "last" if method == "mlp" else "mean"
    found = train_probe(llm, planted[:140], method=method, layers=LAYER, pool=pool, controls=2)
    assert found.provenance["method"] == method
    found.save(tmp_path / "probe.safetensors")
    held = found.result
    checked = check_probe(llm, tmp_path / "probe.safetensors", labelled(held.texts, held.labels))
    np.testing.assert_allclose(checked.scores, held.scores, atol=2e-4 * max(1, np.abs(held.scores).max()))
    if pool == "mean":
        assert held.accuracy > 0.8 and held.auroc > 0.9, "the bias puts the threshold 0 between the classes"
    assert checked.engine == held.engine and checked.engine.startswith("float32, quantization None, KV cache ")


def test_a_hidden_layer_finds_what_no_line_separates() -> None:
    """Catches a hidden layer whose units are all alike, and methods that are one and the same."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(600, 8)) * 5 + 3
    labels = np.abs(rows[:, 0] - 3) > 3.4
    scores = {}
    for method in ("logistic", "ridge", "mean", "mlp"):
        weights, bias = fit_probe(method, rows[:400], labels[:400])  # type: ignore[arg-type]
        values = probe_scores(weights, bias, rows[400:])
        scores[method] = auroc(values[labels[400:]], values[~labels[400:]])
    assert scores["mlp"] > 0.9 and max(scores[each] for each in ("logistic", "ridge", "mean")) < 0.7
    labels = rows @ np.array([1, 0.5, 0, 0, 0, 0, 0, -1]) > 1
    found = {method: fit_probe(method, rows, labels)[0] for method in ("logistic", "ridge", "mean")}  # type: ignore[arg-type]
    units = [each / np.linalg.norm(each) for each in found.values()]
    products = np.array(units) @ np.array(units).T
    assert products.min() > 0.8 and products[np.triu_indices(3, 1)].max() < 0.9999


def test_a_fit_that_does_not_converge_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scikit-learn's warning, which advises options that callers do not have, and warnings of control fits."""
    random = np.random.default_rng(0)
    rows, labels = random.normal(size=(60, 8)), np.arange(60) % 2 == 0
    found = methods.scikit_learn

    def part(name: str) -> Any:
        def classifier(*args: Any, **fields: Any) -> Any:
            return neural_network.MLPClassifier(*args, **{**fields, "max_iter": 2})

        return SimpleNamespace(MLPClassifier=classifier) if name == "neural_network" else found(name)

    monkeypatch.setattr(methods, "scikit_learn", part)
    with pytest.warns(RuntimeWarning, match="stopped before it converged.* give more texts") as caught:
        fit_probe("mlp", rows, labels)
    assert len(caught) == 1, "not scikit-learn's as well"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_probe("mlp", rows, labels, warn=False)


def test_methods_without_a_readout_are_refused(llm: Any, planted: Examples) -> None:
    """Catches a probe that the engine would score differently than it was trained."""
    with pytest.raises(SteeringError, match='pool: must be "last" for mlp, because the mean of the scores'):
        train_probe(llm, planted, method="mlp")
    with pytest.raises(SteeringError, match="method: 'attention' is not valid; use one of logistic, ridge, mean, mlp"):
        train_probe(llm, planted, method="attention")  # type: ignore[arg-type]


def test_rows_of_a_harvest_train_the_same_probe(llm: Any, planted: Examples, tmp_path: Path) -> None:
    """Catches rows of other texts or layers than those of the labels, and a repeated text that shifts the rest."""
    texts = [*planted[:100], *planted[:3], *planted[100:120]]
    tagged = [{**each, "tag": f"no. {i}"} for i, each in enumerate(texts)]
    harvest(llm, tagged, tmp_path / "acts", layers=[1, LAYER], dtype="float32")
    live = train_probe(llm, texts, layers=[1, LAYER], controls=3, seed=2)
    found = train_probe(tmp_path / "acts", texts, controls=3, seed=2)
    assert (found.model, found.point, found.layer) == (live.model, live.point, live.layer)
    np.testing.assert_allclose(found.weights, live.weights, atol=1e-5)
    np.testing.assert_allclose(found.result.scores, live.result.scores, atol=1e-4)
    assert found.aurocs == live.aurocs and found.provenance == live.provenance and found.result.engine == ""
    found.save(tmp_path / "p.safetensors")
    assert check_probe(llm, tmp_path / "p.safetensors", planted[120:]).auroc > 0.8
    pairs = [{"positive": TEXTS[2 * i], "negative": TEXTS[2 * i + 1]} for i in range(20)]
    harvest(
        llm, [each for pair in pairs for each in pair.values()], tmp_path / "pairs", layers=[LAYER], dtype="float32"
    )
    found, live = (train_probe(each, pairs, layers=LAYER, controls=2) for each in (tmp_path / "pairs", llm))
    np.testing.assert_allclose(found.weights, live.weights, atol=1e-5)


def test_rows_of_something_else_are_refused(llm: Any, planted: Examples, tmp_path: Path) -> None:
    """Catches labels of other texts, of a part, or in another order; and sites or tokens that were not harvested."""
    acts = tmp_path / "acts"
    harvest(llm, planted[:40], acts, layers=[LAYER])
    partial, manifest = tmp_path / "partial", json.loads((acts / "harvest.json").read_text())
    shutil.copytree(acts, partial)
    (partial / "harvest.json").write_text(json.dumps({**manifest, "texts": 50}))
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        (acts, planted[:39], {}, "rows: .* has the rows of 40 texts, which are not these 39 in this order; give the"),
        (acts, planted[40:80], {}, "rows: .* which are not these 40 .*; give the examples that were harvested"),
        (partial, planted[:50], {}, "rows: .* has the rows of 40 of 50 texts; complete the harvest"),
        (acts, planted[1:40] + planted[:1], {}, "rows: .* which are not these 40 in this order"),
        (acts, planted[:40], {"layers": [1]}, rf"layers: .* has no rows of layer 1; use some of \[{LAYER}\]"),
        (acts, planted[:40], {"point": "mlp_out"}, "point: .* has no rows of mlp_out; use post_block"),
        (acts, planted[:40], {"positions": "last_prompt"}, r"positions: .* has rows of \[\[1, None\]\]; omit it"),
        (tmp_path / "none", planted[:40], {}, r"rows: .* has no harvest.json; give a folder"),
    ]
    for folder, texts, changed, message in refused:
        with pytest.raises(SteeringError, match=message):
            train_probe(folder, texts, controls=2, **changed)
    assert train_probe(acts, planted[:40], positions=[[1, None]], controls=2).layer == LAYER


def test_the_commands_train_on_rows_choose_a_threshold_and_compare(
    llm: Any, planted: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches options that are not passed on, a model that is loaded for stored rows, and statuses of other words."""
    monkeypatch.chdir(tmp_path)
    harvest(llm, planted[:120], "acts", layers=[0, LAYER])
    train, other = written(Path("train.jsonl"), planted[:120]), written(Path("other.jsonl"), planted[120:])
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["probe", *words])
        return done.exit_code, done.output

    words = ["train", train, "--rows", "acts", "--method", "ridge"]
    assert run(*words, "--out", "new.safetensors", "--model", "m")[0] == 1
    status, said = run(*words, "--out", "new.safetensors", "--false-positives", "0.001")
    assert status == 1 and "a rate of 0.001 needs 999 negative texts" in said and not Path("new.safetensors").exists()
    status, said = run(*words, "--out", "new.safetensors", "--false-positives", "0.1")
    assert status == 0 and "new.safetensors: threshold " in said and "for 10 % false positives on 41 texts" in said
    run("train", train, "--rows", "acts", "--layers", "0", "--out", "old.safetensors")
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: llm)
    compared = compare_probes(llm, "old.safetensors", "new.safetensors", other)
    status, said = run("check", "old.safetensors", other, "--model", "m", "--new", "new.safetensors")
    assert compared.verdict in said and status == int(compared.state != "PASS")
    assert compared.new.threshold != 0 and compared.old.threshold == 0 and compared.new.auroc > compared.old.auroc
    status, said = run("check", "new.safetensors", other, "--model", "m", "--new", "old.safetensors")
    assert "SCORER DEGRADED: " in said and status == 1
    status, said = run("check", "new.safetensors", other, "--model", "m")
    assert "recall at 1 % false positives not told: too few negatives" in said
    assert compared.new.threshold_verdict in said and status == int(compared.new.threshold_state == "stale")
    status, said = run("check", "old.safetensors", other, "--model", "m", "--false-positives", "0.2")
    assert "old.safetensors: threshold " in said and "for 20 % false positives on" in said
    assert json.loads(json.dumps(check_probe(llm, "old.safetensors", other).threshold)) != 0
