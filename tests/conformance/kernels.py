# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU build lacks and a tiny model needs on the way to its blocks, which are what is proven here.

Mamba 1's recurrence is in kernels for a GPU: its published formula stands in for them. Some models import torchvision
to prepare pictures: where it is not installed, empty names stand in for it, since no picture is sent. Attention on the
CPU takes the bias of Step 1 without its square root: what attention computes plays no part in where the stream is, and
both sides of the identities have it so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.nn import functional


@contextmanager
def torchvision_in_name() -> Iterator[None]:
    """``import torchvision`` and any part of it gives empty names, unless it is installed."""
    from transformers.utils import is_torchvision_available

    # Transformers looks once, and is to see what is installed.
    is_torchvision_available()
    finder = _Names()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


class _Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: what is installed is found before."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Engines that start here call the functions below where vLLM's build has no kernel; nothing changes on a GPU."""
    from vllm import _custom_ops

    if hasattr(torch.ops._C, "selective_scan_fwd"):
        yield
        return
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    product, convolve = _custom_ops.onednn_mm, causal_conv1d.causal_conv1d_update_cpu_vec
    instead = (
        (_custom_ops, "selective_scan_fwd", _selective_scan),
        (_custom_ops, "selective_state_update_cpu", _for_mamba_1(_custom_ops.selective_state_update_cpu)),
        # These take rows only, and Mamba 1 gives them columns.
        (_custom_ops, "onednn_mm", lambda handler, x, bias: product(handler, x.contiguous(), bias)),
        (causal_conv1d, "causal_conv1d_update_cpu_vec", lambda x, *args: convolve(x.contiguous(), *args)),
        (CPUAttentionBackendImpl, "__init__", _without_extras(CPUAttentionBackendImpl.__init__)),
        (CPUAttentionBackend, "supports_alibi_sqrt", classmethod(lambda cls: True)),
    )
    with ExitStack() as stack:
        for owner, name, function in instead:
            stack.enter_context(patch.object(owner, name, function))
        yield


def _for_mamba_1(update: Callable[..., None]) -> Callable[..., None]:
    """A state space's step of one token per request: vLLM's has one decay per head, and Mamba 1 one per state."""

    def step(
        state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, softplus: Any, *more: Any
    ) -> None:
        if state.dim() == 4:
            update(state, x, dt, a, b, c, d, z, bias, softplus, *more)
            return
        # A column of numbers, which a cache of states by blocks would make wider.
        slots, written, out = more[0].flatten(), more[1].flatten(), more[3]
        time = functional.softplus(dt.float() + bias.float()) if softplus else dt.float() + bias.float()
        grown = (time[..., None] * a).exp() * state[slots].float()
        new = grown + (time * x.float())[..., None] * b.float()[:, None]
        state[written] = new.to(state.dtype)
        rows = (new * c.float()[:, None]).sum(-1) + d.float() * x.float()
        out.copy_(rows * functional.silu(z.float()))

    return step


def _without_extras(attention: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, *args: Any, chunk_lookback: int = -1, use_alibi_sqrt: bool = False, **more: Any) -> None:
        if chunk_lookback != -1:
            raise NotImplementedError("attention by chunks on a CPU")
        attention(self, *args, **more)

    return make


@torch.no_grad()
def _selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    ssm_states: torch.Tensor,
    *others: Any,
) -> None:
    """``h(t) = exp(delta a) h(t-1) + delta b u``, ``y = c h + d u``, gated by ``silu(z)``, request by request.

    ``u``, ``delta`` and ``z`` are ``[width, tokens]``, ``a`` ``[width, states]``, ``b`` and ``c``
    ``[1, states, tokens]``. The result goes into ``z``, without it into ``delta``, the last state into the cache.
    """
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[request])
        state = ssm_states[slot].float() * bool(has_initial_state[request])
        for token in range(start, end):
            step = delta[:, token].float() + (0.0 if delta_bias is None else delta_bias.float())
            step = functional.softplus(step) if delta_softplus else step
            entered = u[:, token].float()
            state = (step[:, None] * a).exp() * state + (step * entered)[:, None] * b[0, :, token].float()
            out = state @ c[0, :, token].float() + (0.0 if d is None else d.float() * entered)
            if z is None:
                delta[:, token] = out
            else:
                z[:, token] = out * functional.silu(z[:, token].float())
        ssm_states[slot] = state
