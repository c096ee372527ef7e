# SPDX-License-Identifier: Apache-2.0
"""Section of the performance pages about servers, from the results of ``benchmarks/serve.py``."""

from __future__ import annotations

from collections.abc import Sequence

from measured import date_of, machine_of, read
from steps_page import MakeTable

TEXT = """
## Servers of {shape}

A steering server beside stock `vllm serve` on one {machine}, driven in turn by the client of `vllm bench serve`
(`python -m benchmarks.serve`, {date}, vLLM {vllm}, torch {torch}; `benchmarks/results/{name}`): {prompt} random
prompt tokens and {output} generated tokens per request{varied}, {requests}. Ratios within a
round: median, minimum and maximum.
*CPU*: milliseconds that a request adds to stock vLLM's CPU time in the API server and in the engine core.
{waves}{note}

"""
WAVES = """Requests have one length. Without captures, they presumably end together, so that new ones come in waves and
the steps between waves only decode, while captured requests end one after another, so that they get their first token
sooner and more of their steps also compute prompts, as in traffic of mixed lengths (`--spread`; not measured yet).
"""


def served(name: str, table: MakeTable) -> str:
    """Return the section of one result."""
    result = read(name)
    setup = result["setup"]
    shown = {str(each["concurrency"]) for each in result["figures"]}
    loads = ", ".join(
        f"{count:,} requests at concurrency {at}" for at, count in setup["requests"].items() if at in shown
    )
    rows = [
        (
            each["way"],
            str(each["concurrency"]),
            *(_spread(each.get(key)) for key in ("tokens_per_second", "first_token_ms", "token_ms")),
            *(f"{each['added_cpu_ms'][process]:+.2f}" for process in ("api server", "engine core")),
            str(each["rounds"]),
        )
        for each in result["figures"]
    ]
    spread = setup.get("spread", 0.0)
    varied = f", each length up to {100 * spread:.0f} % more or less" if spread else ""
    about = {**result["environment"], **setup, "requests": loads, "varied": varied,
             "waves": "" if spread else WAVES, "shape": result["shape"], "name": name,
             "machine": machine_of(result), "date": date_of(result), "note": result.get("note", "")}  # fmt: skip
    heads = ("way", "concurrency", "throughput", "first token", "per token", "CPU, API server", "CPU, engine", "rounds")
    starts = [
        (kind, *(f"{found[key]:,}" if key in found else "" for key in ("start_seconds", "cache_gib", "cache_tokens")))
        for kind, found in result["servers"].items()
    ]
    return (
        TEXT.format(**about).replace(" \n", "\n")
        + table(heads, rows)
        + (
            f"\nStarts, with {setup['caches']} compile caches:\n\n"
            + table(("server", "seconds", "key-value cache, GiB", "tokens"), starts)
            if starts
            else ""
        )
    )


START = """
With the layer sizes of Llama 3.1 8B on an {machine}, a server with steering started {later:.0f} s later than stock vLLM
({steered:.0f} s against {stock:.0f} s, with empty compile caches) and had {less:.2f} GiB less KV cache
([Performance](../reference/performance.md)). {note}`--no-steering-plain-code` omits the second compilation.
""".lstrip()


def start(table: MakeTable) -> str:
    """Return the operator's guide's paragraph about the start of a server, from ``benchmarks/start.py``."""
    result = read("gpu-start-llama-8b.json")
    stock, steering = (result["servers"][kind] for kind in ("stock", "steering"))
    return START.format(
        machine=machine_of(result),
        stock=stock["start_seconds"],
        steered=steering["start_seconds"],
        later=steering["start_seconds"] - stock["start_seconds"],
        less=stock["cache_gib"] - steering["cache_gib"],
        note=f"{note} " if (note := result.get("note", "")) else "",
    )


def _spread(found: Sequence[float] | None) -> str:
    return "" if found is None else "{:.3f} ({:.3f} to {:.3f})".format(*found)
