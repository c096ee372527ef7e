# SPDX-License-Identifier: Apache-2.0
"""The table on top of docs/reference/performance.md: each aim beside its newest measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from measured import (
    Fits,
    code_of,
    current,
    date_of,
    kind_of,
    machine_of,
    names,
    newest_costs,
    of_any_code,
    read,
)
from pages import table

from benchmarks.front_end import TARGETS as FRONT_END_TARGETS
from benchmarks.shapes import SHAPES
from benchmarks.step import TARGETS as ENGINE_CORE_TARGETS
from vllm_steer import __version__
from vllm_steer.config import SteeringConfig
from vllm_steer.taps.tables import table_bytes, table_shapes

NOT_MEASURED = "not measured"
CHANGED = "the code has changed since"
FRONT_END_WAYS: Mapping[str, str] = {
    "off": "installed, steering off",
    "idle": "no steering",
    "own vector": "own vector in each body",
    "16 probes": "16 probes, streamed",
    "one layer to files": "one layer to files",
}
"""Ways of ``benchmarks/front_end.py`` in the words of this table."""
RATIO, MS = "{:.3f}", "{:.2f} ms"
"""Formats of values."""


class Bound(NamedTuple):
    """A target for every value of a figure. A missing end is open."""

    low: float | None = None
    high: float | None = None
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        return f"≤ {self.high:g}" if self.low is None and self.high is not None else f"≥ {self.low:g}"

    def holds(self, value: float) -> bool:
        rounded = round(value, 3)
        return (self.low is None or rounded >= self.low) and (self.high is None or rounded <= self.high)


class Figure(NamedTuple):
    """Values by batch or concurrency, and the results that have them."""

    values: Mapping[str, float]
    sources: Sequence[tuple[str, dict[str, Any]]]
    text: str = ""
    """Shown instead of the values."""


class Aim(NamedTuple):
    """A row of the table. ``figure`` returns None if no result that fits has the figure."""

    what: str
    unit: str
    bound: Bound | None
    kind: str
    figure: Callable[[Fits], Figure | None]
    bound_at: Sequence[str] = ()
    """Batches at which the bound holds; default: all."""
    form: str = RATIO
    """Format of each value, with its unit."""
    has_note: bool = False
    """Whether the result's note is shown, for results without a section of their own."""


def cost(
    what: str, variant: str, unit: str, bound: Bound | None, batches: Sequence[str] = (), shape: str = "llama-8b",
    gpus: int = 1,
) -> Aim:  # fmt: skip
    """Return an aim for a ratio measured by ``benchmarks/cost.py``. ``batches``: those shown; default: all."""

    def figure(fits: Fits) -> Figure | None:
        found = {
            batch: each
            for batch, each in newest_costs(shape, variant, gpus, fits).items()
            if unit in each.figures and (not batches or batch in batches)
        }
        if not found:
            return None
        return Figure(
            {batch: float(each.figures[unit]) for batch, each in found.items()},
            [(each.name, each.result) for each in found.values()],
        )

    where = f"{shape}, two GPUs" if gpus == 2 else shape
    return Aim(f"{what}, {where}", unit, bound, kind_of(variant), figure)


def serve(
    way: str, unit: str, bound: Bound, key: str, shape: str, concurrency: int | None = None, form: str = RATIO
) -> Aim:  # fmt: skip
    """Return an aim for a figure of ``benchmarks/serve.py``."""

    def figure(fits: Fits) -> Figure | None:
        newest: dict[str, tuple[float, tuple[str, dict[str, Any]]]] = {}
        sources = [(name, read(name)) for name in names(f"gpu-serve*{shape}*.json")]
        for source in sorted(sources, key=lambda each: date_of(each[1])):
            result = source[1]
            if result["shape"] != shape or not fits("server", result):
                continue
            for each in result["figures"]:
                value = _served(result, each, key) if each["way"] == way else None
                if value is not None and concurrency in (None, each["concurrency"]):
                    newest[str(each["concurrency"])] = value, source
        values = {number: newest[number][0] for number in sorted(newest, key=int)}
        used = {source[0]: source for _, source in newest.values()}
        return Figure(values, list(used.values())) if values else None

    what = {"idle": "no steering", "vector": "own vector in each body", "probes": "16 probes, memory consumer",
            "readouts": "16 probes, streamed", "gate": "gate of one probe, streamed",
            "capture": "one layer to files"}[way]  # fmt: skip
    bound_at = ("256",) if concurrency is None else ()
    return Aim(f"server, {shape}: {what}", unit, bound, "server", figure, bound_at, form)


def _served(result: Mapping[str, Any], figure: Mapping[str, Any], key: str) -> float | None:
    if key == "cpu":
        return float(figure["added_cpu_ms"]["api server"])
    if key == "added token_ms":
        cells = {(cell["round"], cell["way"]): cell for cell in result["cells"]
                 if cell["concurrency"] == figure["concurrency"]}  # fmt: skip
        added = [
            cells[number, way]["token_ms"] - cells[number, "stock"]["token_ms"]
            for number, way in cells
            if way == figure["way"] and (number, "stock") in cells
        ]
        return statistics.median(added)
    return float(figure[key][0]) if key in figure else None


def started(what: str, unit: str, bound: Bound, key: str, sign: int, form: str) -> Aim:
    """Return an aim for the difference between the starts of the two servers.

    Servers that are alone on the GPU (``benchmarks/start.py``) come before those of ``benchmarks/serve.py``.
    """

    def figure(fits: Fits) -> Figure | None:
        for name in (*reversed(names("gpu-start*llama-8b*.json")), *reversed(names("gpu-serve*llama-8b*.json"))):
            result = read(name)
            servers = result["servers"]
            if fits("server", result) and all(key in servers.get(each, {}) for each in ("stock", "steering")):
                return Figure({"": sign * (servers["steering"][key] - servers["stock"][key])}, [(name, result)])
        return None

    return Aim(what, unit, bound, "server", figure, form=form, has_note=True)


def kernels(shape: str) -> Aim:
    """Return the aim that an idle step of plain code runs stock vLLM's kernels."""

    def figure(fits: Fits) -> Figure | None:
        for name in reversed(names("gpu-kernels*.json")):
            result = read(name)
            if result["shape"] == shape and result.get("plain_code") and fits("idle steps", result):
                equal = bool(result["variants"]["idle"]["equal"])
                return Figure({"": float(equal)}, [(name, result)], "equal" if equal else "different")
        return None

    return Aim(f"kernels of an idle step with plain code, {shape}", "list", Bound(1, 1, "equal to stock vLLM's"),
               "idle steps", figure)  # fmt: skip


def front_end(way: str) -> Aim:
    """Return an aim for the API server's CPU, measured by ``benchmarks/front_end.py``, by route and streams."""
    ratio, added = FRONT_END_TARGETS[way]
    key, form = ("ratio", RATIO) if ratio is not None else ("added_ms_per_request", "{:+.3f} ms")
    bound = Bound(high=ratio) if ratio is not None else Bound(high=added, text=f"≤ +{added:g} ms")

    def figure(fits: Fits) -> Figure | None:
        for name in names("api-server*.json"):
            if fits("requests", result := read(name)):
                values = {f"{each['route'].split('/')[2]}, {each['streams']}": each[key]
                          for each in result["figures"] if each["way"] == way}  # fmt: skip
                return Figure(values, [(name, result)]) if values else None
        return None

    unit = "CPU, ratio to stock vLLM" if ratio is not None else "CPU per request"
    return Aim(f"API server: {FRONT_END_WAYS[way]}", unit, bound, "requests", figure, form=form)


def engine_core(way: str, high: float | None) -> Aim:
    """Return an aim for the engine core's time on the host per step, of ``benchmarks/step.py``."""

    def figure(fits: Fits) -> Figure | None:
        for name in names("step.json"):
            if fits("captured steps", result := read(name)):
                return Figure({"256": result["spread"][way]["ratio"]}, [(name, result)])
        return None

    bound = None if high is None else Bound(high=high)
    return Aim(f"engine core, {way}", "CPU per step, ratio", bound, "captured steps", figure, has_note=True)


def patching(fits: Fits) -> Figure | None:
    """Return the cells per second of a study and of a loop of hooks on a GPU."""
    for name in names("gpu-patching*.json"):
        if fits("patching", result := read(name)):
            return Figure({way: found["cells_per_second"] for way, found in result["ways"].items()}, [(name, result)])
    return None


def harvested(name: str, shown: str) -> Aim:
    """Return an aim for the rows per second of ``benchmarks/harvest.py`` beside stock vLLM's prompt tokens."""

    def figure(fits: Fits) -> Figure | None:
        if not names(name):
            return None
        result = read(name)
        values = {way.removeprefix("harvest, "): ratio[0] for way, ratio in result["ratio"].items() if "harvest" in way}
        return Figure(values, [(name, result)]) if fits("captured steps", result) else None

    bound = Bound(low=0.95)
    return Aim(
        f"harvest, {shown}", "rows per prompt token", bound, "captured steps", figure, ("one layer",), has_note=True
    )


def dosed(fits: Fits) -> Figure | None:
    """Return how many times as fast as HF Transformers a curve of doses is, by the interface that asks for it."""
    name = "gpu-doses.json"
    if not names(name):
        return None
    result = read(name)
    ratios = {case: each["tasks"]["doses"]["ratio_in_this_run"] for case, each in result["cases"].items()}
    values = {case.removeprefix("vllm-steer "): 1 / ratio for case, ratio in ratios.items()}
    about = {"environment": result["setup"], "note": result["setup"].get("note")}
    return Figure(values, [(name, about)]) if fits("steered steps", about) else None


def peers(fits: Fits) -> Figure | None:
    """Return the ratios of each project to its own stock vLLM with the results' notes, from results with ``rows``."""
    rows, texts, of = {}, [], []
    for name in names("gpu-peers*.json")[::-1]:
        if fits("captured steps", result := read(name)) and "rows" in result:
            shown: dict[str, list[str]] = {}
            for row in result["rows"]:
                what = f"{row['project']}, {row['workload']}"
                count = row["vectors"] if "vectors" in row["workload"] else row["requests"]
                rows.setdefault(f"{what}, {count}", row["ratio"])
                shown.setdefault(what, []).append(f"{row['ratio']:.3f} ({count})")
            text = "; ".join(f"{what}: {', '.join(each)}" for what, each in shown.items())
            texts.append(f"{text}. {result.get('note', '')}".strip())
            of.append((name, result))
    return Figure(rows, of, " ".join(texts)) if of else None


def tested(fits: Fits) -> Figure | None:
    """Return the number of GPU test runs that passed on the present code, of all."""
    runs = read("gpu-tests.json")["runs"] if names("gpu-tests.json") else {}
    now = [run for run in runs.values() if fits("captured steps", run)]
    if not now:
        return None
    passed = sum(not run["failed"] for run in now)
    text = f"{passed} of {len(now)} runs on this code passed"
    if earlier := [run for run in runs.values() if run not in now]:
        text += f"; of the others, {sum(not run['failed'] for run in earlier)} of {len(earlier)} on an earlier one"
    newest = max(now, key=date_of)
    return Figure({"": passed / len(runs)}, [("gpu-tests.json", newest)], text)


_IDLE = Bound(0.997, 1.003, "1.000 ± 0.003")
_STARTS = "start of a server, llama-8b"
AIMS: Sequence[Aim] = (
    *(cost("no steering", "idle", "per token", _IDLE, shape=shape)
      for shape in ("llama-8b", "qwen3-0.6b", "granite-4-tiny", "gemma3-27b", "qwen3-30b-a3b")),
    cost("no steering", "idle", "per token", _IDLE, gpus=2),
    cost("two stock engines", "stock again", "per token", None),
    cost("no steering", "idle", "first token", Bound(high=1.01)),
    kernels("llama-8b"),
    kernels("granite-4-tiny"),
    *(cost("one site, every request", "one site", "per token", Bound(high=1.005), ("1", "8", "32", "128", "256"), shape)
      for shape in ("llama-8b", "qwen3-0.6b", "granite-4-tiny", "gemma3-27b", "qwen3-30b-a3b")),
    cost("one site, every request", "one site", "per token", Bound(high=1.005), gpus=2),
    cost("one site, prefill of 8,192 tokens", "one site", "first token", Bound(high=1.005), ("prefill 8192",)),
    cost("all sites, own vectors, batch 1", "all sites", "per token", Bound(high=1.04), ("1",)),
    cost("all sites, own vectors, batch 128", "all sites", "per token", Bound(high=1.02), ("128",)),
    cost("different edits for each request", "own program each", "throughput", Bound(0.98), ("256", "1000")),
    cost("capture one layer, all tokens", "capture one layer, all tokens", "throughput", Bound(0.97), ("1000",)),
    cost("capture all layers, last prompt token", "capture all layers, last prompt token", "throughput", Bound(0.98),
         ("1000",)),
    cost("capture all layers, all tokens", "capture all layers, all tokens", "throughput", Bound(0.6), ("32",)),
    cost("16 probes at 4 layers, all tokens", "16 probes by name at 4 layers, all tokens", "throughput", Bound(0.99),
         ("1000",)),
    cost("readout of one probe", "readout of one probe", "per token", None),
    cost("gate of one probe", "gate of one probe", "per token", None),
    cost("live strength", "live strength", "per token", None),
    cost("lens at one layer", "lens at one layer", "per token", None),
    cost("SAE features at one layer", "SAE features at one layer", "per token", None),
    *(serve(way, "throughput", Bound(0.98, text="≥ 0.98 at 256"), "tokens_per_second", "llama-8b")
      for way in ("idle", "vector", "probes", "readouts", "gate", "capture")),
    *(serve(way, "first token, one at a time", Bound(high=1.05), "first_token_ms", "llama-8b", 1)
      for way in ("idle", "vector", "probes", "capture")),
    *(serve(way, "CPU of the API server per request", Bound(high=0.3, text="≤ 0.3 ms"), "cpu", "llama-8b", 256,
            MS)
      for way in ("probes", "capture")),
    *(serve(way, "ms per token, one at a time", Bound(high=most, text=f"≤ +{most:g} ms"), "added token_ms",
            "qwen3-0.6b", 1, "{:+.3f} ms") for way, most in (("idle", 0.01), ("vector", 0.02), ("probes", 0.05))),
    started(_STARTS, "seconds", Bound(high=10, text="≤ +10 s"), "start_seconds", 1, "{:+.1f} s"),
    started(_STARTS, "seconds, with filled compile caches", Bound(high=10, text="≤ +10 s"), "restart_seconds", 1,
            "{:+.1f} s"),
    started(_STARTS, "memory taken from the key-value cache", Bound(high=1, text="≤ +1 GiB"), "cache_gib", -1,
            "{:+.2f} GiB"),
    Aim("patching on a GPU", "cells per second", None, "patching", patching, form="{:.1f} cells/s",
        has_note=True),
    harvested("gpu-harvest-llama-8b.json", "llama-8b"),
    Aim("9 doses of 64 prompts on a GPU, chat model", "times the cells per second of HF Transformers", Bound(low=10),
        "steered steps", dosed, form="{:.1f}", has_note=True),
    Aim("peers beside this project, ratio to their stock vLLM", "throughput", None, "captured steps", peers),
    Aim("GPU tests", "runs", Bound(1, text="all pass"), "captured steps", tested),
    *(front_end(way) for way in FRONT_END_WAYS),
    *(engine_core(way, high) for way, high in ENGINE_CORE_TARGETS.items()),
)  # fmt: skip


def table_of_aims() -> str:
    """Return the table, with the version and the number of rows measured on the present code."""
    rows, of_this_build, measured = [], 0, 0
    for aim in AIMS:
        now = aim.figure(current)
        found = now or aim.figure(of_any_code)
        target = "" if aim.bound is None else str(aim.bound)
        if found is None:
            rows.append((aim.what, aim.unit, target, NOT_MEASURED, "", ""))
            continue
        of_this_build += now is not None
        measured += 1
        source = _source(aim.kind, found) if now else f"{_source(None, found)}; {CHANGED}"
        if aim.has_note and (note := found.sources[0][1].get("note")):
            source += f". {note}"
        rows.append((aim.what, aim.unit, target, _shown(aim, found), source, _reached(aim, found)))
    share = _tables_share()
    rows.append(("tables at defaults, llama-8b", "memory", "≤ 1 % of the weights", f"{100 * share:.2f} %", "computed",
                 "yes" if share <= 0.01 else "no"))  # fmt: skip
    return (
        f"vllm-steer {__version__}; {of_this_build} of {measured} measured figures are of the present code:\n\n"
        + table(("workload", "figure", "target", "last measurement", "build and GPU", "reached"), rows)
    )


def _shown(aim: Aim, found: Figure) -> str:
    if found.text:
        return found.text
    return ", ".join(aim.form.format(value) + (f" ({batch})" if batch else "") for batch, value in found.values.items())


def _reached(aim: Aim, found: Figure) -> str:
    values = [value for batch, value in found.values.items() if not aim.bound_at or batch in aim.bound_at]
    if aim.bound is None or not values:
        return ""
    return "yes" if all(aim.bound.holds(value) for value in values) else "no"


def _source(kind: str | None, found: Figure) -> str:
    """Return file, machine and date of each result, and for a kind of figure also the code."""
    shown = {
        name: f"`{name}`, "
        + ", ".join(filter(None, (machine_of(result), date_of(result), "" if kind is None else code_of(kind, result))))
        for name, result in found.sources
    }
    return "; ".join(shown.values())


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
