# SPDX-License-Identifier: Apache-2.0
"""Observe and change layers with several streams: the layers of ``mixes.py`` run in place of vLLM's.

The rows and edits of vLLM's layers with their taps must equal the rows and edits of the formulas. No module outputs the
branch of ``HookedModel``, so the difference of two points stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from tests.conformance import mixes
from tests.conformance.cases import PROMPTS, Case
from tests.conformance.edits import Rows
from tests.conformance.engine import generate
from tests.conformance.identities import HookedModel, _change

FIELDS = {"pre_attn": "x_in", "post_attn": "x_mid", "post_block": "x_out", "mlp_in": "mlp_in"}


class MixedModel(HookedModel):
    """The decoder layers of a running engine whose layers carry several streams."""

    def observe_runs(self, llm: Any) -> None:
        """Remember the engine."""
        self.llm = llm

    @contextmanager
    def watching(self) -> Iterator[list[dict[str, Any]]]:
        """Record the stream at the points of each layer, in a run of the formulas after the caller's.

        Each formula gets the input of its layer in the caller's run. Otherwise, the roundings of all layers before it
        would add up.
        """
        seen: list[dict[str, Any]] = [{} for _ in self.layers]
        # The formula of Inkling does not complete its input, so it runs behind formulas only.
        inputs: list[Any] = [] if self.tiny.recipe == "CONVOLVED" else [None] * len(self.layers)
        handles = []
        for number, layer in enumerate(self.layers if inputs else ()):

            def enter(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                # Copied, since some layers write into their input.
                inputs[number] = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))

            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

        def record(number: int, point: str, stream: torch.Tensor) -> torch.Tensor:
            seen[number][point] = stream.float().clone().cpu()
            return stream

        with self._formulas(record, inputs):
            generate(self.llm, [Case("values", PROMPTS[0])], new_tokens=1)
        for found in seen:
            for point, field in FIELDS.items():
                found[field] = found.pop(point)
            found["branch"] = found["x_mid"] - found["x_in"]

    @contextmanager
    def changed(self, point: str, number: int, rows: Rows) -> Iterator[None]:
        """Edit all tokens of all requests by the formulas."""

        def edit(layer: int, at: str, stream: torch.Tensor) -> torch.Tensor:
            return stream + _change(rows, stream) if (at, layer) == (point, number) else stream

        # Kernels and formulas round differently, so only the edited layer is a formula where its input is complete.
        with self._formulas(edit, only=None if self.tiny.recipe == "CONVOLVED" else number):
            yield

    @contextmanager
    def _formulas(self, change: Any, inputs: Sequence[Any] = (), only: int | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                if only not in (None, number):
                    continue

                def at(point: str, streams: torch.Tensor, number: int = number) -> torch.Tensor:
                    # In float32, as the formulas of edits are; a rounded difference would be added to each stream.
                    wide = streams.float()
                    if streams.dim() == 2:
                        changed: torch.Tensor = change(number, point, wide)
                        return changed.to(streams.dtype)
                    mean = wide.mean(-2)
                    return (wide + (change(number, point, mean) - mean).unsqueeze(-2)).to(streams.dtype)

                forward = mixes.LAYERS_OF[type(layer).__name__](layer, at)
                if inputs:
                    forward = _with_inputs(forward, *inputs[number])
                stack.enter_context(patch.object(layer, "forward", forward))
            yield


def _with_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that ignores its arguments and calls another one with these."""

    def with_inputs(*others: Any, **more: Any) -> Any:
        return forward(*args, **kwargs)

    return with_inputs
