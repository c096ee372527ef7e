# SPDX-License-Identifier: Apache-2.0
"""Taps on the branches in wrong places, for those tests that must tell them from right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def other_summand(branch: Any, stream: Any) -> Callable[..., None]:
    """In the place of ``install._with_branch``: the branch's tap is on the residual."""

    def stand(residual: Any, hidden: Any) -> None:
        if branch is not None:
            branch(residual)
        stream(residual, hidden)

    return stand


def behind_the_stream(branch: Any, stream: Any) -> Callable[..., None]:
    """``add`` comes out right; what the point on the stream reads, or takes out, has not got it."""

    def stand(residual: Any, hidden: Any) -> None:
        stream(residual, hidden)
        if branch is not None:
            branch(hidden)

    return stand


def copied(forward: Any, tap: Any) -> Callable[..., Any]:
    """In the place of ``install._tap_output``: values are right, and nobody computes with the edits."""

    def steered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        tap((out[0] if isinstance(out, tuple) else out).clone())
        return out

    return steered
