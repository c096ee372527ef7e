# SPDX-License-Identifier: Apache-2.0
"""Compilation of kernels for GPUs that are not present, from their launch arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Compiled:
    """Stand-in for a kernel that compiles each launch for ``capability``."""

    def __init__(self, jit: Any, capability: int) -> None:
        self.jit, self.capability, self.sizes = jit, capability, []
        self.assembly: list[str] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(self.jit.arg_names, args, strict=False)) | kwargs
        assert list(given) == self.jit.arg_names
        signature = {
            name: "constexpr" if name in kwargs else "*" + NAMES[value.dtype] if torch.is_tensor(value) else "i32"
            for name, value in given.items()
        }
        source = ASTSource(fn=self.jit, signature=signature, constexprs=kwargs)
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        self.sizes.append(len(made.asm["cubin"]))
        self.assembly.append(made.asm["ptx"])
