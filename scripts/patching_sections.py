# SPDX-License-Identifier: Apache-2.0
"""Generated sections of docs/explanation/patching-compared.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from measured import machine_of
from pages import RESULTS, table


def speed() -> str:
    """Return the section on cells per second, from the results of ``patching.py``."""
    result = _read("patching.json")
    environment = result["environment"]
    return (
        f"One sweep on one machine ({environment['device']}, {environment['cpus']} cores, one thread per process, vLLM "
        f"{environment['vllm']}; `benchmarks/results/patching.json`):\n{_setup(result)}.\nThe ways took turns in "
        f"{result['setup']['rounds']} rounds; the table has medians, and the ratio to the first way within a round with "
        "its minimum and maximum.\nThe last column is the largest distance of checked cells from the hooks, in nats "
        "(`python -m benchmarks.patching`). The machine was not idle: beside the\nbenchmark ran "
        f"{environment['beside']}.\n\n"
        + _ways(result)
        + f"\n{100 * result['hit_rate_offline']:.0f} % of the prompt tokens of the offline study came from the prefix cache. "
        "The model is so small that a step's\nfixed costs, not its arithmetic, take most of the time. The loops hold all of the "
        "machine; the engine serves other requests meanwhile.\n" + _on_gpu()
    )


def _on_gpu() -> str:
    """Return the part about a model of 8 billion parameters on a GPU."""
    result = _read("gpu-patching-llama-8b.json")
    rounds = result["setup"]["rounds"]
    return (
        f"\nThe same on one {machine_of(result)} (`benchmarks/results/gpu-patching-llama-8b.json`): {_setup(result)}, "
        f"{rounds} round{'' if rounds == 1 else 's'}. {result.get('note', '')}".rstrip()
        + "\n\n"
        + _ways(result)
    )


def _setup(result: Mapping[str, Any]) -> str:
    setup = result["setup"]
    return (
        f"{setup['cells']:,} cells, {setup['layers']} layers and {setup['prompt_tokens']} positions of a random Llama with "
        f"hidden size {setup['hidden_size']:,} in {setup['dtype']}"
    )


def _ways(result: Mapping[str, Any]) -> str:
    # Absent in the result of a run that ended before it compared its grids.
    distances = result.get("largest_distance_from_hooks")
    rows = [
        (
            way,
            f"{found['cells_per_second']:.1f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*found["ratio"]),
            *([f"{distances[way]:.2g}"] if distances else []),
        )
        for way, found in result["ways"].items()
    ]
    heads = ("way", "cells per second", "ratio to the first", *(["distance"] if distances else []))
    return table(heads, rows)


def _read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result
