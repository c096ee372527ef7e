# SPDX-License-Identifier: Apache-2.0
"""What was proven of a layer class, on which architecture and how: ``proofs.json``, written by ``make conformance``.

The file holds ``{"vllm": version, "rows": [row, ...]}``. Without it, or without a row for a class, there is no record.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import msgspec

FILE = "proofs.json"


class Proof(msgspec.Struct, frozen=True):
    """One model of ``tests/conformance``: its architecture, the names of its layer classes, and how far it was off.

    ``proof`` names the kind; ``value`` is the largest relative distance of a row, ``cause`` the largest difference of
    a log-probability under edits, both of a run in ``dtype``.
    """

    architecture: str
    layers: tuple[str, ...]
    proof: str
    value: float | None = None
    cause: float | None = None
    dtype: str = "float32"


class Record(msgspec.Struct, frozen=True):
    """The file: the version of vLLM that the rows are about, and the rows."""

    vllm: str
    rows: tuple[Proof, ...]


@cache
def all_proofs() -> tuple[str | None, tuple[Proof, ...]]:
    """The vLLM version of the record and its rows; None and nothing where there is no record."""
    path = files(__package__) / FILE
    if not path.is_file():
        return None, ()
    record = msgspec.json.decode(path.read_bytes(), type=Record)
    return record.vllm, record.rows


def proofs_of(architecture: str | None, layer_classes: Iterable[str]) -> list[Proof]:
    """The rows of an architecture, or, where it has none, those of its layer classes on other architectures."""
    names = {name.rpartition(".")[2] for name in layer_classes}
    about = [row for row in all_proofs()[1] if names & set(row.layers)]
    return [row for row in about if row.architecture == architecture] or about
