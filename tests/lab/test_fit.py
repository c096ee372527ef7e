# SPDX-License-Identifier: Apache-2.0
"""Directions of given activations, without an engine."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from vllm_steer import SteeringError
from vllm_steer.lab.activations import Activations, Pool, pool_rows
from vllm_steer.lab.examples import Examples, read_examples
from vllm_steer.lab.methods import Method, directions_of, fit, logistic
from vllm_steer.lab.statistics import auroc, folds
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.registry.vector_files import read_vector_file

HIDDEN = 24
TRUE = np.eye(HIDDEN)[3]


def examples(count: int, *, paired: bool) -> Examples:
    if paired:
        return read_examples([{"positive": f"p{i}", "negative": f"n{i}"} for i in range(count)])
    return read_examples([{"text": f"t{i}", "label": i % 2 == 0} for i in range(2 * count)])


def rows_of(given: Examples, effect: float, shared: float = 3.0) -> np.ndarray:
    """Return rows whose classes differ along TRUE, under a topic that both texts of a pair share."""
    random = np.random.default_rng(1)
    topics = random.standard_normal((len(given.texts), HIDDEN))[given.groups] * (shared if given.paired else 0.1)
    noise = random.standard_normal((len(given.texts), HIDDEN)) * 0.1
    signed: np.ndarray = topics + noise + np.where(given.labels, 1, -1)[:, None] * effect * TRUE
    return signed


def made(given: Examples, rows: np.ndarray, method: Method) -> dict[int, Direction]:
    return directions_of(Activations("m", "post_block", {7: rows.astype(np.float32)}, {7: 10.0}, 9), given, method)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_direction_points_to_the_positive_examples(method: Method, paired: bool, sign: int) -> None:
    """Catches a component with the arbitrary sign of a decomposition, and one of what the pair shares."""
    given = examples(20, paired=paired)
    found = made(given, rows_of(given, 0.5 * sign, shared=1.0), method)[7]
    least = 0.3 if method == "probe" else 0.95
    assert found.unit @ TRUE * sign > least
    assert found.auroc > 0.65 and found.stream == 10 and np.isclose(np.linalg.norm(found.unit), 1)
    if method == "mean":
        assert found.distance == pytest.approx(1.0, abs=0.2) and found.dose == pytest.approx(found.distance / 10)


@pytest.mark.parametrize("method", ["mean", "probe"])
def test_random_labels_separate_no_unseen_examples(method: Method) -> None:
    """Catches an AUROC of the examples that the direction was made of, which is high for any labels."""
    given = examples(40, paired=False)
    rows = np.random.default_rng(2).standard_normal((80, HIDDEN))
    assert abs(made(given, rows, method)[7].auroc - 0.5) < 0.2
    unit, _, centre = fit(rows, given, method)
    scores = (rows - centre) @ unit
    assert auroc(scores[given.labels], scores[~given.labels]) > 0.7


def test_the_principal_component_is_that_of_the_pairs() -> None:
    """Catches a component of all texts, in which the topic of a pair is larger than its difference."""
    given = examples(20, paired=True)
    rows = rows_of(given, 0.5)
    differences = rows[0::2] - rows[1::2]
    values, vectors = np.linalg.eigh(differences.T @ differences)
    unit, _, _ = fit(rows, given, "pca")
    assert abs(unit @ vectors[:, -1]) == pytest.approx(1) and values[-1] > 2 * values[-2]
    assert abs(np.linalg.svd(rows - rows.mean(0))[2][0] @ TRUE) < 0.5


def test_logistic_weights_are_those_of_the_minimum() -> None:
    """Catches a scaling that is not folded back, a penalised bias, and an optimiser that stops early."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((60, 5)) * [1, 10, 0.1, 3, 0] + 4
    labels = rows[:, 0] + random.standard_normal(60) > 4
    weights, bias = logistic(rows, labels, penalty=2.0)
    scale = np.array([*rows.std(0)[:4], 1.0])
    wrong = 1 / (1 + np.exp(-(rows @ weights + bias))) - labels
    gradient = ((rows - rows.mean(0)) / scale).T @ wrong + 2.0 * weights * scale
    assert np.abs(gradient).max() < 1e-5 and abs(wrong.sum()) < 1e-5 and weights[4] == 0


def test_equal_activations_are_refused() -> None:
    """Catches a direction of rounding errors, as of texts that differ only in the first token."""
    given = examples(4, paired=True)
    with pytest.raises(SteeringError, match="post_block of layer 7: the two classes have the same mean"):
        made(given, np.ones((8, HIDDEN)), "mean")


def test_folds_keep_pairs_together_and_classes_apart() -> None:
    """Catches a text whose pair is in another fold, and a fold without a class."""
    paired, single = examples(13, paired=True), examples(13, paired=False)
    fold = folds(paired.groups, paired.labels, 5, 0)
    assert (fold[0::2] == fold[1::2]).all() and len(set(fold.tolist())) == 5
    fold = folds(single.groups, single.labels, 5, 0)
    assert all(single.labels[fold == each].sum() in (2, 3) for each in range(5))


def test_auroc_counts_ties_as_half() -> None:
    """Catches ties counted as wins, by which a constant score would be perfect."""
    assert [auroc([1, 1], [1, 1]), auroc([2, 3], [0, 1]), auroc([0, 2], [1, 1])] == [0.5, 1.0, 0.5]


def saved(layers: list[int]) -> Directions:
    unit = np.eye(HIDDEN, dtype=np.float32)
    by_layer = {n: Direction("post_block", n, unit[n], 8.0, 2.0, unit[0], 0.5 + n / 100) for n in layers}
    return Directions(by_layer, "the model", "mean", {"examples": "4 texts"})


def test_directions_are_shown_as_a_table() -> None:
    """Catches printed directions without their numbers, or with all of their provenance."""
    head, _, *lines = repr(saved([3, 12])).split("\n")
    assert head == "Directions at post_block, method mean"
    assert lines == ["    3   0.530       8         2    0.25", "   12   0.620       8         2    0.25"]


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_files_have_the_vectors_of_the_chosen_layers(tmp_path: Path, suffix: str) -> None:
    """Catches vectors of another layer or length, and files that do not tell how they were made."""
    path = tmp_path / f"calm.{suffix}"
    found = saved([3, 4, 5])
    found.save(path, layers=[4, found.best])
    module, metadata = read_vector_file(path)
    assert [(edit.point, edit.layers) for edit in module.base] == [("post_block", (4,)), ("post_block", (5,))]
    np.testing.assert_allclose(module.base[1].vector * module.base[1].strength, found[5].vector)
    assert metadata.model == "the model"
    loaded = Directions.load(path)
    assert list(loaded) == [4, 5] and loaded[5].distance == pytest.approx(2.0)
    np.testing.assert_allclose(loaded[5].unit, found[5].unit, atol=1e-6)
    if suffix == "gguf":
        with pytest.raises(SteeringError, match=r"the vector of post_block\[4\] does not tell"):
            loaded[4].add(0.5)
    if suffix == "safetensors":
        np.testing.assert_allclose(loaded[5].add(0.5).vector, found[5].add(0.5).vector, atol=1e-6)
        about = {"method": "mean", "examples": "4 texts", "stream": '{"4": 8.0, "5": 8.0}'}
        assert about.items() <= metadata.provenance.items()
        assert [each.auroc for each in loaded.values()] == [0.54, 0.55]
        loaded.save(path)
        assert Directions.load(path)[4].auroc == 0.54, "lost when the file is saved again"
    with pytest.raises(SteeringError, match=r"layers: has no direction of layer 9; use some of \[3, 4, 5\]"):
        found.save(path, layers=[9])


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that is lost when its successor cannot be written, and half-written files that stay."""
    path = tmp_path / "calm.safetensors"
    saved([3]).save(path)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SteeringError, match="cannot be written: No space left on device; make room"):
        saved([4]).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_edits_and_readouts_of_a_direction() -> None:
    """Catches doses in another unit, controls of another length, and probes that are not 1 and -1 at the means."""
    centre = np.full(HIDDEN, 0.5, np.float32)
    unit = np.eye(HIDDEN, dtype=np.float32)[3]
    found = Direction("post_block", 2, unit, stream=8.0, distance=2.0, centre=centre)
    edit = found.add(0.25)
    np.testing.assert_allclose(edit.strength * edit.vector, 2.0 * unit)
    readout: dict[str, Any] = found.probe()
    means = centre + unit, centre - unit
    assert [row @ readout["probe"] + readout["bias"] for row in means] == pytest.approx([1, -1])
    assert (found.clamp().low, found.clamp().high) == (0.5, 0.5)
    random = found.random(5, seed=1)
    assert all(
        np.isclose(np.linalg.norm(each.add(1.0).vector) * each.add(1.0).strength, 8) and abs(each.unit[3]) < 0.9
        for each in random
    )
    assert not np.allclose(found.random(1, seed=1)[0].unit, found.random(1, seed=2)[0].unit)
    with pytest.raises(SteeringError, match="has no midpoint"):
        Direction("post_block", 2, unit, 8.0).probe()


WELL = 'Begin these texts with another word, such as "Well, ", or use pool last, or positions='
LEAVE = '[[2, None]] (in a command, --positions "[[2, null]]")'


@pytest.mark.parametrize(
    ("pool", "long", "others", "warned"),
    [("mean", 50.0, 1.0, True), ("last", 50.0, 1.0, False), ("mean", 2.0, 1.0, False), ("mean", 50.0, 0.0, False)],
)
@pytest.mark.parametrize(
    ("token", "number", "named", "remedy"),
    [
        (1, 7, "'t0' (token 1, 50 times), 't1' (token 1, .*, 't4' (token 1, 50 times), and 2 more. ", WELL + LEAVE),
        (1, 1, "'a text of ma...than is shown' (token 1, 50 times). ", WELL + LEAVE),
        (2, 2, "'last' (token 2, 50 times), 'a text .*. ", f"{WELL}[[3, None]]"),
        (0, 1, "'a text .*. ", 'Use positions=[[1, None]] (in a command, --positions "[[1, null]]"), or pool last'),
        (4, 1, "'a text .*. ", "Change these texts, or use pool last"),
    ],
)
def test_long_rows_that_dominate_a_mean_are_told(
    pool: Pool, long: float, others: float, warned: bool, token: int, number: int, named: str, remedy: str
) -> None:
    """Catches a long row of a second token or of one text that is not told, and warnings about rows without use."""
    captured: Any = []
    first = min(token, 1)
    for text in range(7):
        rows = np.full((6, HIDDEN), others, np.float32)
        rows[token - first] = long if text >= 7 - number else others
        captured.append(
            SimpleNamespace(
                numpy=lambda point, layer, rows=rows: rows, positions=lambda *site: torch.arange(first, first + 6)
            )
        )
    texts: list[Any] = [f"t{i}" for i in range(5)]
    texts += [[{"role": "user", "content": "last"}], "a text of many more letters than is shown"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool_rows(captured, texts, "m", "post_block", [3], pool)
    assert all(each.filename == __file__ for each in caught), "the line of the caller"
    messages = [str(each.message) for each in caught]
    assert len(messages) == warned
    told = "".join(re.escape(part) if part != ".*" else part for part in re.split(r"(\.\*)", named + remedy))
    assert all(re.match(f"at layer 3, {number} of 7 texts .* from 0: {told}", each) for each in messages)


def test_a_missing_layer_names_the_layers() -> None:
    """Catches a bare number as the error."""
    given = examples(20, paired=False)
    found = Directions(made(given, rows_of(given, 2.0), "mean"), "m", "mean", {})
    with pytest.raises(KeyError, match="no direction of layer 8; use one of 7"):
        found[8]
    assert found.get(8) is None and 8 not in found
