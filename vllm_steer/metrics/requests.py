# SPDX-License-Identifier: Apache-2.0
"""Metrics of requests, counted in the front end's process."""

from __future__ import annotations

import re
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.metrics.collectors import add
from vllm_steer.metrics.definitions import REFUSED_FIELDS
from vllm_steer.params import program_bytes
from vllm_steer.program import Program

NO_CAPACITY = "capacity"
"""Value of the label ``field`` for a valid request that timed out while it waited for capacity."""

_PATH_SEPARATOR = re.compile(r"[.\[(]")


def count_request(model_name: str, sampling_params: Any) -> None:
    """Count a sample that was given to the engine, and its edits."""
    data = program_bytes(sampling_params)
    try:
        program = None if data is None else Program.from_trusted_bytes(data)
    except SteeringError:
        # The engine refuses malformed programs that bypass the front end's checks.
        return
    if program is None:
        add("requests", model_name=model_name, kind="plain")
        return
    kind = "_".join(name for name, parts in (("steered", program.edits), ("captured", program.captures)) if parts)
    add("requests", model_name=model_name, kind=kind or "plain")
    for key, kinds in program.kinds.items():
        for each, count in kinds.items():
            add(key, count, model_name=model_name, kind=each)


def count_gates(model_name: str, covered: int, opened: int) -> None:
    """Count the tokens that gated edits of a finished sample covered, and those with a factor other than 0."""
    if covered:
        add("gated_tokens", opened, model_name=model_name, gate="open")
        add("gated_tokens", covered - opened, model_name=model_name, gate="closed")


def count_refusal(status: int, field: str) -> None:
    """Count a refused HTTP request.

    Args:
        status: HTTP status of the response.
        field: Path of the field that is wrong. Paths may contain text from the client, so the label is the path's first
            part if it is a known field, otherwise "other".
    """
    root = _PATH_SEPARATOR.split(field, maxsplit=1)[0].strip()
    add("refused_requests", status=str(status), field=root if root in REFUSED_FIELDS else "other")
