# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/architectures.md: what is proven of every architecture in vLLM's registry."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vllm_steer.models.proofs import Proof, Record
from vllm_steer.models.recipes import RECIPES
from vllm_steer.models.unsupported import UNSUPPORTED

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Row = Mapping[str, Any]
MakeTable = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

PROVEN, WRAPPED, REFUSAL, NO_DECODER = "proven", "by its language model", "refused", "no decoder"
OUTSTANDING = "outstanding"
POOLS = "pools hidden states and generates nothing"
DRAFTS = "a drafter: the model that it drafts for is steered"
BACKEND = "runs the layers of Transformers: as the class of those"


@dataclass(frozen=True)
class Results:
    """All results: rows by architecture, every sound row, and the layer classes (short names) that they prove."""

    about: Row
    rows: Mapping[str, Row]
    every: Sequence[Row]
    layers: frozenset[str]
    registry: Sequence[Row]


def load() -> Results:
    """The CPU's results, and the GPU's where there are any; a row that failed proves nothing."""
    cpu = json.loads((RESULTS / "architectures.json").read_text())
    path = RESULTS / "architectures-gpu.json"
    gpu = json.loads(path.read_text()) if path.exists() else {"rows": []}
    tagged = [(row, cpu) for row in cpu["rows"]] + [(row, gpu) for row in gpu["rows"]]
    rows: dict[str, Row] = {}
    every = [{"dtype": w["dtype"], **row} for row, w in tagged if "problem" not in row and "architecture" in row]
    for row in every:
        rows.setdefault(row["architecture"], row)
    layers = {layer for row, _ in tagged if "problem" not in row for layer in row.get("layers", ())}
    layers |= {_short(name) for name, recipe in RECIPES.items() if _short(recipe.inherits) in layers}
    return Results(cpu, rows, every, frozenset(layers), cpu["registry"])


def record() -> Record:
    """What the package says of its proofs: of an architecture the first row, and those with other layer classes."""
    results = load()
    kept: list[Proof] = []
    for proof in msgspec.convert(results.every, list[Proof]):
        seen = {layer for other in kept if other.architecture == proof.architecture for layer in other.layers}
        if not set(proof.layers) <= seen:
            kept.append(proof)
    return Record(results.about["vllm"], tuple(sorted(kept, key=lambda proof: proof.architecture)))


def _short(layer: str) -> str:
    return layer.rpartition(".")[2]


def status(entry: Row, results: Results) -> tuple[str, str]:
    """What is said of one name of the registry, and why."""
    name, layers = entry["architecture"], entry["layers"]
    short = [_short(layer) for layer in layers]
    if name in results.rows:
        return PROVEN, results.rows[name]["proof"]
    if entry["kind"] in ("pooling", "drafter", "backend"):
        return NO_DECODER, {"pooling": POOLS, "drafter": DRAFTS, "backend": BACKEND}[entry["kind"]]
    if refused := [layer for layer in layers if layer in UNSUPPORTED]:
        return REFUSAL, UNSUPPORTED[refused[0]]
    same = [
        other["architecture"]
        for other in results.registry
        if (other["module"], other["cls"]) == (entry["module"], entry["cls"]) and other["architecture"] in results.rows
    ]
    if same and entry["kind"] == "text":
        return PROVEN, f"the same code as {same[0]}"
    unproven = [layer for layer in short if layer not in results.layers]
    if unproven and not entry["others"] and all(layer in RECIPES for layer in layers):
        return OUTSTANDING, ", ".join(f"`{layer}`" for layer in unproven)
    if unproven or entry["others"]:
        missing = ", ".join(f"`{layer}`" for layer in (*unproven, *(_short(o) for o in entry["others"])))
        return REFUSAL, f"no recipe is proven for {missing}"
    if entry["kind"] in ("multimodal", "text"):
        return WRAPPED, ", ".join(f"`{layer}`" for layer in short) or "whichever its config names"
    return REFUSAL, "no recipe is proven for its decoder layers"


def page(table: MakeTable) -> str:
    """The whole page."""
    results = load()
    found = [(entry, *status(entry, results)) for entry in results.registry]
    count = Counter(kind for _, kind, _ in found)
    beyond = [row for name, row in results.rows.items() if name not in {e["architecture"] for e in results.registry}]
    proven = [
        (f"`{entry['architecture']}`", *_figures(results.rows.get(entry["architecture"]), why))
        for entry, kind, why in found
        if kind == PROVEN
    ] + [(f"`{row['architecture']}`", *_figures(row, row["proof"])) for row in beyond]
    about = results.about
    return (
        "# Architectures\n\n"
        f"What is proven of every architecture in the registry of vLLM {about['vllm']}: of {len(found)} names,\n"
        f"{count[PROVEN]} are proven (and {len(beyond)} more that vLLM runs on its Transformers backend),"
        f" {count[WRAPPED]} are steered by layers that are proven in other\n"
        f"models (multimodal wrappers), {count[OUTSTANDING]} wait for a proof on a GPU and are refused until then, {count[REFUSAL]} are refused when the engine starts, and\n"
        f"{count[NO_DECODER]} have no decoder"
        f" to steer. Measured on {about['date']} with\n"
        f"Transformers {about['transformers']} by `make conformance`; what needs a GPU by `tests/gpu/test_architectures.py`.\n\n"
        "Each model is the real architecture shrunk to four layers, at least one of each kind it has, with random weights.\n"
        "**HF Transformers**: every captured row and every edit against hooks on HF's modules. **Identities inside vLLM**,\n"
        "where there is no such model in HF or its numbers differ from vLLM's for reasons of their own: rows against forward\n"
        "hooks on vLLM's modules, edits against the same change made by such hooks. *Value* is the largest relative distance\n"
        "of a captured row, *cause* the largest difference of a log-probability under an edit; in bfloat16, edits may differ by\n"
        "a twentieth of their effect as a rule. `post_attn` is missing where attention and MLP run in parallel. Points on the\n"
        "branches stand beside the others where the run has proven them; [models](models.md) has what each class serves.\n"
        "Multimodal models are asked with text alone. On a CPU, Mamba 1's recurrence is its formula in PyTorch and Step 1's\n"
        "attention bias has no square root, since vLLM's kernels for them need a GPU; all other code is vLLM's own.\n\n"
        "## Proven\n\n"
        + table(("architecture", "decoder layers", "family", "points", "proof", "value", "cause", "dtype"), proven)
        + "\n## By their layers\n\n"
        "Multimodal wrappers (and a few others without a row of their own) are steered in the language model that they wrap,\n"
        "whose layers are proven above; a tower is never touched. Of a wrapper whose config chooses the language model, the same checks decide when the engine starts.\n\n"
        + table(("architecture", "decoder layers"), _two(found, WRAPPED))
        + (
            "\n## Outstanding\n\nTheir recipe needs a GPU to be proven, and such a run failed or was not made. Refused unless\n"
            "`--steering-allow-unproven` is given, and then with a warning.\n\n"
            + table(("architecture", "decoder layers"), _two(found, OUTSTANDING))
            if count[OUTSTANDING]
            else ""
        )
        + "\n## Refused\n\nWhen the engine starts, with this reason.\n\n"
        + table(("architecture", "why"), _two(found, REFUSAL))
        + "\n## No decoder to steer\n\n"
        + table(("architecture", "why"), _two(found, NO_DECODER))
    )


def _figures(row: Row | None, why: str) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", why, "", "", "")
    return (
        ", ".join(f"`{layer}`" for layer in row["layers"]), row["recipe"], ", ".join(f"`{p}`" for p in (*row["points"], *row.get("branches", ()))),
        why, f"{row['value']:.0e}", f"{row['cause']:.0e}", row["dtype"],
    )  # fmt: skip


def _two(found: Sequence[tuple[Row, str, str]], wanted: str) -> list[tuple[str, ...]]:
    return [(f"`{entry['architecture']}`", why) for entry, kind, why in found if kind == wanted]
