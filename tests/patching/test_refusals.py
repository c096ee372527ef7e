# SPDX-License-Identifier: Apache-2.0
"""Refusals of a sweep, and the cells that it lists as failed."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from tests.memory import at_most
from tests.patching.fake import FakeRunner
from tests.patching.test_study import study
from vllm_steer import SteeringError
from vllm_steer.client.encoding import to_json
from vllm_steer.patching import PatchingResult, PatchingStudy, prepare
from vllm_steer.patching.axes import read_layers, read_positions
from vllm_steer.patching.file import decode, encode
from vllm_steer.patching.offline import most_reference
from vllm_steer.patching.request import StudyForm
from vllm_steer.patching.settings import read_subspaces
from vllm_steer.patching.study import SWEEP_DEFAULTS

NOISY = {"corrupt": None, "noise": 1.0, "draws": 2}
MEAN = {"corrupt": None, "ablate": "mean"}
LONG = {"corrupt": "the blue fast bus is"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({**NOISY, "subject": "red"}, {**NOISY, "subject": "car"}),
        ({**MEAN, "reference": ["the slow bus"]}, {**MEAN, "reference": ["the fast bus"]}),
        ({**LONG, "alignment": [(0, 0), (1, 1)]}, {**LONG, "alignment": [(0, 0), (2, 1)]}),
        ({"seed": 0}, {"seed": 1}),
        ({**MEAN, "seed": 0}, {**MEAN, "seed": 1}),
    ],
)
def test_a_file_of_other_sources_is_refused(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Catches cells of two subjects, references, alignments or random subspaces in one grid."""
    file = tmp_path / "study.safetensors"
    arguments: dict[str, Any] = {"file": file, "positions": [1], "subspace": np.eye(2, 8), "progress": False}
    result = study(**first).sweep(**arguments)
    study(**first).sweep(**arguments)
    with pytest.raises(SteeringError, match="another sweep"):
        study(**second).sweep(**arguments)
    if "seed" in first:
        other = study(**second).sweep(**{**arguments, "file": None})
        assert not np.array_equal(other.grid("post_block", random=True), result.grid("post_block", random=True))


def test_a_pair_without_its_corrupt_prompt_is_refused() -> None:
    """Catches a clean prompt in place of the missing corrupt one, so that no cell has an effect."""
    pairs = [("the red car is", "the blue bus is", " red", " blue"), ("the fast car is", None, " fast", " slow")]
    with pytest.raises(SteeringError, match=r"pairs\[1\].corrupt: is missing"):
        PatchingStudy(FakeRunner(), pairs=pairs)


def test_blocks_across_skipped_positions() -> None:
    """Catches blocks that fail at positions between the aligned ones, or that patch them."""
    runner = FakeRunner()
    result = study(runner, **LONG).coarse_to_fine(position_span=4, layer_span=2, keep=0.0, progress=False)
    assert result.grid("post_block").shape == (2, 2) and not np.isnan(result.grid("post_block")).any()
    patched = [r.edits[0].tokens.to_wire() for r in runner.requests if r.edits]
    assert [0, 4] in patched and not any({1, 2, 3} & set(tokens) for tokens in patched)


def test_unknown_arguments_are_refused() -> None:
    """Catches a misspelt argument that leaves its default in place."""
    with pytest.raises(SteeringError, match="strenght: unknown argument; use one of points, metric"):
        study().coarse_to_fine(strenght=0.5, progress=False)
    with pytest.raises(SteeringError, match="file: unknown argument"):
        next(study().stream(file="x"))


def test_fields_of_a_study_are_the_arguments() -> None:
    """Catches an argument of Python that a study over HTTP or in a file lacks, or that has another default there."""
    arguments = {name: each.default for name, each in signature(PatchingStudy).parameters.items() if name != "llm"}
    declared = {each.name: each.default for each in msgspec.structs.fields(StudyForm)}
    assert {**declared, "points": ("post_block",)} == {**arguments, **SWEEP_DEFAULTS}


def test_more_tokens_than_the_engine_reports_are_refused() -> None:
    """Catches a divergence over fewer tokens than were asked for."""
    runner = FakeRunner()
    runner.facts = replace(runner.facts, max_reference=4)
    with pytest.raises(SteeringError, match="kl_tokens: at most 4 with this engine; start it with max_logprobs=128"):
        study(runner).sweep(kl_tokens=5, progress=False)
    assert study(runner).sweep(metric="kl", progress=False).info.kl_tokens == 4
    assert [most_reference(1000, limit) for limit in (-1, 20, 500)] == [128, 20, 128] and most_reference(8, 20) == 8


def test_too_much_noise_is_refused_at_its_field() -> None:
    """Catches a refusal of the edit that the noise becomes, a field that the client has not sent."""
    study(**{**NOISY, "noise": 1e6}, subject="red")
    with pytest.raises(SteeringError, match=r"noise: must be at most 1e.06 deviations, not 1e.38"):
        study(**{**NOISY, "noise": 1e38}, subject="red")


@pytest.mark.parametrize(("rows", "problem"), [([0], "zero"), ([1, 1], "rank 1")])
def test_a_bad_subspace_is_refused_once(rows: list[int], problem: str) -> None:
    """Catches directions that make every cell fail."""
    runner, directions = FakeRunner(), np.zeros((len(rows), 8), np.float32)
    directions[:, 1] = rows
    with pytest.raises(SteeringError, match=problem):
        study(runner).sweep(subspace=directions, progress=False)
    assert not runner.requests


@pytest.mark.parametrize("encode", [lambda value: value, lambda value: to_json(value, "subspace")])
def test_forms_of_a_subspace(encode: Any) -> None:
    """Catches arrays of the clients, which send them packed, that are not read."""
    array = np.eye(2, 8, dtype=np.float32)
    by_site = {"post_block": {0: array, 1: torch.from_numpy(array).bfloat16()}}
    for given in (array, array.tolist(), list(array), torch.from_numpy(array).bfloat16(), by_site):
        (found,) = {
            rows.tobytes()
            for rows in (read_subspaces(encode(given), [("post_block", 0), ("post_block", 1)], 8) or {}).values()
        }
        assert found == array.tobytes()
    for wrong in ([1.0] * 8, {"post_block": {0: array}}, "abc", np.eye(2, 7)):
        with pytest.raises(SteeringError, match="subspace"):
            read_subspaces(encode(wrong), [("post_block", 0), ("post_block", 1)], 8)


def test_a_failed_control_is_no_failed_cell(tmp_path: Path) -> None:
    """Catches a cell with a value that is listed as failed because its random control failed."""
    runner, directions = FakeRunner(), np.eye(8, dtype=np.float32)[1:2]
    runner.fail = lambda r: (
        "no room" if any(e.subspace is not None and np.count_nonzero(e.subspace) > 1 for e in r.edits) else None
    )
    result = study(runner).sweep(subspace=directions, positions=[1], progress=False)
    assert not np.isnan(result.grid("post_block")).any() and not result.failed()
    assert list(result.control_errors.values()) == ["no room"] * 2
    result.save(tmp_path / "study.safetensors")
    assert PatchingResult.load(tmp_path / "study.safetensors").control_errors == result.control_errors


def test_a_sweep_continues_with_the_controls_that_it_lacks(tmp_path: Path) -> None:
    """Catches a continued sweep with control=True that reports no control, and one that runs its controls again."""
    runner, file = FakeRunner(), tmp_path / "study.safetensors"
    assert np.isnan(study().sweep(file=file, control=False, progress=False).control())
    assert study(runner).sweep(file=file, progress=False).control() < 1e-6
    assert sum(1 for request in runner.requests if request.edits) == 2
    study(runner).sweep(file=file, progress=False)
    assert sum(1 for request in runner.requests if request.edits) == 2


def test_files_that_are_not_sweeps(tmp_path: Path) -> None:
    """Catches an error that shows a key, or that confuses another version with a damaged file."""
    save_file({"cells": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(SteeringError, match="has no patching study in its metadata"):
        PatchingResult.load(tmp_path / "other.safetensors")
    result = study().sweep(progress=False)
    result.cells = result.cells[:, :, :1]
    result.save(tmp_path / "damaged.safetensors")
    with pytest.raises(SteeringError, match="is damaged: cells has shape"):
        PatchingResult.load(tmp_path / "damaged.safetensors")
    for name in ("clean", "corrupt", "controls", "random"):
        result = study().sweep(progress=False)
        setattr(result, name, np.zeros(3))
        with pytest.raises(SteeringError, match=rf"is damaged: {name} has shape \[3\]"):
            decode(encode(result), "answer")
    result.info = msgspec.structs.replace(result.info, version=9)
    result.save(tmp_path / "later.safetensors")
    with pytest.raises(SteeringError, match="has version 9 of the format"):
        PatchingResult.load(tmp_path / "later.safetensors")


def test_errors_name_the_accepted_forms() -> None:
    """Catches errors on positions that leave out the text form, and one text too few for the pairs."""
    with pytest.raises(SteeringError, match=r'or \{"span": "Eiffel Tower"\}'):
        read_positions(["x"], ["a", "b"])
    with pytest.raises(SteeringError) as error:
        read_layers([[2, 2]], 4)
    assert "start must be below stop, and both must be between 0 and 4" in str(error.value)
    assert "Eiffel" not in str(error.value)
    with pytest.raises(SteeringError, match=r"give one text, or \[start, stop\]"):
        study(**NOISY, subject=["red", "car"]).sweep(progress=False)
    with pytest.raises(SteeringError, match="metric='logit_diff'; run it with your function as metric"):
        study().sweep(progress=False).grid("post_block", "custom")


def test_a_text_without_tokenizer_names_its_field() -> None:
    """Catches an error that blames `clean` for another field."""
    runner = FakeRunner()

    def encode(text: str, special: bool) -> list[int]:
        raise SteeringError("study", "is a text, but the engine was started without a tokenizer")

    runner.encode = encode  # type: ignore[method-assign]
    with pytest.raises(SteeringError, match="foil: is a text"):
        study(runner, clean=[0, 1], corrupt=[0, 2], answer=[1], foil=" blue")


@pytest.mark.parametrize(
    "arguments",
    [
        {"positions": [[0, 2000]] * 3000},
        {"positions": [[i, i + 1] for i in range(2000)] * 3, "position_window": 10**9},
        {"positions": [[0, 2000]] * 70_000},
        {"layers": [[0, 2]] * 70_000},
    ],
)
def test_columns_that_would_fill_the_memory_are_refused(arguments: dict[str, Any]) -> None:
    """Catches lists of many long spans, which a server would write out before it checks the study's size."""
    runner = FakeRunner()
    words = {"clean": "the red" + " car" * 1998, "corrupt": "the blue" + " car" * 1998}
    with pytest.raises(SteeringError, match=r"positions in all; use fewer|list 1 to 65536") as refused, at_most(1024):
        study(runner, **words).sweep(progress=False, **arguments)
    assert refused.value.field in arguments
    assert not hasattr(runner, "reserved")


def test_the_columns_of_all_pairs_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a limit that many pairs with the same columns pass, and one that refuses what is below it."""
    pairs = [("the red car is", "the blue bus is", " red", " blue")] * 3
    monkeypatch.setattr(prepare, "MAX_STUDY_POSITIONS", 12)
    assert PatchingStudy(FakeRunner(), pairs=pairs).sweep(progress=False).grid("post_block").shape == (2, 4)
    with pytest.raises(SteeringError, match="more than 12 positions"):
        PatchingStudy(FakeRunner(), pairs=[*pairs, pairs[0]]).sweep(progress=False)


def test_many_reference_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a forward pass for each prompt of a list of any length."""
    monkeypatch.setattr(prepare, "MAX_STUDY_PAIRS", 2)
    assert study(FakeRunner(), **MEAN, reference=["the slow bus"] * 2).sweep(progress=False).cells.size
    with pytest.raises(SteeringError, match="reference: has 3 prompts; a study has at most 2"):
        study(FakeRunner(), **MEAN, reference=["the slow bus"] * 3).sweep(progress=False)


@pytest.mark.parametrize("positions", [[0, 0, 1, 1], [True, False, True], np.array([False, True, True])], ids=repr)
def test_masks_are_no_positions(positions: Any) -> None:
    """Catches a mask that becomes columns for the positions 0 and 1."""
    with pytest.raises(SteeringError, match="for a mask, list the numbers of its entries"):
        read_positions(positions, ["a", "b", "c", "d"])
    with pytest.raises(SteeringError, match="repeats layer 2; name each layer once"):
        read_layers([2, 3, 2], 4)


def test_texts_that_are_not_unicode_are_refused() -> None:
    """Catches a tokenizer's TypeError, and a codec's message without the field."""
    for field in ("clean", "corrupt", "answer"):
        given = {"clean": "the red", "corrupt": "the blue", "answer": "car", field: "the \ud800"}
        with pytest.raises(SteeringError, match="half of a surrogate pair at character 4") as refused:
            PatchingStudy(FakeRunner(), **given)
        assert refused.value.field == field


def test_pairs_are_counted_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a hundred thousand pairs that are tokenised and then refused."""
    runner = FakeRunner()
    monkeypatch.setattr(runner, "encode", lambda *_: pytest.fail("a prompt was tokenised"))
    with pytest.raises(SteeringError, match="a study has at most 16384") as refused:
        PatchingStudy(runner, pairs=[("a", "b", "c", "d")] * 16385)
    assert refused.value.field == "pairs"


def test_a_file_with_a_dtype_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    """Catches a TypeError for a file of bfloat16 tensors."""
    path = tmp_path / "study.safetensors"
    save_tensors({"clean": torch.zeros(2, dtype=torch.bfloat16)}, path)
    with pytest.raises(SteeringError, match="not a file of a patching study"):
        PatchingResult.load(path)
