# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/performance.md: what steering and capture cost, as ratios to stock vLLM in the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from steps_page import RESULTS, MakeTable, compiled, kernels_of, second_stream, spent_on_taps_and_products, timeline

from benchmarks.cost import first_token
from benchmarks.shapes import SHAPES
from benchmarks.taps import LAYERS
from vllm_steer.config import SteeringConfig
from vllm_steer.taps.tables import table_bytes, table_shapes

# What is aimed at, by variant. Time per output token is a ratio to be low, throughput one to be high.
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

Ratios to stock vLLM, measured in pairs: a stock engine and a steered one live side by side on one GPU and take turns
(`python -m benchmarks.cost`; all raw times are in `benchmarks/results`). *Per token* is the time per output token once
all requests run (median, and the least and greatest of the pairs), *first token* that of the whole batch with one token
each (each repeat together with the next one, in which the engines ran in the other order: the one that has waited is
slower at first), *throughput* that of the whole run, admission included. Where the pairs are far apart the machine was
uneven, and the median says little. *Stock again* is a second stock engine in the place of the steered one: how far two
engines that do the same are apart. First tokens of small batches say least: a run takes a step of the model or two, as
its requests come before or after the first one has begun. Requests that are all steered alike by a vector that changes
tokens are other work than stock vLLM's, far less of it in a mixture of experts (see the rows there), presumably since
equal tokens take the same experts. So vectors are now so short, some 1e-9 a number, that bfloat16 rounds nearly all of
them away.
"""

AIMED = """
## What was aimed at

Llama-8B shape, H200, bfloat16. The tables below say what each figure is of, and which were measured in an earlier build.

"""


class Aim(NamedTuple):
    """A figure to reach, ``at_most`` or at least ``bound``, and the cells of the results that it is read from."""

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
    Aim("nothing requested, time per output token", "per token", 1.003, True,
        tuple((file, "idle", batch) for batch, file in _BATCHES.items())),
    Aim("the same between two stock engines", "per token", None, True,
        tuple((LARGE, "stock again", batch) for batch in ("128", "256"))),
    Aim("nothing requested, two GPUs", "per token", 1.003, True,
        tuple((_TWO, "idle", batch) for batch in ("1", "32", "128"))),
    Aim("nothing requested, first token", "first token", 1.01, True,
        tuple((file, "idle", batch) for batch, file in _FIRST_TOKENS.items())),
    Aim("the same between two stock engines", "first token", None, True,
        tuple((LARGE, "stock again", batch) for batch in ("128", "256"))),
    Aim("one site, every request", "per token", 1.005, True,
        tuple((file, "one site", batch) for batch, file in _BATCHES.items())),
    Aim("96 sites, own vectors, batch 1", "per token", 1.04, True,
        ((KEPT, "all sites", "1"),)),
    Aim("96 sites, own vectors, batch 128", "per token", 1.02, True,
        ((LARGE, "all sites", "128"),)),
    Aim("a program of its own for each request, 256 at a time", "throughput", 0.98, False,
        ((LARGE, "own program each", "256"), (_PRODUCTS, "own program each", "1000"))),
    Aim("capture one layer, all tokens, 1,000 prompts, 256 generated", "throughput", 0.97, False,
        ((LARGE, "capture one layer, all tokens", "1000"),)),
    Aim("capture all layers, last prompt token", "throughput", 0.98, False,
        ((_EARLIER, "capture all layers, last prompt token", "1000"),)),
    Aim("capture all layers, all tokens, batch 32", "throughput", 0.6, False,
        ((_QUEUE, "capture all layers, all tokens", "32"),)),
    Aim("16 probes at 4 layers, all tokens", "throughput", 0.99, False,
        ((LARGE, _PROBES, "1000"),)),
    Aim("the same, alone on its host", "throughput", 0.99, False,
        ((_PRODUCTS, _PROBES, "1000"),)),
    Aim("nothing requested, 1,000 prompts", "throughput", None, False, ((LARGE, "idle", "1000"),)),
    Aim("prefill of 8,192 tokens, one site", "first token", 1.005, True, ((_EARLIER, "one site", "prefill 8192"),)),
)  # fmt: skip

PINNED = """
## Rows on their way to the host

Captured rows from the arena to pinned memory, GB/s, and from there into memory of their own, with the next step on its
way (`python -m benchmarks.pinned`, {gpu}, `benchmarks/results/gpu-pinned.json`). Aim: 5 GB/s.

"""

LOAD = """
## Plain requests beside steered and captured ones

{clients} clients of one server on {cpus} cores, each sending {requests_each} requests of {prompt_tokens} tokens one after
another; latency of plain requests, as ratios to the same clients at stock vLLM in the same pair (`python -m
benchmarks.load`, the demo model, vLLM {vllm}; raw figures in `benchmarks/results/{name}`): median of {pairs} pairs, and
the least and greatest. *Plain*: nobody steers. *Mixed*: a third each are plain, steered with a vector of their own, and
captured at two layers. Clients and servers share the cores, and every request is a few steps of a tiny model, so what
the front end does weighs more than on a GPU. Beside it ran: {beside}.

"""

LIMITS = """
## What is in the way

* An idle step has one kernel more than stock vLLM: the embedding is written out before the first layer, where it can be
  edited and read, and not folded into the first norm. In layers that hand on one tensor (Granite, GPT-2) the compiler no
  longer makes one kernel of an addition and the norm behind it: `--steering-plain-code` is to change that.
* The host, where a step of the GPU is shorter than what Python does for it, as in a model of 0.6 B at batch 1.
* Steered sites: the launches of the taps beside theirs that find nothing to do. Each takes, in µs,
  {idle_taps} (`benchmarks/results/gpu-taps.json`).
  They are those of a quarter of the layers in steps of up to 64 tokens, in larger ones those between layers, or those within.
* First tokens of steered batches. 128 requests with the same vectors at all sites, 1.5 MiB each, take {large:.2f} times as long
  as plain ones, on two GPUs {two:.2f} times (`benchmarks/results/program-hops.json` has what a program takes on its way).
  Requests that bring vectors that nobody has brought still carry them.
* 16 probes. A queue of 1,000 ran at {probes:.3f} of stock vLLM's throughput while another shape was measured on the host's
  other GPU, and at {probes_alone:.3f} alone. A settled step takes {probes_step:.2f} ms more than {stock_step:.2f}; the kernels of products
  last {probes_products:.3f} ms, and those of taps, which overlap the kernels in front of them and nearly all find nothing to
  do, {probes_taps:.3f}.
* Captured rows of many requests: 2 MiB a step for one layer at batch 256 are copied once in the engine's process and go
  to the front end over a socket.
"""


# What is aimed at per request, in milliseconds of CPU.
_OWN = "own vectors at 3 sites"
FRONT_END_TARGETS: Mapping[str, float] = {_OWN: 0.3, "a module of 3 sites by name": 0.05}


EARLIER = ("before", "with_sha256")
"""Earlier builds on the machine that is not quick."""


def host(table: MakeTable) -> str:
    """What the processes around the GPU spend, from the results of ``front_end.py`` and ``assembly.py``."""
    front, rows = (json.loads((RESULTS / name).read_text()) for name in ("front-end.json", "assembly.json"))
    spent, before = rows["microseconds_per_request_and_step"], rows["before"]
    places = list(next(iter(spent.values())))
    slower, beside = front["slower_machine"], front["beside_another_benchmark"]
    return (
        "\n## On the host\n\n"
        "CPU time that a steered request costs the front end beside a plain one, for a model 4,096 wide, on the host\n"
        f"{front['host']} (`benchmarks/front_end.py`; {_loaded(front)}):\n\n"
        + table(
            ("request", "added", "aim"),
            [
                (name, f"{added:.2f} ms", f"≤ {FRONT_END_TARGETS[name]:g} ms" if name in FRONT_END_TARGETS else "")
                for name, added in front["added_ms_per_request"].items()
            ],
        )
        + f"\nBeside another benchmark there, when a plain request took {beside['plain_ms']:.3f} ms and not "
        f"{front['plain_ms']:.3f}, own vectors at 3 sites\nadded {beside['added_ms_per_request'][_OWN]:.2f} ms. The same on a slower "
        f"machine, on which a plain request takes {slower['plain_ms']:.3f} ms; before, a\nrequest's own vectors were held twice, "
        "and at first digested with SHA-256, for which it has no instructions:\n\n"
        + table(
            ("request", "added", "before", "with SHA-256"),
            [
                (
                    name,
                    *(
                        f"{run['added_ms_per_request'][name]:.2f} ms"
                        for run in (slower, *(slower[key] for key in EARLIER))
                    ),
                )
                for name in slower["added_ms_per_request"]
            ],
        )
        + "\nTime of captured rows per captured request and step in each process, for a model 4,096 wide, in\n"
        f"microseconds (`benchmarks/assembly.py` says what is where; {_loaded(rows)}); in brackets what it was\n"
        "on a loaded machine when rows were split in the engine's process and projected at the end of the way:\n\n"
        + table(
            ("capture", *places),
            [
                (name, *(f"{micros[place]:.1f} ({before[name][place]:.1f})" for place in places))
                for name, micros in spent.items()
            ],
        )
        + "\nA step in which 256 such requests end, in milliseconds of what hands out their tokens: with consumers held\n"
        "back until it is through, and with consumers that start at once; before, each request also went through all\n"
        "steps by itself, however small its rows:\n\n"
        + table(
            ("capture", "held back", "at once", "before"),
            [
                (name, *(f"{each:.1f}" for each in found.values()), f"{before['ending_milliseconds'][name]:.1f}")
                for name, found in rows["ending_milliseconds"].items()
            ],
        )
    )


def _steps(table: MakeTable) -> str:
    """What the host does for a step."""
    result = json.loads((RESULTS / "step.json").read_text())
    rows = [
        (what, batch, f"{micros:.1f}", f"{result['before']['microseconds'][what][batch]:.1f}")
        for what, by_batch in result["microseconds"].items()
        for batch, micros in by_batch.items()
    ]
    return (
        "\nPython that a step has more than stock vLLM's, in microseconds, in the engine's process (`python -m\n"
        f"benchmarks.step`, which says what is where; {_loaded(result)}):\n\n"
        + table(("step", "batch", "added", "before"), rows)
        + "\n*Before*: the build before, which looked at the room of every reader in each step.\n"
        "\nWhat a request of a wave adds there: 256 come at once (of those with 96 sites 16), have their prompts' step and\n"
        "one more, and are gone; microseconds per request in all, and in brackets those of the build before:\n\n"
        + table(
            ("wave of", *next(iter(result["wave"].values()))),
            [
                (
                    kind,
                    *(f"{micros:.0f} ({result['before']['wave'][kind][part]:.0f})" for part, micros in parts.items()),
                )
                for kind, parts in result["wave"].items()
            ],
        )
    )


def _outputs(table: MakeTable) -> str:
    """What an output takes in the front end."""
    result = json.loads((RESULTS / "outputs.json").read_text())
    by_kind = result["microseconds"]
    rows = [
        (case, *(f"{found[case] / found['stock vLLM']:.2f}" for found in by_kind.values()))
        for case in next(iter(by_kind.values()))
    ]
    return (
        "\nTime of one output in the front end's output processor, as a ratio to stock vLLM's (`python -m\n"
        f"benchmarks.outputs`; {_loaded(result)}); stock takes "
        + " and ".join(f"{found['stock vLLM']:.1f} µs {kind}" for kind, found in by_kind.items())
        + ":\n\n"
        + table(("requests", *by_kind), rows)
    )


def _loaded(result: Mapping[str, Any]) -> str:
    about = result["environment"]
    return f"{about['cpus']} cores, load average {about['load_average'][0]:.1f}"


def page(table: MakeTable) -> str:
    """The whole page, from every ``gpu-cost-*.json``, every ``load*.json`` and the results of the host's benchmarks."""
    sections = [_section(_costs(path.name), path.name, table) for path in sorted(RESULTS.glob("gpu-cost-*.json"))]
    sections += [
        kernels_of(json.loads(path.read_text()), path.name, table) for path in RESULTS.glob("gpu-kernels.json")
    ]
    sections += [
        timeline(json.loads(path.read_text()), path.name, table) for path in sorted(RESULTS.glob("gpu-timeline*.json"))
    ]
    sections += [second_stream(table), compiled(table)]
    sections += [_load(json.loads(path.read_text()), path.name, table) for path in sorted(RESULTS.glob("load*.json"))]
    pinned = json.loads((RESULTS / "gpu-pinned.json").read_text())
    return (
        HEAD
        + _aims(table)
        + "".join(sections)
        + _pinned(pinned, table)
        + host(table)
        + _steps(table)
        + _outputs(table)
        + _limits()
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
    """Milliseconds of stock vLLM's step, what one with probes takes more, and what of it taps and products are."""
    steps = json.loads((RESULTS / file).read_text())["variants"]
    stock, probes = steps["stock"]["step"], steps[_PROBES]
    return stock, probes["step"] - stock, *spent_on_taps_and_products(probes)


def _idle_taps() -> str:
    """Microseconds that a joined launch adds to a step, by its batch."""
    launches = 2 * LAYERS + 1
    rows = [row for row in json.loads((RESULTS / "gpu-taps.json").read_text())["rows"] if row["taps"] == "idle"]
    return ", ".join(f"{max(row['added_us']['joined'], 0) / launches:.1f} (batch {row['tokens']})" for row in rows)


def _aims(table: MakeTable) -> str:
    """Every figure that was aimed at, and what was found."""
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
    front = json.loads((RESULTS / "front-end.json").read_text())["added_ms_per_request"]
    for name, most in FRONT_END_TARGETS.items():
        spent = front[name]
        rows.append((f"front end: {name}", f"CPU ≤ {most:g} ms", f"{spent:.2f}", "yes" if spent <= most else "no"))
    speeds = [
        each["pinned"] for each in json.loads((RESULTS / "gpu-pinned.json").read_text())["gb_per_second"].values()
    ]
    rows.append(("captured rows to pinned memory", "≥ 5 GB/s", f"{min(speeds):.1f} to {max(speeds):.1f}",
                 "yes" if min(speeds) >= 5 else "no"))  # fmt: skip
    share = _tables_share()
    rows.append(
        ("tables at defaults", "≤ 1 % of the weights", f"{100 * share:.2f} %", "yes" if share <= 0.01 else "no")
    )
    return AIMED + table(("what", "aim", "found (batch)", "reached"), rows)


def _tables_share() -> float:
    """What the tables take of the memory of a Llama-8B's weights, in bfloat16, with vLLM's defaults for a server."""
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
    """The results of ``cost.py``; first tokens are computed from the raw times, as the older ones were otherwise."""
    result: dict[str, Any] = json.loads((RESULTS / file).read_text())
    for found in (each for by_batch in result["variants"].values() for each in by_batch.values()):
        if "first token" in found:
            found["first token"] = first_token(found["raw"], found.get("engines", 1))
    return result


def cell(file: str, variant: str, batch: str, figure: str) -> float | None:
    found = _costs(file)["variants"].get(variant, {}).get(batch, {}).get(figure)
    return None if found is None else float(found)


def _pinned(result: Mapping[str, Any], table: MakeTable) -> str:
    rows = [
        (rows, f"{found['mib']:.0f}", f"{found['pinned']:.1f}", f"{found['owned']:.1f}")
        for rows, found in result["gb_per_second"].items()
    ]
    return PINNED.format(**result["environment"]) + table(("rows", "MiB", "pinned", "own memory"), rows)


def _load(result: Mapping[str, Any], name: str, table: MakeTable) -> str:
    percentiles = tuple(next(iter(result["ratios"].values())))
    rows = [
        (run, *(f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in (found[p] for p in percentiles)))
        for run, found in result["ratios"].items()
    ]
    about = {**result["setup"], **result["environment"], "pairs": len(result["pairs"]), "name": name}
    return LOAD.format(**about) + table(("clients", *percentiles), rows)


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
        + table(("what", "batch", "per token", "first token", "throughput", "stock, ms per token", "aim"), rows)
    )


def _title(result: Mapping[str, Any]) -> str:
    """What sets it apart from other results of its shape: its lots (``benchmarks/lots.py``), or as it was named."""
    lots = [what for _, _, what in (name.partition(", ") for name in result.get("lots", ())) if what]
    return str(result.get("title", " and ".join(lots)))


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
