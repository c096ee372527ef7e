# SPDX-License-Identifier: Apache-2.0
"""The pages docs/reference/performance.md, with results of the present code, and performance-history.md, with older ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import host_costs
from aims import table_of_aims
from measured import current, kind_of, names, read
from serve_page import served
from steps_page import MakeTable, compiled, kernels_of, plain_code_kernels, second_stream, timeline

HEAD = """# Performance

Each row shows its newest measurement: each value with its batch or concurrency in brackets, the result in `benchmarks/results` with its
GPU and date, and whether code that the figure depends on has changed since. Results of the present code have a section below;
[earlier builds](performance-history.md) has the others. Figures without a unit are ratios to stock vLLM in the same run. A target
holds for every batch shown, and its bounds are compared with the last measurement, also where the machine's noise is larger than the
bound (see "two stock engines"). Results with torch 2.11 are from GPU hosts with a torch of their own; vLLM 0.32 pins 2.13.

"""

METHOD = """
## How costs are measured

A stock engine and a steered engine run side by side on one GPU and take turns (`python -m benchmarks.cost`;
`benchmarks/results` has all raw times).

* *Per token*: ratio of the times per output token in the fastest repetition of each engine, because other work on the host only adds
  time; in brackets the median, minimum and maximum of the ratios of single repetitions, which the first ratio can be outside of.
  *By pair*: the median for each pair of engines, if there were several.
* *First token*: time of the whole batch with one token each. Each repetition is combined with the next one, in which the engines
  run in the opposite order, because the engine that waited starts more slowly. For small batches this figure has little meaning:
  a run takes one or two model steps, depending on whether requests arrive before or after the first step starts.
* *Throughput*: tokens per second of the whole run, including admission.
* *Stock again*: a second stock engine instead of the steered one, which shows the noise of the method.

A wide spread indicates an uneven machine. If all requests are steered by the same vector and the vector
changes their tokens, they do different work from stock vLLM's requests, and far less in a mixture of experts, presumably because
equal tokens select the same experts. The vectors are therefore so small (about 1e-9 per element) that bfloat16 rounds nearly all
of them away; the notes of results name exceptions.
"""

REMAINING = """
## Known costs

* With `--no-steering-plain-code`, idle steps run one kernel more than stock vLLM: the embedding is written
  before the first layer, where it can be edited and captured, instead of being fused into the first norm. In layers with
  a single tensor (Granite, GPT-2) the compiler no longer fuses an addition with the following norm.
* The host limits models whose GPU steps are shorter than their Python code, such as a 0.6 B model at batch 1.
* A step that edits or captures at one site runs a graph with more taps than it needs: in steps of up to 64 tokens the taps of a
  quarter of the layers, in larger steps those between layers, or all.
* Requests with new vectors carry them to the engine, which delays their first token (`benchmarks/results/program-hops.json` has
  the times of encoding, sending, receiving and decoding).
* Captured rows of many requests (2 MiB per step for one layer at batch 256) are copied once in the engine process and sent to the
  front end over a socket.
* A captured request adds its consumer's thread and the encoding of its results to the API server's CPU time, more than the
  aim of 0.3 ms (`benchmarks/results/captured-responses.json`, against an earlier build). One layer to files
  cannot reach the aim: receiving, copying and writing the rows alone takes longer (`benchmarks/results/request-cpu.json`).
  On hosts with slow cores the API server's process, which stock vLLM almost fills at concurrency 256, limits the throughput of
  captures and of own vectors; `--api-server-count` spreads the work over several processes.
* Graphs with taps take longer to capture than stock vLLM's. With filled compile caches they are the largest part of what steering
  adds to the start of a server (its log has the seconds and MiB of each set); with empty caches, compiling the model a second
  time for steps without steering takes about as long.
"""

HISTORY = """# Performance of earlier builds

Results whose code has changed since, or that do not record their code. [Performance](performance.md) has the figures of the
present code and the method. `python -m benchmarks.build` lists the changes since each result.
"""

MakeSection = Callable[[str, MakeTable], str]
SECTIONS: Sequence[tuple[str, str, MakeSection]] = (
    ("gpu-serve*.json", "server", served),
    ("gpu-timeline*.json", "captured steps", timeline),
    ("gpu-second-stream*.json", "captured steps", second_stream),
    ("compiled*.json", "compiled taps", compiled),
    ("load*.json", "server", host_costs.load),
    ("gpu-pinned*.json", "row copies", host_costs.pinned),
    ("front-end*.json", "requests", host_costs.front_end),
    ("request-cpu*.json", "server", host_costs.request_cpu),
    ("assembly*.json", "captured rows", host_costs.assembly),
    ("step*.json", "host part of steps", host_costs.steps),
    ("outputs*.json", "outputs", host_costs.outputs),
)
"""Files with a section of their own: pattern, kind of figure, and the function that returns the section."""


def page(table: MakeTable) -> str:
    """Return the page with the aims and the results of the present code."""
    return HEAD + table_of_aims(table) + METHOD + _sections(table, now=True) + REMAINING


def history(table: MakeTable) -> str:
    """Return the page with the results of other code."""
    return HISTORY + _sections(table, now=False)


def _sections(table: MakeTable, *, now: bool) -> str:
    """Return the sections of the results that are of the present code, or of those that are not."""
    return "".join(
        (
            *(_costs(name, table, now=now) for name in names("gpu-cost-*.json")),
            _kernels(table, now=now),
            *(
                make(name, table)
                for pattern, kind, make in SECTIONS
                for name in names(pattern)
                if current(kind, read(name)) == now
            ),
        )
    )


def _kernels(table: MakeTable, *, now: bool) -> str:
    by_plain: dict[bool, list[str]] = {True: [], False: []}
    for name in names("gpu-kernels*.json"):
        if current("idle steps", result := read(name)) == now:
            by_plain[bool(result.get("plain_code"))].append(name)
    plain = plain_code_kernels(by_plain[True], table) if by_plain[True] else ""
    return "".join(kernels_of(name, table) for name in by_plain[False]) + plain


def _costs(name: str, table: MakeTable, *, now: bool) -> str:
    """Return the section of a result of ``cost.py`` with the variants that belong on the page, or nothing."""
    result = read(name)
    variants = {
        variant: by_batch
        for variant, by_batch in result["variants"].items()
        if current(kind_of(variant), result) == now
    }
    if not variants:
        return ""
    about = result["environment"]
    rows = [
        (variant, batch, *_figures(found))
        for variant, by_batch in variants.items()
        for batch, found in by_batch.items()
    ]
    most = max(max(found["lengths"]) for by_batch in variants.values() for found in by_batch.values())
    when = "".join(f", {about[key]}" for key in ("date", "commit") if about.get(key))
    return (
        f"\n## {result['shape']}, {result['graph_sets']} sets of graphs"
        f"{', two GPUs (tensor parallel)' if result['tensor_parallel'] == 2 else ''}"
        f"{', ' + _title(result) if _title(result) else ''}\n\n"
        f"{about['gpu']}, torch {about['torch']}, Triton {about['triton']}, vLLM {about['vllm']}{when}; raw times in\n"
        f"`benchmarks/results/{name}`.\n"
        f"Prompts of 16 tokens, {most} generated.\n"
        + (f"{result['note']}\n" if result.get("note") else "")
        + "\n"
        + table(("workload", "batch", "per token", "first token", "throughput", "stock, ms per token"), rows)
    )


def _title(result: Mapping[str, Any]) -> str:
    """Return what distinguishes a result from others of its shape: its title, or the names of its groups."""
    groups = [what for _, _, what in (name.partition(", ") for name in result.get("groups", ())) if what]
    return str(result.get("title", " and ".join(groups)))


def _figures(found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if "first token" not in found:
        low, high = found["spread"]
        return "", "", f"{found['throughput']:.3f} ({low:.3f} to {high:.3f})", ""
    first = f"{found['first token']:.2f}"
    if "per token" not in found:
        return "", first, "", ""
    low, high = found["spread"]
    by_pair = found.get("by pair", ())  # not in older results
    several = f"; by pair {', '.join(f'{each:.3f}' for each in by_pair)}" if len(by_pair) > 1 else ""
    return (
        f"{found['per token']:.3f} (median {found['median per token']:.3f}, {low:.3f} to {high:.3f}{several})",
        first,
        f"{found['throughput']:.3f}",
        f"{found['stock ms per token']:.2f}",
    )
