# SPDX-License-Identifier: Apache-2.0
"""Room for the Python frames of a step.

CPython keeps the frames of a thread in chunks of 16 KiB. A call whose frame does not fit takes a new chunk from the
operating system, and gives it back when it returns (``push_chunk`` and ``_PyThreadState_PopFrame`` in CPython's
``Python/pystate.c``, 3.11 to 3.13). The compiled ``forward`` of a model has frames of several KiB: a local for each
weight, and for each value that passes from one piece of a CUDA graph to the next. With many layers the end of the
chunk can fall within the calls that these frames make, and then every attention call maps memory, has a page fault and
unmaps the memory. Taps add locals, so they can move the end there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SLOTS = 32_768 - 1_000 + 1
"""Slots, of 8 bytes, in the frame of :func:`run_loop`. CPython doubles the size of a chunk until the frame and 1,000
slots fit, so this takes a chunk of 65,536 slots, of which about half are free for the frames of a step. Pages that no
frame touches take no memory."""


def run_loop(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a busy loop of vLLM in a chunk of Python's stack that holds all frames of a step."""
    return original(*args, **kwargs)


run_loop.__code__ = run_loop.__code__.replace(co_stacksize=_SLOTS)
