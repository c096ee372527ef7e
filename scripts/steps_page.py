# SPDX-License-Identifier: Apache-2.0
"""Sections of the performance pages about GPU steps: kernels, profiles, forward passes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measured import read

MakeTable = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

_NUMBER = re.compile(r"_\d+$")
_PRODUCTS = ("_products_kernel", "gemm_f32f32", "direct_copy_k", "at::native::reduce_kernel<128, 4")
"""Name parts of the kernels of projections, which stock vLLM's greedy step does not run."""

KERNELS = """
## Kernels and copies of a step

Every kernel and copy of {steps} decode steps at batch {batch}, listed by the profiler inside the graphs (`python -m
benchmarks.kernels`, {shape}, `benchmarks/results/{name}`), and what differs from stock vLLM's list of {count} per step.
The compiler numbers its kernels in the order in which it makes them; the numbers are left out here.

"""

PLAIN_CODE = """
## Kernels with plain code

With plain code (`--steering-plain-code`, the default on a GPU), an idle step runs a second compilation of the model,
which has no taps. Its list, compared with stock vLLM's:

"""

TIMELINE = """
## Time of a step, {title}

Steps of {batch} requests, {shape}, medians in milliseconds by the profiler (`python -m benchmarks.timeline`, {gpu};
`benchmarks/results/{name}`):
how long the stream that samples was busy in a step, how long it had nothing to do, and how long any other stream was
busy. *Taps* and *products* are what their kernels take of it.

"""

SECOND_STREAM = """
## Kernels on a second stream

What the forward pass of a full decode step took, in milliseconds (median, tenth and nine tenths), in one engine that
did these one after another (`benchmarks/results/{name}`, {shape} at batch {batch}, {gpu}). From
the first copies that ran on a second stream on, every forward pass is slower, steps with nothing to do among them.

"""

COMPILED = """
## Kernels that the compiler makes of taps

Kernels that Inductor makes of the decoder of a model of {layers} layers, for a CPU (`python -m benchmarks.compiled`,
torch {torch}, vLLM {vllm}, `benchmarks/results/{name}`). The op of a tap is none of them; it keeps the compiler
from making one kernel of what is ahead of it and what is behind it. *Plain*: what `--steering-plain-code` runs in idle
steps.

"""


def kernels_of(name: str, table: MakeTable) -> str:
    """Return the section on the kernels of steps that have taps."""
    result = read(name)
    steps = result["steps"]
    count = sum(number for stream in result["stock"] for number in stream[1::2]) // steps
    changed = {variant: Counter[str]() for variant in result["variants"]}
    for variant, found in result["variants"].items():
        for kernel, number in found["difference"].items():
            changed[variant][_NUMBER.sub("", kernel)] += number
    rows = [
        (variant, f"`{kernel}`", f"{number / steps:+g}")
        for variant, kernels in changed.items()
        for kernel, number in sorted(kernels.items())
        if number
    ]
    about = {"name": name, "count": count, **result}
    return KERNELS.format(**about) + table(("step", "kernel", "per step"), rows)


def plain_code_kernels(names: Sequence[str], table: MakeTable) -> str:
    """Return the comparison of idle steps with stock vLLM's under ``--steering-plain-code``, for each shape."""
    rows = [
        (
            result["shape"],
            result["environment"]["gpu"].removeprefix("NVIDIA "),
            str(sum(number for stream in result["stock"] for number in stream[1::2]) // result["steps"]),
            "equal" if result["variants"]["idle"]["equal"] else "different",
            f"`{name}`",
        )
        for name in names
        for result in [read(name)]
    ]
    return PLAIN_CODE + table(("shape", "GPU", "kernels and copies per step", "idle step", "result"), rows)


def spent_on_taps_and_products(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return the milliseconds per step in the kernels of taps and in those of projections."""
    more = found["more kernels"]
    return (
        sum(spent for name, spent in more.items() if "_tap_kernel" in name),
        sum(spent for name, spent in more.items() if any(part in name for part in _PRODUCTS)),
    )


def timeline(name: str, table: MakeTable) -> str:
    """Return the section on the time of a step, from a result of ``timeline.py``."""
    result = read(name)
    rows = [
        (variant, *(f"{found[what]:.3f}" for what in ("step", "busy", "idle", "others")),
         *(f"{spent:.3f}" if spent else "" for spent in spent_on_taps_and_products(found)))
        for variant, found in result["variants"].items()
    ]  # fmt: skip
    about = {"title": result["shape"], **result, **result["environment"], "name": name}
    return TIMELINE.format(**about) + table(
        ("step", "takes", "busy", "nothing to do", "other streams", "taps", "products"), rows
    )


def second_stream(name: str, table: MakeTable) -> str:
    """Return the section on forward passes after kernels on a second stream."""
    result = read(name)
    rows = [
        (run["what"], run["streams"], "{median:.2f} ({tenth:.2f} to {nine tenths:.2f})".format(**run["forward_ms"]))
        for run in result["runs"]
    ]
    return SECOND_STREAM.format(**result, **result["environment"], name=name) + table(
        ("what", "captured rows", "forward"), rows
    )


def compiled(name: str, table: MakeTable) -> str:
    """Return the section on generated kernels, from a result of ``compiled.py``."""
    result = read(name)
    rows = [
        (name, str(stock), str(tapped), str(both - tapped))
        for name, (stock, tapped, both) in ((name, found.values()) for name, found in result["kernels"].items())
    ]
    about = {"layers": result["layers"], "name": name, **result["environment"]}
    return COMPILED.format(**about) + table(("layers as of", "stock vLLM", "with taps", "plain"), rows)
