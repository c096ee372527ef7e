# SPDX-License-Identifier: Apache-2.0
"""Labelled texts of a probe: without repetitions, and split so that no text is on both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.lab.examples import Examples, Source, Text, read_examples
from vllm_steer.lab.statistics import Labels, folds
from vllm_steer.request.scalars import shown

LEAST_TRAINING, LEAST_HELD_OUT = 10, 5
"""Fewest texts of each class."""
_PARTS = 3
"""One part of the texts is held out."""


@dataclass(frozen=True, eq=False)
class DistinctTexts:
    """Examples in which each text occurs once."""

    digest: str
    """Hash of the examples as they were given."""
    texts: list[Text]
    labels: Labels
    groups: npt.NDArray[np.int64]
    """Number of each text's pair, or of each text if there are no pairs."""
    numbers: list[int]
    """Number of each text among all that were given."""

    @property
    def kinds(self) -> npt.NDArray[np.int64]:
        """Kind of each text's group: with texts of one class, of the other, or of both."""
        positive, negative = (np.isin(self.groups, self.groups[each]) for each in (self.labels, ~self.labels))
        return 2 * positive + negative


def distinct_texts(examples: Source | Examples) -> DistinctTexts:
    """Return examples without repetitions.

    Raises:
        SteeringError: A text has both labels, or some texts are conversations and others are not.
    """
    read = read_examples(examples)
    first: dict[str, int] = {}
    for i, text in enumerate(read.texts):
        kept = first.setdefault(json.dumps(text, sort_keys=True), i)
        if read.labels[kept] != read.labels[i]:
            problem = f"have the text {shown(text)} with both labels; remove it, or correct one"
            raise SteeringError("examples", problem)
    chosen = list(first.values())
    texts = [read.texts[i] for i in chosen]
    if len({isinstance(text[0], dict) for text in texts}) > 1:
        raise SteeringError("examples", "have conversations and other texts; use one of the two forms")
    return DistinctTexts(read.digest, texts, read.labels[chosen], read.groups[chosen], chosen)


def split_texts(examples: Source | Examples, seed: int) -> tuple[DistinctTexts, Labels]:
    """Return examples without repetitions, and which texts are held out: a third of each class.

    Raises:
        SteeringError: The examples are not usable, or too few.
    """
    given = distinct_texts(examples)
    held_out = folds(given.groups, given.kinds, _PARTS, seed) == 0
    for name, members in (("positive", given.labels), ("negative", ~given.labels)):
        training, others = (members & ~held_out).sum(), (members & held_out).sum()
        if training < LEAST_TRAINING or others < LEAST_HELD_OUT:
            problem = f"have {training} {name} texts for training and {others} to hold out"
            least = f"give at least {LEAST_TRAINING + LEAST_HELD_OUT} different texts of each class"
            raise SteeringError("examples", f"{problem}; {least}")
    return given, held_out


def read_unseen(examples: Source | Examples, path: str | Path, provenance: Mapping[str, str]) -> DistinctTexts:
    """Return examples without repetitions, to check the probe of a file with this provenance.

    Raises:
        SteeringError: The examples are not usable, there are too few, or the probe was trained on them.
    """
    given = distinct_texts(examples)
    if provenance.get("examples", "").endswith(f"sha256 {given.digest}"):
        raise SteeringError("examples", f"are the texts that {path} was trained on; give other texts")
    if (fewest := min(given.labels.sum(), (~given.labels).sum())) < LEAST_HELD_OUT:
        problem = f"have {fewest} texts of a class; give at least {LEAST_HELD_OUT} different texts of each class"
        raise SteeringError("examples", problem)
    return given
