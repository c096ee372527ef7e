# SPDX-License-Identifier: Apache-2.0
"""Functions of TransformerLens as user hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from vllm_steer.taps.user_hooks import Hook, HookedRows


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
