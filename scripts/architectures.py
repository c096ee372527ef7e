# SPDX-License-Identifier: Apache-2.0
"""Page docs/reference/architectures.md: the status of every architecture in vLLM's registry."""

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
from vllm_steer.models.unsupported import UNSUPPORTED, UNSUPPORTED_ARCHITECTURES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BACKEND_LAYERS = {
    "Emu3ForConditionalGeneration": "Emu3DecoderLayer",
    "HunYuanVLForConditionalGeneration": "HunYuanVLDenseV1DecoderLayer",
    "VibeVoiceAsrForConditionalGeneration": "Qwen2DecoderLayer",
}
"""Layers of multimodal models that vLLM runs on its Transformers backend, whose source does not name them."""
Row = Mapping[str, Any]
MakeTable = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

PROVEN, WRAPPED, REFUSAL, NO_DECODER = "proven", "by its language model", "refused", "no decoder"
OUTSTANDING = "outstanding"
POOLS = "pools hidden states and generates nothing"
DRAFTS = "is a drafter; its target model is steered"
BACKEND = "runs the layers of Transformers, whose class decides"


@dataclass(frozen=True)
class Results:
    """All results: rows by architecture, every proven row, and the layer classes (short names) that they prove."""

    about: Row
    rows: Mapping[str, Row]
    every: Sequence[Row]
    layers: frozenset[str]
    registry: Sequence[Row]


def load() -> Results:
    """Return the results of the CPU and, if any, of the GPU, without failed rows."""
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
    """Return the record of proofs: per architecture the first row, and those with other layer classes."""
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
    """Return the status of one name of the registry, and the reason."""
    name, layers = entry["architecture"], entry["layers"]
    short = [_short(layer) for layer in layers]
    if name in results.rows:
        return PROVEN, results.rows[name]["proof"]
    if entry["kind"] in ("pooling", "drafter", "backend"):
        return NO_DECODER, {"pooling": POOLS, "drafter": DRAFTS, "backend": BACKEND}[entry["kind"]]
    if name in UNSUPPORTED_ARCHITECTURES:
        return REFUSAL, UNSUPPORTED_ARCHITECTURES[name]
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
    if (layer := BACKEND_LAYERS.get(name)) is not None:
        return WRAPPED if layer in results.layers else OUTSTANDING, f"`{layer}`"
    if entry["kind"] in ("multimodal", "text"):
        return WRAPPED, ", ".join(f"`{layer}`" for layer in short) or "the one that its config names"
    return REFUSAL, "no recipe is proven for its decoder layers"


def page(table: MakeTable) -> str:
    """Return the page."""
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
        f"Status of every architecture in the registry of vLLM {about['vllm']}. Of {len(found)} names, {count[PROVEN]} are proven\n"
        f"(and {len(beyond)} more that are not in the registry), {count[WRAPPED]} are steered by layers that are proven in\n"
        f"other models (multimodal wrappers), {_waiting(count[OUTSTANDING])}{count[REFUSAL]} {'is' if count[REFUSAL] == 1 else 'are'} refused\n"
        f"when the engine starts, and {count[NO_DECODER]} have no decoder to steer. Measured on {about['date']} with Transformers\n"
        f"{about['transformers']} by `make conformance`; GPU-only architectures by `tests/gpu/test_architectures.py`.\n\n"
        "Each model is the real architecture shrunk to four layers, with at least one layer of each kind and random weights.\n"
        "**HF Transformers**: every captured row and every edit is compared with hooks on HF's modules. **Identities inside\n"
        "vLLM**, if HF has no such model or computes different numbers: rows are compared with forward hooks on vLLM's modules,\n"
        "edits with the same change made by such hooks. *Value* is the largest relative distance of a captured row, *cause* the\n"
        "largest difference of a log-probability under an edit. In bfloat16 the median edit may be off by a twentieth of its effect.\n"
        "`post_attn` is missing if attention and MLP run in parallel. *Points* includes the points on the branches that the run\n"
        "has proven; [models](models.md) lists what each class serves. Requests to multimodal models contain only text. On a CPU,\n"
        "Mamba 1's recurrence is its formula in PyTorch and Step 1's attention bias has no square root, since vLLM has only GPU\n"
        "kernels for them. Plain attention replaces the sparse and the delta attention of DeepSeek V3.2, GLM 5, MiniMax M3,\n"
        "Kimi-Linear, Ling 3 and models with [several residual streams](streams.md), whose kernels of mixes are replaced by their\n"
        "formulas and experts of DeepSeek V4 and Qwen 4 by an MLP. A function of the token replaces the attention of\n"
        "Whisper, Cohere ASR and Nemotron Parse to their encoders, and plain attention Inkling's attention and, with a cache of\n"
        "its own, each of its convolutions of a branch; no run of Inkling's kernels on a GPU has been made. All other code, the\n"
        "decoder layers included, is vLLM's own.\n\n"
        "## Proven\n\n"
        + table(("architecture", "decoder layers", "family", "points", "proof", "value", "cause", "dtype"), proven)
        + "\n## By their layers\n\n"
        "In multimodal wrappers (and a few others without a row of their own) the wrapped language model is steered, whose layers\n"
        "are proven above; towers never are. If a wrapper's config chooses the language model, the engine checks its layers at start.\n\n"
        + table(("architecture", "decoder layers"), _two(found, WRAPPED))
        + (
            "\n## Outstanding\n\nTheir recipes need a proof, and such a run failed or was not made. The engine refuses them\n"
            "without `--steering-allow-unproven`, and warns with it.\n\n"
            + table(("architecture", "decoder layers"), _two(found, OUTSTANDING))
            if count[OUTSTANDING]
            else ""
        )
        + "\n## Refused\n\nThe engine does not start and reports this reason.\n\n"
        + table(("architecture", "why"), _two(found, REFUSAL))
        + "\n## No decoder to steer\n\n"
        + table(("architecture", "why"), _two(found, NO_DECODER))
    )


def _waiting(outstanding: int) -> str:
    return f"{outstanding} need a proof and are refused until then, " if outstanding else ""


def _figures(row: Row | None, why: str) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", why, "", "", "")
    return (
        ", ".join(f"`{layer}`" for layer in row["layers"]), row["recipe"], ", ".join(f"`{p}`" for p in (*row["points"], *row.get("branches", ()))),
        why, f"{row['value']:.0e}", f"{row['cause']:.0e}", row["dtype"],
    )  # fmt: skip


def _two(found: Sequence[tuple[Row, str, str]], wanted: str) -> list[tuple[str, ...]]:
    return [(f"`{entry['architecture']}`", why) for entry, kind, why in found if kind == wanted]
