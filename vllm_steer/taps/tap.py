# SPDX-License-Identifier: Apache-2.0
"""The tap: the module at a site, and its custom op.

The op is opaque to torch.compile and mutates the summands of the stream. It receives its site as a tensor, a view of
the tables, instead of a number or name, so all layers of a model trace to the same graph and share compiled code. At
run time it finds the tables in vLLM's forward context, so compiled code refers to no global state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm_steer.compat.internals import get_forward_context
from vllm_steer.taps.fusion_pass import SCHEMA
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.user_hooks import UserHooks

CONTEXT_KEY = "vllm_steer.tables"


def _summands(target: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return both as ``[tokens, hidden]``. The Transformers backend runs layers on ``[1, tokens, hidden]``."""
    return target.view(-1, target.shape[-1]), None if other is None else other.view(-1, other.shape[-1])


def _launches(tables: Tables, head: torch.Tensor, second: torch.Tensor | None) -> bool:
    """Return whether one of the sites is active."""
    active = tables.active_sites
    return bool(active[tables.column_at(head)] or (second is not None and active[tables.column_at(second)]))


def _run_with_hooks(
    hooks: UserHooks,
    apply: Callable[..., None],
    target: torch.Tensor,
    other: torch.Tensor | None,
    head: torch.Tensor,
    second: torch.Tensor | None,
) -> None:
    """Run the user hooks of each site and then its instructions."""
    tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
    summands = _summands(target, other)
    for each in (head,) if second is None else (head, second):
        hooks.run(tables.column_at(each), *summands)
        if _launches(tables, each, None):
            apply(*summands, each, tables)


def _tap_cpu(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None) -> None:
    tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
    if tables.hooks is not None:
        _run_with_hooks(tables.hooks, apply_tap, target, other, head, second)
    elif _launches(tables, head, second):
        for each in (head,) if second is None else (head, second):
            apply_tap(*_summands(target, other), each, tables)


def _tap_fake(
    target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None
) -> None:
    return None


def _tap_mean(streams: torch.Tensor, head: torch.Tensor, apply: Callable[..., None]) -> None:
    """Run a site on the mean of several streams ``[tokens, streams, hidden]`` and add its change to each of them."""
    tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
    hooks = tables.hooks
    if hooks is None and not _launches(tables, head, None):
        return
    mean = streams.mean(dim=-2)
    before = mean.clone()
    if hooks is None:
        apply(mean, None, head, tables)
    else:
        _run_with_hooks(hooks, apply, mean, None, head, None)
    streams.add_((mean - before).unsqueeze(-2))


def _tap_mean_cpu(streams: torch.Tensor, head: torch.Tensor) -> None:
    _tap_mean(streams, head, apply_tap)


def _tap_mean_fake(streams: torch.Tensor, head: torch.Tensor) -> None:
    return None


_library = torch.library.Library("vllm_steer", "DEF")
_library.define(SCHEMA)
_library.impl("tap", _tap_cpu, dispatch_key="CPU")
_library._register_fake("tap", _tap_fake)
_library.define("tap_mean(Tensor(a!) streams, Tensor head) -> ()")
_library.impl("tap_mean", _tap_mean_cpu, dispatch_key="CPU")
_library._register_fake("tap_mean", _tap_mean_fake)

if torch.version.cuda is not None:
    from vllm_steer.taps.tap_kernel import launch_tap

    def _tap_cuda(
        target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None
    ) -> None:
        tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
        if tables.hooks is not None:
            _run_with_hooks(tables.hooks, launch_tap, target, other, head, second)
        elif _launches(tables, head, second):
            launch_tap(*_summands(target, other), head, tables, second)

    def _tap_mean_cuda(streams: torch.Tensor, head: torch.Tensor) -> None:
        _tap_mean(streams, head, launch_tap)

    _library.impl("tap", _tap_cuda, dispatch_key="CUDA")
    _library.impl("tap_mean", _tap_mean_cuda, dispatch_key="CUDA")


class Tap(nn.Module):
    """Module that edits and captures the stream at one site.

    Args:
        tables: The rank's device tables.
        column: Column of the site in the tables.
    """

    head: torch.Tensor

    def __init__(self, tables: Tables, column: int) -> None:
        super().__init__()
        # Not persistent, so that weight loaders ignore it.
        self.register_buffer("head", tables.head_column(column), persistent=False)

    def forward(self, target: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Apply the edits to the stream in place, ahead of the module that consumes it.

        Args:
            target: ``[tokens, hidden]`` in the model's dtype; becomes the stream of edited tokens.
            other: The stream's second summand, which becomes zero there; None if ``target`` is the whole stream.
        """
        torch.ops.vllm_steer.tap(target, other, self.head, None)

    def mean(self, streams: torch.Tensor) -> None:
        """Apply the edits to the mean of several streams in place: each stream changes by as much as the mean.

        Args:
            streams: ``[tokens, streams, hidden]`` in the model's dtype.
        """
        torch.ops.vllm_steer.tap_mean(streams, self.head)

    def is_active(self) -> bool:
        """Return whether the current step runs this site. Only for models that vLLM does not compile."""
        tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
        return tables.hooks is not None or _launches(tables, self.head, None)
