# SPDX-License-Identifier: Apache-2.0
"""Live strengths: change a named factor of a running request's edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.outputs import live_names
from vllm_steer.spec.scalars import closest, read_number

SET_STRENGTH_RPC = "steering_set_strength"


def check_strengths(
    output_processor: Any, request_id: str, strengths: Mapping[str, Any]
) -> tuple[list[str], dict[str, float]]:
    """Return the engine's ids of a running request's samples, and the checked strengths.

    Raises:
        SteeringError: The request is not running, has no such live strength, or a strength is not a finite number.
    """
    ids = list(output_processor.external_req_ids.get(request_id, ()))
    states = [output_processor.request_states[each] for each in ids if each in output_processor.request_states]
    if not states:
        raise SteeringError("request_id", f"{request_id[:80]!r} is not a running request")
    if not strengths:
        raise SteeringError("strengths", "is empty; give a number for at least one name")
    names = live_names(states[0])
    for name in strengths:
        if name not in names:
            similar = closest(name, names)
            hint = f"did you mean {similar}?" if similar else f"its names are: {', '.join(names) or 'none'}"
            raise SteeringError(str(name)[:80], f"is not a live strength of this request; {hint}")
    return ids, {name: read_number(value, name) for name, value in strengths.items()}


def first_position(answers: Sequence[Sequence[int]]) -> int:
    """Return the position from which a change holds for every sample, from the answers of all workers."""
    return max((position for answer in answers for position in answer), default=0)
