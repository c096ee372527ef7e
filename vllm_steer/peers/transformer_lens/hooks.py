# SPDX-License-Identifier: Apache-2.0
"""Functions of TransformerLens: user hooks of the engine, and functions at hooks of a ``RemoteBridge``, which read."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, ItemsView, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from vllm_steer import HookedRows
from vllm_steer.errors import SteeringError

Hook: TypeAlias = Callable[[HookedRows], torch.Tensor | None]


def on_prompts(function: Callable[..., Any], name: str, layer: int, count: int) -> Hook:
    """Return a user hook that calls a function of TransformerLens on the rows of prompts of ``count`` tokens."""
    by_name = _takes_hook(function)

    def hook(view: HookedRows) -> torch.Tensor | None:
        if len(view.rows) != count:
            raise ValueError("the prompt is computed in parts; raise max_num_batched_tokens of the engine")
        site_of = SimpleNamespace(name=name, layer=lambda: layer)
        rows = view.rows[None]
        found = function(rows, hook=site_of) if by_name else function(rows, site_of)
        if found is None:
            return None
        if isinstance(found, torch.Tensor) and found.shape != rows.shape:
            raise ValueError(
                f"functions get one prompt at a time and return rows of shape {list(rows.shape)}, not "
                f"{list(found.shape)}; call run_with_hooks for each prompt if their rows differ"
            )
        changed: torch.Tensor = found[0]
        return changed

    return hook


def _takes_hook(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts the argument ``hook`` by name, which is how TransformerLens passes it."""
    try:
        inspect.signature(function).bind(None, hook=None)
    except (TypeError, ValueError):  # no such argument, or a function without a signature
        return False
    return True


class ReadOnlyRows(UserDict[str, torch.Tensor]):
    """Rows by hook that a ``RemoteBridge`` passes to functions after the engine has run.

    The bridge iterates over the items and calls the module of each hook with its rows. It ignores what the functions
    return, so the iterator adds a last function to that module, which raises an error if the rows were changed.
    """

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return the items; see the class for what iteration does."""
        return _WatchedItems(self)


class _WatchedItems(ItemsView[str, torch.Tensor]):
    """Items whose rows are watched while a loop handles them."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, rows in super().__iter__():
            with _watched(name, rows):
                yield name, rows


@contextmanager
def _watched(name: str, rows: torch.Tensor) -> Iterator[None]:
    """Raise SteeringError from the module that is called with ``rows`` if its hooks change or replace them."""
    version = rows._version

    def check(module: torch.nn.Module, args: Any, output: Any) -> None:
        if rows._version != version or (output is not rows and not _equal(output, rows)):
            raise SteeringError(
                f"fwd_hooks.{name}",
                "changes rows, which has no effect: functions at hooks of a RemoteBridge run after the engine; use "
                'intervene={name: {"op": "set", "value": row, "pos": [i]}}, HookedTransformer.run_with_hooks of '
                "vllm_steer.peers.transformer_lens, or PatchingStudy for the functions of patching",
            )

    added: list[Any] = []

    def add_check(module: torch.nn.Module, args: Any) -> None:
        if args and args[0] is rows:
            added.append(module.register_forward_hook(check))  # behind the functions of the caller

    handle = torch.nn.modules.module.register_module_forward_pre_hook(add_check)
    try:
        yield
    finally:
        for each in (handle, *added):
            each.remove()


def _equal(output: Any, rows: torch.Tensor) -> bool:
    return isinstance(output, torch.Tensor) and output.shape == rows.shape and torch.equal(output, rows)
