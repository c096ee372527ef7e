# SPDX-License-Identifier: Apache-2.0
"""The HF reference in a process of its own, into which vLLM is never imported.

vLLM's Transformers backend changes HF's model classes in place (it gives them its own ``__init__`` and ``__call__``), so
in one process the reference would run on what it is to judge.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from types import TracebackType

import torch

from tests.conformance.edits import EditAt
from tests.conformance.hf_reference import Reference, Trace, interventions
from tests.conformance.zoo import BY_NAME, LAYERS, build

Job = tuple[Sequence[int], int, Sequence[EditAt]]
"""A whole sequence, how many of its tokens are prompt, and the request's edits."""


class ReferenceProcess:
    """Runs jobs on HF models of the zoo, by name. A context manager: the process ends with it."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_use_one_core)

    def traces(self, name: str, jobs: Sequence[Job]) -> list[Trace]:
        """One trace per job; errors of the reference are raised here."""
        return self._pool.submit(_traces, name, jobs).result()

    def __enter__(self) -> ReferenceProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _use_one_core() -> None:
    torch.set_num_threads(1)


@cache
def _reference(name: str) -> Reference:
    return Reference(BY_NAME[name], build(BY_NAME[name]))


def _traces(name: str, jobs: Sequence[Job]) -> list[Trace]:
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is loaded in the reference process: the reference would not be independent")
    reference = _reference(name)
    return [
        reference.run(token_ids, interventions(edits, LAYERS, prompt_len, len(token_ids)))
        for token_ids, prompt_len, edits in jobs
    ]
