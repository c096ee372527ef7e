# SPDX-License-Identifier: Apache-2.0
"""Texts of probes whose labels depend on a planted direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tests.tiny import HIDDEN, VOCAB

LAYER = 2
RANDOM = np.random.default_rng(11)
TEXTS = [RANDOM.integers(0, VOCAB, RANDOM.integers(4, 9)).tolist() for _ in range(300)]
PLANTED = RANDOM.standard_normal(HIDDEN)
Examples: TypeAlias = list[dict[str, Any]]


def labelled(texts: Any, labels: Any) -> Examples:
    return [{"text": text, "label": bool(label)} for text, label in zip(texts, labels, strict=True)]


def written(path: Path, examples: Examples) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in examples))
    return str(path)
