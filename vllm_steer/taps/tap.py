# SPDX-License-Identifier: Apache-2.0
"""The tap: the module at a site, and the custom op through which torch.compile and CUDA graphs see it.

The op is opaque to the compiler and mutates one summand of the stream. Its site is an argument tensor (a view into the
tables), not a number or a name, so that all layers of a model trace to the same graph and share compiled code. The
tables are found at run time, in vLLM's forward context, so nothing process-global is baked into compiled code.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from vllm_steer.taps.fusion_pass import SCHEMA
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables

CONTEXT_KEY = "vllm_steer.tables"


def _summands(target: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both as ``[tokens, hidden]``: the Transformers backend runs decoder layers on ``[1, tokens, hidden]``."""
    return target.view(-1, target.shape[-1]), None if other is None else other.view(-1, other.shape[-1])


def _launches(tables: Tables, head: torch.Tensor, second: torch.Tensor | None) -> bool:
    launch = tables.active_sites
    return bool(launch[int(head.storage_offset())] or (second is not None and launch[int(second.storage_offset())]))


def _tap_cpu(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None) -> None:
    tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
    if _launches(tables, head, second):
        for each in (head,) if second is None else (head, second):
            apply_tap(*_summands(target, other), each, tables)


def _tap_fake(
    target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None
) -> None:
    return None


_library = torch.library.Library("vllm_steer", "DEF")
_library.define(SCHEMA)
_library.impl("tap", _tap_cpu, dispatch_key="CPU")
_library._register_fake("tap", _tap_fake)

if torch.version.cuda is not None:
    from vllm_steer.taps.tap_kernel import launch_tap

    def _tap_cuda(
        target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, second: torch.Tensor | None
    ) -> None:
        tables: Tables = get_forward_context().no_compile_layers[CONTEXT_KEY]
        if _launches(tables, head, second):
            launch_tap(*_summands(target, other), head, tables, second)

    _library.impl("tap", _tap_cuda, dispatch_key="CUDA")


class Tap(nn.Module):
    """Edits the stream at one site.

    ``forward(target, other)``: the stream is ``target + other`` (``other`` None: ``target`` alone); the change is added
    to ``target`` in place, before whatever consumes the two.
    """

    head: torch.Tensor

    def __init__(self, tables: Tables, site: int) -> None:
        super().__init__()
        # Not persistent: weight loaders and reloads must not see it.
        self.register_buffer("head", tables.site_head(site), persistent=False)

    def forward(self, target: torch.Tensor, other: torch.Tensor | None = None) -> None:
        torch.ops.vllm_steer.tap(target, other, self.head, None)
