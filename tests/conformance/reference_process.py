# SPDX-License-Identifier: Apache-2.0
"""The HF reference in a process of its own, into which vLLM is never imported.

vLLM's Transformers backend changes HF's model classes in place: it gives them its own ``__init__`` and
``__call__``. In one process the reference would run on what it is to judge, or not at all. For the same reason
the models are built and saved here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests.conformance.edits import EditAt
from tests.conformance.hf_reference import Reference, Trace, interventions
from tests.conformance.model import LAYERS, build, save
from tests.conformance.zoo import BY_NAME

Job = tuple[Sequence[int], int, Sequence[EditAt]]
"""A whole sequence, how many of its tokens are prompt, and the request's edits."""


class ReferenceProcess:
    """Runs jobs on HF models of the zoo, by name. A context manager: the process ends with it."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_use_one_core)

    def save(self, name: str, folder: Path) -> Path:
        """Build the model and write it under ``folder``, where it is not there yet; its path."""
        return self._pool.submit(_save, name, folder).result()

    def call(self, name: str, method: str, *args: Any) -> Any:
        """A method of the model's ``Reference``; errors that it raises are raised here."""
        return self._pool.submit(_call, name, method, args).result()

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


def _save(name: str, folder: Path) -> Path:
    _check_independent()
    return save(BY_NAME[name], folder)


def _call(name: str, method: str, args: tuple[Any, ...]) -> Any:
    _check_independent()
    return getattr(_reference(name), method)(*args)


def _traces(name: str, jobs: Sequence[Job]) -> list[Trace]:
    _check_independent()
    reference = _reference(name)
    return [
        reference.run(token_ids, interventions(edits, LAYERS, prompt_len, len(token_ids)))
        for token_ids, prompt_len, edits in jobs
    ]


def _check_independent() -> None:
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is loaded in the reference process: the reference would not be independent")
