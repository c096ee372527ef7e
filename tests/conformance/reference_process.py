# SPDX-License-Identifier: Apache-2.0
"""The HF reference in a separate process that never imports vLLM.

vLLM's Transformers backend replaces ``__init__`` and ``__call__`` of HF's model classes in place. In the same process
the reference would run the code that it has to judge, or not run at all. The models are built and saved here for the
same reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests.conformance.altup import AltUpReference
from tests.conformance.edits import EditAt
from tests.conformance.hf_reference import Reference, Trace, interventions
from tests.conformance.model import LAYERS, build, save
from tests.conformance.zoo import BY_NAME

Job = tuple[Sequence[int], int, Sequence[EditAt]]
"""A whole sequence, the number of its prompt tokens, and the request's edits."""


class ReferenceProcess:
    """Runs jobs on HF models of the zoo, by name. A context manager that ends the process."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_use_one_core)

    def save(self, name: str, folder: Path) -> Path:
        """Build and save the model under ``folder`` unless it is there; return its path."""
        return self._pool.submit(_save, name, folder).result()

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of the model's ``Reference``; its errors are raised here."""
        return self._pool.submit(_call, name, method, args).result()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a module that does not import vLLM; its errors are raised here."""
        return self._pool.submit(_run, function, args).result()

    def traces(self, name: str, jobs: Sequence[Job]) -> list[Trace]:
        """Return one trace per job; errors of the reference are raised here."""
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
    kind = AltUpReference if BY_NAME[name].recipe == "ALTUP" else Reference
    return kind(BY_NAME[name], build(BY_NAME[name]))


def _save(name: str, folder: Path) -> Path:
    _check_independent()
    return save(BY_NAME[name], folder)


def _call(name: str, method: str, args: tuple[Any, ...]) -> Any:
    _check_independent()
    return getattr(_reference(name), method)(*args)


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _check_independent()
    return function(*args)


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
