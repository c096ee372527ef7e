# SPDX-License-Identifier: Apache-2.0
"""Sections of the performance pages about the host: CPU time, transfers and latency under load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measured import read
from steps_page import MakeTable

PINNED = """
## Transfer of captured rows to the host

Throughput of captured rows in GB/s from the arena to pinned memory, and from there to memory of their own while the next
step runs (`python -m benchmarks.pinned`, {gpu}, `benchmarks/results/{name}`). Target: 5 GB/s.

"""

LOAD = """
## Latency of plain requests under load

{clients} clients of one server on {cpus} cores each send {requests_each} requests of {prompt_tokens} tokens one after
another. The table shows the latency of plain requests relative to the same clients at stock vLLM in the same pair
(`python -m benchmarks.load`, the demo model, vLLM {vllm}; raw figures in `benchmarks/results/{name}`): the median of
{pairs} pairs, with minimum and maximum. *Plain*: no request is steered. *Mixed*: a third of the requests each are plain,
steered with their own vector, and captured at two layers. Clients and servers share the cores, and a request is a few steps
of a tiny model, so the front end's share is larger than on a GPU. The machine was not idle: beside the benchmark ran {beside}.

"""

OWN_VECTORS = "own vectors at 3 sites"
FRONT_END_TARGETS: Mapping[str, float] = {OWN_VECTORS: 0.3, "a module of 3 sites by name": 0.05}
"""Targets for the CPU time that steering adds to a request, in milliseconds."""

EARLIER_BUILDS = ("before", "with_sha256")
"""Earlier builds that were measured on the slower machine."""


def front_end(name: str, table: MakeTable) -> str:
    """Return the section on the front end, from a result of ``front_end.py``."""
    result = read(name)
    added = [
        (name, f"{spent:.2f} ms", f"≤ {FRONT_END_TARGETS[name]:g} ms" if name in FRONT_END_TARGETS else "")
        for name, spent in result["added_ms_per_request"].items()
    ]
    return (
        "\n## CPU time of requests\n\n"
        "CPU time that steering adds to a request in the front end, for a model with hidden size 4,096"
        f"{', on the host' if 'host' in result else ''}\n{result.get('host', '')}"
        f"{' ' if 'host' in result else ''}(`benchmarks/front_end.py`, `benchmarks/results/{name}`; {load_of(result)}):\n\n"
        + table(("request", "added", "target"), added)
        + (_slower_machine(table, result) if "slower_machine" in result else "")
        + (_readouts(table, result["readouts"]) if "readouts" in result else "")
    )


def _slower_machine(table: MakeTable, result: Any) -> str:
    """Return the part about an earlier build on a slower machine."""
    slower, busy = result["slower_machine"], result["beside_another_benchmark"]
    builds = (slower, *(slower[name] for name in EARLIER_BUILDS))
    slower_rows = [
        (name, *(f"{build['added_ms_per_request'][name]:.2f} ms" for build in builds))
        for name in slower["added_ms_per_request"]
    ]
    return (
        f"\nWhile another benchmark ran there, a plain request took {busy['plain_ms']:.3f} ms instead of "
        f"{result['plain_ms']:.3f} ms, and own vectors\nat 3 sites added {busy['added_ms_per_request'][OWN_VECTORS]:.2f} ms. "
        f"On a slower machine, a plain request takes {slower['plain_ms']:.3f} ms. The table compares\nthis build with an "
        "earlier one, which held a request's own vectors twice, and with one that used SHA-256, for which the\nmachine has "
        "no instructions:\n\n" + table(("request", "added", "earlier build", "with SHA-256"), slower_rows)
    )


def _readouts(table: MakeTable, result: Any) -> str:
    """Return the part about requests with 16 probes, over HTTP."""
    before = result["before"]
    rows = [(name, f"{ms:.2f} ms", f"{before[name]:.2f} ms") for name, ms in result["added_ms_per_request"].items()]
    return (
        f"\nCPU time that 16 probes add to a request in the API server ({result['machine']}).\n"
        "The earlier build compiled the fields of each body and encoded values from dictionaries:\n\n"
        + table(("part of the request", "added", "earlier build"), rows)
    )


def assembly(name: str, table: MakeTable) -> str:
    """Return the section on captured rows, from a result of ``assembly.py``."""
    result = read(name)
    spent, before = result["microseconds_per_request_and_step"], result.get("before")
    stages = list(next(iter(spent.values())))
    rows = [
        (name, *(f"{micros[stage]:.1f}" + (f" ({before[name][stage]:.1f})" if before else "") for stage in stages))
        for name, micros in spent.items()
    ]
    ending = [
        (name, *(f"{each:.1f}" for each in found.values()),
         *([f"{before['ending_milliseconds'][name]:.1f}"] if before else []))
        for name, found in result["ending_milliseconds"].items()
    ]  # fmt: skip
    heads = ("capture", "consumers after the step", "consumers at once", *(["earlier build"] if before else []))
    return (
        "\n## CPU time of captured rows\n\n"
        "CPU time per captured request and step in each process, for a model with hidden size 4,096, in microseconds\n"
        f"(`benchmarks/assembly.py` describes the stages, `benchmarks/results/{name}`; {load_of(result)})."
        + (" In brackets: an earlier\nbuild on a loaded machine, which split rows in the engine process and projected "
           "them on arrival." if before else "") + "\n\n"
        + table(("capture", *stages), rows)
        + "\nTime in milliseconds that a step in which 256 such requests end blocks the delivery of tokens, with consumers that\n"
        "start after the step and with consumers that start at once"
        + ("; in the earlier build, each request also iterated over\nall steps, however small its rows" if before else "")
        + ":\n\n"
        + table(heads, ending)
    )  # fmt: skip


def request_cpu(name: str, table: MakeTable) -> str:
    """Return the section on the API server's process, from a result of ``request_cpu.py``."""
    result = read(name)
    requests, floors = result["requests"], result["floors"]
    before = result.get("before", {}).get("requests", {})
    stock = requests["stock"]
    rows = [
        (way, f"{found['milliseconds']:.2f}", f"{found['milliseconds'] - stock['milliseconds']:.2f}",
         f"{found['until_engine_us'] / 1000:.2f}", f"{found['faults']:.0f}",
         *([f"{before[way]['milliseconds']:.2f}", f"{before[way]['until_engine_us'] / 1000:.2f}"]
           if way in before else ["", ""] if before else []))
        for way, found in requests.items()
    ]  # fmt: skip
    heads = ("requests", "CPU in ms", "added", "until the engine, in ms", "page faults")
    ways = [way for way in requests if "stages" in requests[way] and way != "idle"]
    stages = list(dict.fromkeys(stage for way in ways for stage in requests[way]["stages"]))
    parts = [(stage, *(f"{requests[way]['stages'].get(stage, 0):.0f}" for way in ways)) for stage in stages]
    return (
        "\n## CPU time of the API server\n\n"
        "CPU time of the API server's process per streamed request of 128 prompt and 128 generated tokens, 256 at a time, with\n"
        "a stand-in for the engine, for a model with hidden size 4,096. *Vector*: 4,096 JSON numbers, different in each body.\n"
        "*Probes*: 16 probes by name, to memory. *Capture*: one layer, to files "
        f"(`python -m benchmarks.request_cpu`, `benchmarks/results/{name}`; {load_of(result)}).\n"
        + (f"{result['note']}\n" if "note" in result else "")
        + "*Until the engine*: CPU time of the event loop from a body to the engine message."
        + (" Last columns: CPU time and time until the\nengine of an earlier build." if before else "")
        + "\n\n"
        + table(heads + (("earlier CPU", "earlier until the engine") if before else ()), rows)
        + f"\nNo server can avoid about {sum(floors.values()):.2f} ms of *capture* on this machine: plain Python takes "
        f"{floors['receive']:.2f} ms to receive its 1 MiB\nover a ZMQ socket, {floors['copy']:.2f} ms to copy the rows of each "
        f"request together, and {floors['write']:.2f} ms to write them to a file, so twice as\nmuch for 256 tokens. The parts "
        "of this package, in microseconds per request with timers; the remainder is vLLM's JSON parser,\nsockets, and calls "
        "for each token:\n\n" + table(("part", *ways), parts)
    )


def steps(name: str, table: MakeTable) -> str:
    """Return the section on the Python code of a step, from a result of ``step.py``."""
    result = read(name)
    before, readouts = result.get("before"), result.get("readouts")
    rows = [
        (what, batch, f"{micros:.1f}",
         *([f"{before['microseconds'].get(what, {}).get(batch, float('nan')):.1f}"] if before else []))
        for what, by_batch in result["microseconds"].items()
        for batch, micros in by_batch.items()
    ]  # fmt: skip
    waves = [
        (kind, *(f"{micros:.0f}" + (f" ({before['wave'][kind][part]:.0f})" if before else "")
                 for part, micros in parts.items()))
        for kind, parts in result["wave"].items()
    ]  # fmt: skip
    return (
        "\n## CPU time of a step\n\n"
        "Python time that a step takes in addition to stock vLLM's, in microseconds, in the engine process\n"
        f"(`python -m benchmarks.step`, `benchmarks/results/{name}`; {load_of(result)})."
        + (" The earlier build checked the capture\nroom of every request in each step." if before else "") + "\n\n"
        + table(("step", "batch", "added", *(["earlier build"] if before else [])), rows)
        + (_readout_steps(table, readouts) if readouts else "")
        + "\nTime per request of a wave in which 256 requests (16 with 96 sites) arrive together, run their prefill and one\n"
        f"more step, and end; microseconds in total{', with the earlier build in brackets' if before else ''}:\n\n"
        + table(("wave of", *next(iter(result["wave"].values()))), waves)
    )  # fmt: skip


def _readout_steps(table: MakeTable, readouts: Mapping[str, Any]) -> str:
    rows = [
        (what, batch, f"{micros:.1f}")
        for what, by_batch in readouts["microseconds"].items()
        for batch, micros in by_batch.items()
    ]
    return (
        f"\nThe same for steps in which every request has 16 probes ({readouts['machine']}):\n\n"
        + table(("step", "batch", "added"), rows)
    )  # fmt: skip


def outputs(name: str, table: MakeTable) -> str:
    """Return the section on outputs in the front end, from a result of ``outputs.py``."""
    result = read(name)
    by_kind = result["microseconds"]
    rows = [
        (case, *(f"{found[case] / found['stock vLLM']:.2f}" for found in by_kind.values()))
        for case in next(iter(by_kind.values()))
    ]
    stock = " and ".join(f"{found['stock vLLM']:.1f} µs {kind}" for kind, found in by_kind.items())
    return (
        "\n## CPU time of outputs\n\n"
        "Time of one output in the front end's output processor, relative to stock vLLM, which takes\n"
        f"{stock} (`python -m benchmarks.outputs`, `benchmarks/results/{name}`; {load_of(result)}):\n\n"
        + table(("requests", *by_kind), rows)
    )


def pinned(name: str, table: MakeTable) -> str:
    """Return the section on transfers, from a result of ``pinned.py``."""
    result = read(name)
    rows = [
        (rows, f"{found['mib']:.0f}", f"{found['pinned']:.1f}", f"{found['owned']:.1f}")
        for rows, found in result["gb_per_second"].items()
    ]
    return PINNED.format(**result["environment"], name=name) + table(("rows", "MiB", "pinned", "own memory"), rows)


def load(name: str, table: MakeTable) -> str:
    """Return the section on latency under load, from a result of ``load.py``."""
    result = read(name)
    percentiles = tuple(next(iter(result["ratios"].values())))
    rows = [
        (run, *(f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in (found[p] for p in percentiles)))
        for run, found in result["ratios"].items()
    ]
    about = {**result["setup"], **result["environment"], "pairs": len(result["pairs"]), "name": name}
    return LOAD.format(**about) + table(("clients", *percentiles), rows)


def load_of(result: Mapping[str, Any]) -> str:
    """Return the cores and the load average under which a result was measured."""
    about = result["environment"]
    return f"{about['cpus']} cores, load average {about['load_average'][0]:.1f}"
