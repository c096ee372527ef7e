# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's Triton kernels without a GPU: ``python -m tests.conformance.interpreted CALLS RESULTS``.

``CALLS`` holds a list of ``(kernel, grid, args, kwargs)``, and ``RESULTS`` gets the arguments of each call afterwards.
Triton interprets kernels only in a process that has said so before it imports Triton. The kernels are read from vLLM's
source, since importing its module takes longer than all calls.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "models/deepseek_v41/common/engram.py"
"""File of vLLM with the kernels."""


def _kernels(names: set[str], folder: Path) -> Any:
    """Return a module with vLLM's kernels of these names."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("vllm")
    text = (Path(package.origin).parent / SOURCE).read_text()
    found = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name in names]
    lines = ["import triton", "import triton.language as tl", "_SORTED_IS_CONSTEXPR = tl.constexpr(False)"]
    file = folder / "kernels.py"
    # Triton reads the source of a kernel from its file.
    file.write_text("\n\n".join([*lines, *(ast.unparse(each) for each in found)]))
    spec = importlib.util.spec_from_file_location("kernels", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _accept_any_mask() -> None:
    """Let the interpreter load by masks whose numbers are not of the type of a truth value."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def loaded(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *others)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *others)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored


def main(calls: str, results: str) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    _accept_any_mask()
    given = torch.load(calls)
    with tempfile.TemporaryDirectory() as folder:
        kernels = _kernels({name for name, *_ in given}, Path(folder))
        for name, grid, args, kwargs in given:
            getattr(kernels, name)[grid](*args, **kwargs)
    torch.save([args for _, _, args, _ in given], results)


if __name__ == "__main__":
    main(*sys.argv[1:])
