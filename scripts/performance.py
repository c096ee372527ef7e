# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/performance.md: costs of steering and capture relative to stock vLLM in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from host_costs import FRONT_END_TARGETS, cpu_time, load, pinned, read
from steps_page import (
    RESULTS,
    MakeTable,
    compiled,
    kernels_of,
    plain_code_kernels,
    second_stream,
    spent_on_taps_and_products,
    timeline,
)

from benchmarks.cost import first_token
from benchmarks.shapes import SHAPES
from benchmarks.taps import LAYERS
from vllm_steer.config import SteeringConfig
from vllm_steer.taps.tables import table_bytes, table_shapes

# Targets by variant.
TARGETS: Mapping[str, str] = {
    "idle": "per token 1.000 ± 0.003, first token ≤ 1.01",
    "one site": "per token ≤ 1.005; prefill of 8,192 tokens ≤ 1.005",
    "all sites": "per token ≤ 1.04 at batch 1, ≤ 1.02 at 128",
    "own program each": "throughput ≥ 0.98 at batch 256",
    "capture one layer, all tokens": "throughput ≥ 0.97",
    "capture all layers, last prompt token": "throughput ≥ 0.98",
    "capture all layers, all tokens": "throughput ≥ 0.6",
    "16 probes at 4 layers, all tokens": "throughput ≥ 0.99",
    "16 probes by name at 4 layers, all tokens": "throughput ≥ 0.99",
}


HEAD = """# Performance

Costs relative to stock vLLM, measured in pairs: a stock engine and a steered engine run side by side on one GPU and take turns
(`python -m benchmarks.cost`; `benchmarks/results` has all raw times).

* *Per token*: time per output token while all requests run (median, with minimum and maximum of the pairs).
* *First token*: time of the whole batch with one token each. Each repetition is combined with the next one, in which the engines
  run in the opposite order, because the engine that waited starts more slowly. For small batches this figure has little meaning:
  a run takes one or two model steps, depending on whether requests arrive before or after the first step starts.
* *Throughput*: tokens per second of the whole run, including admission.
* *Stock again*: a second stock engine instead of the steered one, which shows the noise of the method.

A wide spread indicates an uneven machine and an unreliable median. If all requests are steered by the same vector and the vector
changes their tokens, they do different work from stock vLLM's requests, and far less in a mixture of experts, presumably because
equal tokens select the same experts. The vectors are therefore so small (about 1e-9 per element) that bfloat16 rounds nearly all
of them away; rows that change tokens are marked.
"""

TARGETS_HEAD = """
## Targets

Llama-8B shape, H200, bfloat16. The tables below contain the source of each figure and mark earlier builds.

"""


class Aim(NamedTuple):
    """A target: an upper (``at_most``) or lower bound of a figure, and the cells of the results that must meet it."""

    what: str
    figure: str
    bound: float | None
    at_most: bool
    cells: tuple[tuple[str, str, str], ...]


_SMALL, LARGE, _FIRST, _EARLIER, _QUEUE, _TWO, _PRODUCTS, KEPT = (
    f"gpu-cost-llama-8b{name}.json"
    for name in ("", "-large", "-first", "-earlier", "-queue", "-tp2", "-products", "-kept")
)
_BATCHES = {"1": _SMALL, "8": _SMALL, "32": _SMALL, "128": LARGE, "256": LARGE}
_FIRST_TOKENS = {**_BATCHES, "1": _FIRST, "8": _FIRST, "prefill 8192": _EARLIER}
_PROBES = "16 probes by name at 4 layers, all tokens"
AIMS: Sequence[Aim] = (
    Aim("no steering, time per output token", "per token", 1.003, True,
        tuple((file, "idle", batch) for batch, file in _BATCHES.items())),
    Aim("two stock engines", "per token", None, True,
        tuple((LARGE, "stock again", batch) for batch in ("128", "256"))),
    Aim("no steering, two GPUs", "per token", 1.003, True,
        tuple((_TWO, "idle", batch) for batch in ("1", "32", "128"))),
    Aim("no steering, first token", "first token", 1.01, True,
        tuple((file, "idle", batch) for batch, file in _FIRST_TOKENS.items())),
    Aim("two stock engines", "first token", None, True,
        tuple((LARGE, "stock again", batch) for batch in ("128", "256"))),
    Aim("one site, every request", "per token", 1.005, True,
        tuple((file, "one site", batch) for batch, file in _BATCHES.items())),
    Aim("96 sites, own vectors, batch 1", "per token", 1.04, True,
        ((KEPT, "all sites", "1"),)),
    Aim("96 sites, own vectors, batch 128", "per token", 1.02, True,
        ((LARGE, "all sites", "128"),)),
    Aim("different edits for each request, 256 at a time", "throughput", 0.98, False,
        ((LARGE, "own program each", "256"), (_PRODUCTS, "own program each", "1000"))),
    Aim("capture one layer, all tokens, 1,000 prompts, 256 generated", "throughput", 0.97, False,
        ((LARGE, "capture one layer, all tokens", "1000"),)),
    Aim("capture all layers, last prompt token", "throughput", 0.98, False,
        ((_EARLIER, "capture all layers, last prompt token", "1000"),)),
    Aim("capture all layers, all tokens, batch 32", "throughput", 0.6, False,
        ((_QUEUE, "capture all layers, all tokens", "32"),)),
    Aim("16 probes at 4 layers, all tokens", "throughput", 0.99, False,
        ((LARGE, _PROBES, "1000"),)),
    Aim("16 probes at 4 layers, alone on its host", "throughput", 0.99, False,
        ((_PRODUCTS, _PROBES, "1000"),)),
    Aim("no steering, 1,000 prompts", "throughput", None, False, ((LARGE, "idle", "1000"),)),
    Aim("prefill of 8,192 tokens, one site", "first token", 1.005, True, ((_EARLIER, "one site", "prefill 8192"),)),
)  # fmt: skip

GLOBS = ("gpu-cost-*.json", "gpu-kernels.json", "gpu-timeline*.json", "load*.json")

LIMITS = """
## Remaining costs

* Without plain code (`--steering-plain-code`), idle steps run one kernel more than stock vLLM: the embedding is written
  before the first layer, where it can be edited and captured, instead of being fused into the first norm. In layers with
  a single tensor (Granite, GPT-2) the compiler no longer fuses an addition with the following norm.
* The host limits models whose GPU steps are shorter than their Python code, such as a 0.6 B model at batch 1.
* Steered sites add launches of neighbouring taps without work. Each launch takes, in µs,
  {idle_taps} (`benchmarks/results/gpu-taps.json`).
  These are the taps of a quarter of the layers in steps of up to 64 tokens, and those between layers, or all, in larger steps.
* First tokens of steered batches are delayed. 128 requests with the same vectors at all sites, 1.5 MiB each, take {large:.2f} times
  as long as plain requests, and {two:.2f} times on two GPUs (`benchmarks/results/program-hops.json` has the time of each hop).
  Requests with new vectors still carry them.
* 16 probes: a queue of 1,000 requests ran at {probes:.3f} of stock vLLM's throughput while another shape was measured on the
  host's other GPU, and at {probes_alone:.3f} alone. A step of an unchanged batch takes {probes_step:.2f} ms more than {stock_step:.2f} ms. Projection kernels
  take {probes_products:.3f} ms; taps take {probes_taps:.3f} ms, overlap the preceding kernels, and mostly have no work.
* Captured rows of many requests (2 MiB per step for one layer at batch 256) are copied once in the engine process and sent to the
  front end over a socket.
"""


def page(table: MakeTable) -> str:
    """Return the whole page."""
    files = {pattern: sorted(path.name for path in RESULTS.glob(pattern)) for pattern in GLOBS}
    costs, kernels, timelines, loads = files.values()
    return "".join(
        (
            HEAD,
            _aims(table),
            *(_section(_costs(name), name, table) for name in costs),
            *(kernels_of(read(name), name, table) for name in kernels),
            plain_code_kernels(table),
            *(timeline(read(name), name, table) for name in timelines),
            second_stream(table),
            compiled(table),
            *(load(name, table) for name in loads),
            pinned(table),
            cpu_time(table),
            _limits(),
        )
    )


def _limits() -> str:
    first = {name: cell(file, "all sites", "128", "first token") for name, file in (("large", LARGE), ("two", _TWO))}
    probes = {
        name: cell(file, _PROBES, "1000", "throughput")
        for name, file in (("probes", LARGE), ("probes_alone", _PRODUCTS))
    }
    stock, more, taps, products = _probes_step("gpu-timeline.json")
    return LIMITS.format(
        **first, **probes, probes_step=more, stock_step=stock, probes_taps=taps, probes_products=products,
        idle_taps=_idle_taps(),
    )  # fmt: skip


def _probes_step(file: str) -> tuple[float, float, float, float]:
    """Return the milliseconds of a stock step, and those that a step with probes, its taps and its projections add."""
    steps = read(file)["variants"]
    stock, probes = steps["stock"]["step"], steps[_PROBES]
    return stock, probes["step"] - stock, *spent_on_taps_and_products(probes)


def _idle_taps() -> str:
    """Return the microseconds that a joined launch adds to a step, by batch."""
    launches = 2 * LAYERS + 1
    rows = [row for row in read("gpu-taps.json")["rows"] if row["taps"] == "idle"]
    return ", ".join(f"{max(row['added_us']['joined'], 0) / launches:.1f} (batch {row['tokens']})" for row in rows)


def _aims(table: MakeTable) -> str:
    """Return the section that compares every target with its measurement."""
    rows = []
    for aim in AIMS:
        found = [(name, batch, cell(file, name, batch, aim.figure)) for file, name, batch in aim.cells]
        values = [value for _, _, value in found if value is not None]
        shown = ", ".join(
            "not measured" if value is None else f"{value:.3f}" + (f" ({batch})" if len(found) > 1 else "")
            for _, batch, value in found
        )
        if aim.bound is None or not values:
            reached = ""
        elif aim.at_most:
            reached = "yes" if max(values) <= aim.bound else "no"
        else:
            reached = "yes" if min(values) >= aim.bound else "no"
        bound = "" if aim.bound is None else f"{'≤' if aim.at_most else '≥'} {aim.bound:g}"
        rows.append((aim.what, f"{aim.figure} {bound}", shown, reached))
    front = read("front-end.json")["added_ms_per_request"]
    for name, most in FRONT_END_TARGETS.items():
        spent = front[name]
        rows.append((f"front end: {name}", f"CPU ≤ {most:g} ms", f"{spent:.2f}", "yes" if spent <= most else "no"))
    speeds = [each["pinned"] for each in read("gpu-pinned.json")["gb_per_second"].values()]
    rows.append(("captured rows to pinned memory", "≥ 5 GB/s", f"{min(speeds):.1f} to {max(speeds):.1f}",
                 "yes" if min(speeds) >= 5 else "no"))  # fmt: skip
    share = _tables_share()
    rows.append(
        ("tables at defaults", "≤ 1 % of the weights", f"{100 * share:.2f} %", "yes" if share <= 0.01 else "no")
    )
    return TARGETS_HEAD + table(("workload", "target", "measured (batch)", "reached"), rows)


def _tables_share() -> float:
    """Return the tables' share of the memory of a Llama-8B's bfloat16 weights, with vLLM's server defaults."""
    shape = SHAPES["llama-8b"]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = (shape["num_attention_heads"] + shape["num_key_value_heads"]) * 2 * hidden // shape["num_attention_heads"]
    weights = 2 * shape["vocab_size"] * hidden + layers * hidden * (heads + 3 * shape["intermediate_size"])
    tables = table_shapes(
        SteeringConfig(), num_sites=3 * layers, hidden_size=hidden, max_tokens=8192, max_requests=256,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return sum(table_bytes(tables).values()) / (2 * weights)


def _costs(file: str) -> dict[str, Any]:
    """Return a result of ``cost.py``, with first tokens computed from the raw times (older results differ)."""
    result: dict[str, Any] = read(file)
    for found in (each for by_batch in result["variants"].values() for each in by_batch.values()):
        if "first token" in found:
            found["first token"] = first_token(found["raw"], found.get("engines", 1))
    return result


def cell(file: str, variant: str, batch: str, figure: str) -> float | None:
    found = _costs(file)["variants"].get(variant, {}).get(batch, {}).get(figure)
    return None if found is None else float(found)


def _section(result: Mapping[str, Any], name: str, table: MakeTable) -> str:
    about = result["environment"]
    rows = [
        (variant, batch, *_figures(found), TARGETS.get(variant, "") if first else "")
        for variant, by_batch in result["variants"].items()
        for first, (batch, found) in _marked(by_batch)
    ]
    return (
        f"\n## {result['shape']}, {result['graph_sets']} sets of graphs"
        f"{', two GPUs (tensor parallel)' if result['tensor_parallel'] == 2 else ''}"
        f"{', ' + _title(result) if _title(result) else ''}\n\n"
        f"{about['gpu']}, torch {about['torch']}, Triton {about['triton']}, vLLM {about['vllm']}; raw times in\n"
        f"`benchmarks/results/{name}`.\n"
        f"Prompts of 16 tokens, {max(max(f['lengths']) for v in result['variants'].values() for f in v.values())} generated.\n"
        + (f"{result['note']}\n" if "note" in result else "")
        + "\n"
        + table(("workload", "batch", "per token", "first token", "throughput", "stock, ms per token", "target"), rows)
    )


def _title(result: Mapping[str, Any]) -> str:
    """Return what distinguishes a result from others of its shape: its title, or the names of its groups."""
    groups = [what for _, _, what in (name.partition(", ") for name in result.get("groups", ())) if what]
    return str(result.get("title", " and ".join(groups)))


def _marked(by_batch: Mapping[str, Any]) -> Sequence[tuple[bool, tuple[str, Any]]]:
    return [(i == 0, item) for i, item in enumerate(by_batch.items())]


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
        f"{found['per token']:.3f} ({low:.3f} to {high:.3f}{several})",
        first,
        f"{found['throughput']:.3f}",
        f"{found['stock ms per token']:.2f}",
    )
