# SPDX-License-Identifier: Apache-2.0
"""Weights of 4-bit floats with scales by group: NVFP4 and MXFP4, written from their formats, and kernels for a CPU.

vLLM has kernels for GPUs only. On a CPU, NVFP4 runs in the emulation that vLLM has for GPUs without such kernels, and
the format's definition replaces MXFP4's. Configuration, loading and layers are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch

Tensors = dict[str, torch.Tensor]
NUMBERS: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of a 4-bit float, by its low three bits; the fourth is the sign."""
NV_GROUP, MX_GROUP = 16, 32
_LARGEST_WEIGHT, _LARGEST_INPUT = 2.0, 64.0
_WHOLE_RANGE: Final = 6.0 * 448.0


def _codes(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the nearest 4-bit floats, and their values."""
    index = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    negative = scaled < 0
    return (index + 8 * negative).to(torch.uint8), NUMBERS[index] * torch.where(negative, -1.0, 1.0)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes, two to a byte, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()


def nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise with scales of 8-bit floats and one whole scale, which compressed-tensors stores as a divisor."""
    divisor = _WHOLE_RANGE / _LARGEST_WEIGHT
    groups = weight.float().unflatten(1, (-1, NV_GROUP))
    scales = (groups.abs().amax(-1) / 6.0 * divisor).to(torch.float8_e4m3fn)
    whole_scales = scales.float().unsqueeze(-1) / divisor
    codes, values = _codes(groups / whole_scales.clamp(min=1e-12))
    return {
        "weight_packed": _pack(codes.flatten(1)),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([divisor]),
        "input_global_scale": torch.tensor([_WHOLE_RANGE / _LARGEST_INPUT]),
    }, (values * whole_scales).flatten(1)


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise with powers of two as scales, stored as their biased exponents."""
    groups = weight.float().unflatten(1, (-1, MX_GROUP))
    exponents = (groups.abs().amax(-1) / 6.0).clamp(min=2.0**-126).log2().ceil()
    scales = torch.exp2(exponents).unsqueeze(-1)
    codes, values = _codes(groups / scales)
    return {
        "weight_packed": _pack(codes.flatten(1)),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, (values * scales).flatten(1)


def unpack_mxfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights that packed codes and exponents stand for."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    values = NUMBERS[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    grouped = values.unflatten(-1, (-1, MX_GROUP)) * torch.exp2(scales.float() - 127).unsqueeze(-1)
    whole: torch.Tensor = grouped.flatten(-2).to(dtype)
    return whole


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Let layers of 4-bit floats that are made here run on a CPU; do nothing on a GPU."""
    if torch.cuda.is_available():
        yield
        return
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp4 import emulation
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils
    from vllm.platforms.interface import PlatformEnum

    plain: Any = emulation.EmulationMxfp4LinearKernel
    nv: Any = linear._POSSIBLE_NVFP4_KERNELS
    mx: Any = linear._POSSIBLE_MXFP4_KERNELS
    with ExitStack() as stack:
        stack.enter_context(patch.dict(nv, {PlatformEnum.CPU: [linear.EmulationNvFp4LinearKernel]}))
        stack.enter_context(patch.dict(mx, {PlatformEnum.CPU: [plain]}))
        # Weights only, as Marlin computes on GPUs without instructions for 4-bit floats. Activations of 4 bits are not
        # proven: their rounding is of the size of an edit's effect.
        stack.enter_context(patch.object(plain, "can_implement", classmethod(lambda cls, config: (True, None))))
        stack.enter_context(patch.object(nvfp4_emulation_utils, "ref_nvfp4_quant_dequant", lambda x, *args, **more: x))
        stack.enter_context(patch.dict(emulation._ACTIVATION_QUANT_DEQUANT_FUNCS, clear=False))
        for key in emulation._ACTIVATION_QUANT_DEQUANT_FUNCS:
            emulation._ACTIVATION_QUANT_DEQUANT_FUNCS[key] = lambda x: x
        stack.enter_context(patch.object(emulation, "dequant_mxfp4", unpack_mxfp4))
        yield
