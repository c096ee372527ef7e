# SPDX-License-Identifier: Apache-2.0
"""Sentences and a table about models that ran with vLLM's own kernels on a GPU (tests/gpu/test_frontier.py)."""

from __future__ import annotations

import json
from typing import Any

from pages import RESULTS, table

MIXED = ("HYPER-CONNECTIONS", "ATTENTION-RESIDUALS")
"""Families with several residual streams, except Gemma 3n's."""
CONVOLVED = "CONVOLVED"
"""Family of Inkling."""
ANCHOR = "with-vllms-own-kernels-on-a-gpu"
NOTES = {
    "deepseek_v4_quantised": "activations in 8-bit floats: a row may be off by 12.5 %, an edit by 10 %",
    "gemma3n": "against HF Transformers: a row may be off by 2 %, an edit by 5 % of its effect",
    "llama_nvfp4": "by identities of quantised weights, whose errors are not recorded",
}
"""Rows with limits of their own."""


def passed() -> list[dict[str, Any]]:
    """Return the outcomes of the models that passed, in the order of the file; none without a file."""
    path = RESULTS / "frontier-gpu.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["outcome"] == "passed"]


def section() -> str:
    """Return the table of the models that passed."""
    head = (
        *("row", "architecture", "family", "attention", "cache", "weights", "capture error", "edit error", "ran on"),
        "note",
    )
    return table(head, [_cells(row) for row in passed()])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    about = row["environment"]
    return (
        f"`{row['row']}`",
        f"`{row['architecture']}`",
        row.get("recipe", ""),
        ", ".join(f"`{backend}`" for backend in row.get("attention", ())),
        "" if row.get("cache", "auto") == "auto" else row["cache"],
        row.get("quantization") or row["dtype"],
        f"{row['value']:.0e}" if "value" in row else "",
        f"{row['of_effect_at_median']:.1%}" if "of_effect_at_median" in row else "",
        f"{about['gpu']}, torch {about['torch'].partition('+')[0]}, {about['date']}",
        "; ".join(
            [
                *(f"formula instead of a kernel: {each}" for each in row.get("replaced", ())),
                *([row["note"]] if "note" in row else []),
                *([NOTES[row["row"]]] if row["row"] in NOTES else []),
            ]
        ),
    )


def inkling() -> str:
    """Return the sentence about runs of Inkling's kernels."""
    found = [row for row in passed() if row.get("recipe") == CONVOLVED]
    if not found:
        return "No run of Inkling's kernels on a GPU has been made."
    return f"Inkling's own kernels [have run on a GPU](#{ANCHOR})."


def mixes() -> str:
    """Return the sentence about runs of the kernels of the mixes."""
    found = sorted({f"`{row['architecture']}`" for row in passed() if row.get("recipe") in MIXED})
    if not found:
        return "No run on a GPU with vLLM's own kernels of the mixes has been made.\n"
    return (
        f"With vLLM's own kernels of the mixes, runs on a GPU [have passed](architectures.md#{ANCHOR}) for\n"
        f"{', '.join(found)}; `KimiLinearForCausalLM` is Kimi K3.\n"
        "Gemma 3n has passed in float32, against HF Transformers.\n"
    )
