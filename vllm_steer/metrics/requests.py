# SPDX-License-Identifier: Apache-2.0
"""Counting what is asked of an engine, in the front end's process."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.metrics.collectors import add
from vllm_steer.metrics.table import REFUSED_FIELDS
from vllm_steer.params import program_bytes
from vllm_steer.program import Program
from vllm_steer.program.instructions import KIND_OF

NO_ROOM = "capacity"
"""In the place of a field: the request was right, and its time to wait for room was over."""

_ROOT = re.compile(r"[.\[(]")


def count_request(model_name: str, sampling_params: Any) -> None:
    """Count one sample that the engine gets."""
    data = program_bytes(sampling_params)
    try:
        program = None if data is None else Program.from_checked(data)
    except SteeringError:  # it came around the checks; the engine ends it
        return
    asked = [] if program is None else [w for w, parts in _parts(program) if parts]
    add("requests", model_name=model_name, kind="_".join(asked) or "plain")
    if program is not None:
        for kind, number in Counter(KIND_OF[step.code] for step in program.steps).items():
            add("edits", number, model_name=model_name, kind=kind)


def _parts(program: Program) -> tuple[tuple[str, bool], ...]:
    return ("steered", bool(program.steps)), ("captured", bool(program.reads))


def count_refusal(status: int, field: str) -> None:
    """An HTTP request was refused, with what is wrong at ``field``, a path in its body."""
    root = _ROOT.split(field, maxsplit=1)[0].strip()
    # Paths can have a client's words in them; labels are those of the table.
    add("refused_requests", status=str(status), field=root if root in REFUSED_FIELDS else "other")
