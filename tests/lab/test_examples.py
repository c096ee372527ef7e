# SPDX-License-Identifier: Apache-2.0
"""Examples and prompts from files and Python objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_steer import SteeringError
from vllm_steer.lab import Examples, read_examples
from vllm_steer.lab.examples import read_prompts, read_texts

PAIRS = [{"positive": f"good {i}", "negative": f"bad {i}", "id": i} for i in range(6)]
LABELLED = [{"text": f"text {i}", "label": i % 2 == 0} for i in range(8)]


def written(folder: Path, lines: list[Any]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_pairs_and_labels_are_read_alike_from_a_file_and_from_a_list(tmp_path: Path) -> None:
    """Catches swapped classes, lost keys of other tools, and a file that differs from the list of its objects."""
    pairs = read_examples(written(tmp_path, [PAIRS[0], "", *PAIRS[1:]]))
    assert pairs.texts[:2] == ("good 0", "bad 0") and pairs.labels.tolist() == [True, False] * 6 and pairs.paired
    assert pairs.digest == read_examples(PAIRS).digest != read_examples(PAIRS[:5]).digest
    labelled = read_examples([{"text": [5, 6], "label": 1}, {"text": [{"role": "user", "content": "a"}], "label": 0}])
    assert labelled.texts == ([5, 6], [{"role": "user", "content": "a"}]) and not labelled.paired
    assert labelled.labels.tolist() == [True, False] and labelled.groups.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lines", "field", "problem"),
    [
        ([], "lines.jsonl", "is empty"),
        (["{"], "lines.jsonl:1", "cannot be parsed as JSON"),
        (["3"], "lines.jsonl:1", "must be an object"),
        ([PAIRS[0], {"positive": "a"}], "lines.jsonl:2", "has no negative"),
        ([{"prompt": "a"}], "lines.jsonl:1", "has no text"),
        ([{"positive": "a", "negative": "a"}], "lines.jsonl:1", "has equal texts"),
        ([{"positive": "a", "negative": " "}], "lines.jsonl:1.negative", "must be a text"),
        ([{"positive": "a", "negative": [1, "b"]}], "lines.jsonl:1.negative", "must be a text"),
        ([{"text": "a", "label": "happy"}], "lines.jsonl:1.label", "must be true or false"),
        ([{"text": "a", "label": True}, {"text": "b", "label": 1}], "lines.jsonl", "labels of one class, true"),
        ([PAIRS[0], LABELLED[0]], "lines.jsonl", "has pairs and labelled texts"),
    ],
)
def test_bad_examples_are_refused(tmp_path: Path, lines: list[Any], field: str, problem: str) -> None:
    """Catches examples that would give a direction of nothing, or an error without its line."""
    with pytest.raises(SteeringError) as error:
        read_examples(written(tmp_path, lines))
    assert error.value.field.removeprefix(f"{tmp_path}/") == field
    assert problem in error.value.problem


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Catches an error without the name of the file."""
    with pytest.raises(SteeringError, match=r"none\.jsonl cannot be read: No such file"):
        read_examples(tmp_path / "none.jsonl")


def test_a_file_of_plain_texts_has_only_text(tmp_path: Path) -> None:
    """Catches JSON that is read as text because of the file's suffix, and a byte order mark in the first text."""
    lines = written(tmp_path, [{"text": "one"}, {"text": "two"}])
    assert [each.text for each in read_texts(lines)] == ["one", "two"]
    with pytest.raises(SteeringError, match=r"lines\.json has JSON in its lines; give it the suffix \.jsonl"):
        read_texts(lines.rename(lines.with_suffix(".json")))
    plain = tmp_path / "plain.txt"
    plain.write_bytes(b"\xef\xbb\xbf{an aside} of\r\n[1]\r\n")  # as Windows writes it
    assert [each.text for each in read_texts(plain)] == ["{an aside} of", "[1]"]


@pytest.mark.parametrize("given", [PAIRS, LABELLED])
def test_shuffled_labels_have_no_common_difference(given: list[Any]) -> None:
    """Catches a control that still contains the difference of the classes, as a random exchange of labels does."""
    examples: Examples = read_examples(given)
    shuffled = examples.shuffled(3)
    signs = np.where(examples.labels == shuffled.labels, 1, -1)
    assert sum(signs) == 0 and sum(signs[examples.labels]) == 0
    assert (shuffled.labels != examples.shuffled(4).labels).any()
    if examples.paired:
        assert (shuffled.labels[0::2] != shuffled.labels[1::2]).all()


def test_prompts(tmp_path: Path) -> None:
    """Catches prompts that are not made conversations, and lines of another form that are skipped."""
    path = written(tmp_path, ['"Hi"', {"prompt": "Ho", "id": 3}, {"messages": [{"role": "user", "content": "He"}]}])
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho", "He")]
    assert read_prompts(path) == ["Hi", "Ho", chats[2]]
    assert read_prompts(path, chat=True) == chats
    with pytest.raises(SteeringError, match=r"prompts\[1\]: has no prompt"):
        read_prompts(["a", {"text": "b"}])
    with pytest.raises(SteeringError, match="prompts: is empty"):
        read_prompts([])
