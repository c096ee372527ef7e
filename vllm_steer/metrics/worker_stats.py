# SPDX-License-Identifier: Apache-2.0
"""A worker's numbers on a step's output: how long our host code took, and what it keeps."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

_ATTRIBUTE = "steering_note"


class WorkerStats(NamedTuple):
    """Of one step that had anything to do for us."""

    seconds: float
    staging_bytes: int


def note(output: Any, about: WorkerStats | None) -> Any:
    """Put a note onto a model output; an asynchronous one gets it when it is asked for."""
    if about is None or output is None:
        return output
    if not hasattr(output, "get_output"):
        output = copy.copy(output)  # an earlier pipeline stage's is one that all steps share
        setattr(output, _ATTRIBUTE, about)
        return output
    original = output.get_output

    def get_output() -> Any:
        result = original()
        setattr(result, _ATTRIBUTE, about)
        return result

    output.get_output = get_output
    return output


def note_on(output: Any) -> WorkerStats | None:
    """The note on a model output, if there is one."""
    about: WorkerStats | None = getattr(output, _ATTRIBUTE, None)
    return about
