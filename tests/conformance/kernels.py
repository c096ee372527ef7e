# SPDX-License-Identifier: Apache-2.0
"""Replacements for parts that vLLM's CPU build lacks and that some tiny models need.

Mamba 1's recurrence has only GPU kernels; its published formula replaces them. Some models import torchvision or
torchaudio to prepare images or sound; empty stubs replace them if not installed, since no test sends either. CPU
attention takes the bias of Step 1 without its square root: the result of attention does not affect where the stream is,
and both sides of the identities use the same one. Slips of vLLM 0.32 that keep models from starting are mended
(``_slips``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock, patch

import torch
from torch.nn import functional

from tests.conformance import stand_ins
from tests.conformance.namespaces import without_namespace

_STUBBED: Final = ("torchvision", "torchaudio")
"""Packages to stub if they are not installed."""


@contextmanager
def media_stubs() -> Iterator[None]:
    """Make imports of torchvision and torchaudio, and of any part, succeed with empty stubs if not installed."""
    from transformers.utils import is_torchaudio_available, is_torchvision_available

    # Transformers caches the answers; let it see the real ones.
    is_torchvision_available()
    is_torchaudio_available()
    finder = _StubFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StubModule)]:
            del sys.modules[name]


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the stubs; comes last, so installed modules are found first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in _STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


@contextmanager
def cpu_kernels(model_class: str | None = None) -> Iterator[None]:
    """Let engines that start here call the functions below for missing kernels; do nothing on a GPU.

    Args:
        model_class: The class of the model, ``module:name``, if ``stand_ins.py`` replaces its mixers.
    """
    from vllm import _custom_ops

    if hasattr(torch.ops._C, "selective_scan_fwd"):
        yield
        return
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    product, convolve = _custom_ops.onednn_mm, causal_conv1d.causal_conv1d_update_cpu_vec
    replacements = (
        (_custom_ops, "selective_scan_fwd", _selective_scan),
        (_custom_ops, "selective_state_update_cpu", _for_mamba_1(_custom_ops.selective_state_update_cpu)),
        # These require contiguous rows, and Mamba 1 passes columns.
        (_custom_ops, "onednn_mm", lambda handler, x, bias: product(handler, x.contiguous(), bias)),
        (causal_conv1d, "causal_conv1d_update_cpu_vec", lambda x, *args: convolve(x.contiguous(), *args)),
        (CPUAttentionBackendImpl, "__init__", _without_extras(CPUAttentionBackendImpl.__init__)),
        (CPUAttentionBackend, "supports_alibi_sqrt", classmethod(lambda cls: True)),
    )
    others = () if model_class is None else stand_ins.replacements(model_class.partition(":")[0])
    with ExitStack() as stack:
        for owner, name, function in (*replacements, *_slips(), *others):
            stack.enter_context(patch.object(owner, name, function, create=True))
        yield


def _slips() -> Iterator[tuple[Any, str, Any]]:
    """Yield what the loaded models of vLLM 0.32 lack, as the owner, the name and the value.

    Ernie 4.5 VL's rotary embedding takes one argument less than the CPU's calls pass, Intern-S1-Pro reads an attribute
    that it never sets, and the search for Triton kernels in all modules takes llvmlite's library for a namespace.
    """
    from vllm.config import get_current_vllm_config

    if found := sys.modules.get("vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope"):
        rotary: Any = found.Ernie4_5_VLRotaryEmbedding
        yield rotary, "forward_cpu", lambda self, *args: self.forward_native(*args[:3])
    if found := sys.modules.get("llvmlite.binding.ffi"):
        library: Any = type(found.lib)
        yield library, "__getattr__", without_namespace(library.__getattr__)
    if found := sys.modules.get("vllm.model_executor.models.interns1_pro"):
        model: Any = found.InternS1ProForConditionalGeneration
        yield model, "model_config", property(lambda self: get_current_vllm_config().model_config)


def _for_mamba_1(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap the one-token step of a state space: vLLM's has one decay per head, Mamba 1 one per state."""

    def step(
        state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, softplus: Any, *more: Any
    ) -> None:
        if state.dim() == 4:
            update(state, x, dt, a, b, c, d, z, bias, softplus, *more)
            return
        # One column; a block-wise cache of states would have more.
        slots, written, out = more[0].flatten(), more[1].flatten(), more[3]
        time = functional.softplus(dt.float() + bias.float()) if softplus else dt.float() + bias.float()
        grown = (time[..., None] * a).exp() * state[slots].float()
        new = grown + (time * x.float())[..., None] * b.float()[:, None]
        state[written] = new.to(state.dtype)
        rows = (new * c.float()[:, None]).sum(-1) + d.float() * x.float()
        out.copy_(rows * functional.silu(z.float()))

    return step


def _without_extras(attention: Callable[..., None]) -> Callable[..., None]:
    """Wrap an attention's ``__init__`` to accept the arguments that vLLM passes to GPU backends only."""

    def make(self: Any, *args: Any, chunk_lookback: int = -1, use_alibi_sqrt: bool = False, **more: Any) -> None:
        if chunk_lookback != -1:
            raise ValueError(f"chunk_lookback={chunk_lookback}: attention by chunks needs a GPU; mark the row gpu_only")
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
    """Compute ``h(t) = exp(delta a) h(t-1) + delta b u``, ``y = c h + d u``, gated by ``silu(z)``, for each request.

    ``u``, ``delta`` and ``z`` are ``[width, tokens]``, ``a`` ``[width, states]``, ``b`` and ``c``
    ``[1, states, tokens]``. Writes the result to ``z`` or, without it, to ``delta``, and the last state to the cache.
    """
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[request])
        state = ssm_states[slot].float() * bool(has_initial_state[request])
        for token in range(start, end):
            step = delta[:, token].float() + (0.0 if delta_bias is None else delta_bias.float())
            step = functional.softplus(step) if delta_softplus else step
            value = u[:, token].float()
            state = (step[:, None] * a).exp() * state + (step * value)[:, None] * b[0, :, token].float()
            out = state @ c[0, :, token].float() + (0.0 if d is None else d.float() * value)
            if z is None:
                delta[:, token] = out
            else:
                z[:, token] = out * functional.silu(z[:, token].float())
        ssm_states[slot] = state
