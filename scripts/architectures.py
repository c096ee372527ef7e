# SPDX-License-Identifier: Apache-2.0
"""Page docs/reference/architectures.md: the status of every architecture in vLLM's registry."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import frontier_page
import msgspec
from pages import RESULTS, load_result, table

from vllm_steer.models.proofs import Proof
from vllm_steer.models.recipes import RECIPES, UNSUPPORTED

BACKEND_LAYERS = {
    "Emu3ForConditionalGeneration": "Emu3DecoderLayer",
    "HunYuanVLForConditionalGeneration": "HunYuanVLDenseV1DecoderLayer",
    "VibeVoiceAsrForConditionalGeneration": "Qwen2DecoderLayer",
}
"""Layers of multimodal models that vLLM runs on its Transformers backend, whose source does not name them."""
UNSUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "DiffusionGemmaForBlockDiffusion": "it is a diffusion language model: its tokens are not generated in order",
    "NanbeigeForCausalLM": (
        "vLLM runs it with Transformers, which has no class of it, so its layers are remote code that comes with each "
        "checkpoint; no proof of one checkpoint's code holds for another's"
    ),
}
"""Architectures that are refused although classes of layers that they name have a recipe, or name none."""
Row = Mapping[str, Any]

PROVEN, WRAPPED, REFUSAL, NO_DECODER = "proven", "by its language model", "refused", "no decoder"
OUTSTANDING = "outstanding"
POOLS = "refused: pools hidden states and generates no tokens"
DRAFTS = "drafter: not steered; its target model is"
BY_CONFIG = "the decoder layers of the language model in `config.json`"
BACKEND = "runs a model of Transformers: its decoder-layer class decides"
HEAD = """Status of every architecture in the registry of vLLM {vllm}, which has {names} names:

* {proven} are proven (and {beyond} more that are not in this registry, {later} of them in that of a later version),
* {wrapped} are steered by decoder layers that are proven in other models (multimodal wrappers),
* {waiting}{refused} {are} refused when the engine starts,
* {drafts} are drafters for speculative decoding, which are not steered; their target models are,
* {pools} pool hidden states and generate no tokens, and are refused,
* {backend} are vLLM's Transformers backend: the decoder-layer class of the model decides whether it is steered.

Measured on {date} with Transformers {transformers} by `make conformance`; architectures that run on GPUs only by
`tests/gpu/test_architectures.py`. The column *vLLM* names the version.
"""


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
    cpu = load_result("architectures.json")
    path = RESULTS / "architectures-gpu.json"
    gpu = json.loads(path.read_text()) if path.exists() else {"rows": []}
    tagged = [(row, cpu) for row in cpu["rows"]] + [(row, gpu) for row in gpu["rows"]]
    rows: dict[str, Row] = {}
    every = [
        {"dtype": w["dtype"], "vllm": w["vllm"], **row}
        for row, w in tagged
        if "problem" not in row and "architecture" in row
    ]
    for row in every:
        rows.setdefault(row["architecture"], row)
    layers = {layer for row, _ in tagged if "problem" not in row for layer in row.get("layers", ())}
    layers |= {_short(name) for name, recipe in RECIPES.items() if _short(recipe.inherits) in layers}
    return Results(cpu, rows, every, frozenset(layers), cpu["registry"])


def record() -> list[Proof]:
    """Return the proofs of the package: per architecture the first row, and those with other layer classes."""
    kept: list[Proof] = []
    for proof in msgspec.convert(load().every, list[Proof]):
        seen = {layer for other in kept if other.architecture == proof.architecture for layer in other.layers}
        if not set(proof.layers) <= seen:
            kept.append(proof)
    return sorted(kept, key=lambda proof: proof.architecture)


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
        return WRAPPED, ", ".join(f"`{layer}`" for layer in short) or BY_CONFIG
    return REFUSAL, "no recipe is proven for its decoder layers"


@cache
def _found() -> list[tuple[Row, str, str]]:
    """Return each entry of the registry with its status and the reason."""
    results = load()
    return [(entry, *status(entry, results)) for entry in results.registry]


def _beyond(results: Results) -> list[Row]:
    """Return the rows of architectures that are not in the registry."""
    return [row for name, row in results.rows.items() if name not in {e["architecture"] for e in results.registry}]


def summary() -> str:
    """Return the number of architectures with each status."""
    results = load()
    count = Counter(kind for _, kind, _ in _found())
    beyond, about = _beyond(results), results.about
    others = Counter(why for _, kind, why in _found() if kind == NO_DECODER)
    return HEAD.format(
        vllm=about["vllm"],
        names=len(_found()),
        proven=count[PROVEN],
        beyond=len(beyond),
        later=sum(row["vllm"] != about["vllm"] for row in beyond),
        wrapped=count[WRAPPED],
        waiting=_waiting(count[OUTSTANDING]),
        refused=count[REFUSAL],
        are="is" if count[REFUSAL] == 1 else "are",
        drafts=others[DRAFTS],
        pools=others[POOLS],
        backend=others[BACKEND],
        date=about["date"],
        transformers=about["transformers"],
    )


def proven() -> str:
    """Return the table of proofs."""
    results = load()
    rows = [
        (f"`{entry['architecture']}`", *_figures(results.rows.get(entry["architecture"]), why))
        for entry, kind, why in _found()
        if kind == PROVEN
    ] + [(f"`{row['architecture']}`", *_figures(row, row["proof"])) for row in _beyond(results)]
    head = (
        *("architecture", "decoder layers", "family", "points", "proof", "vLLM", "capture error", "edit error"), "dtype",
    )  # fmt: skip
    return table(head, rows)


def _waiting(outstanding: int) -> str:
    return f"{outstanding} need a proof and are refused until then, " if outstanding else ""


def _figures(row: Row | None, why: str) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", why, "", "", "", "")
    return (
        ", ".join(f"`{layer}`" for layer in row["layers"]), row["recipe"], ", ".join(f"`{p}`" for p in (*row["points"], *row.get("branches", ()))),
        why, row["vllm"], f"{row['value']:.0e}", f"{row['cause']:.0e}", row["dtype"],
    )  # fmt: skip


def _with_status(wanted: str, reason: str) -> str:
    """Return the table of the architectures with a status, and the reason of each."""
    found = [(f"`{entry['architecture']}`", why) for entry, kind, why in _found() if kind == wanted]
    return table(("architecture", reason), found) if found else "None.\n"


SECTIONS = {
    "summary": summary,
    "inkling": lambda: frontier_page.inkling() + "\n",
    "proven": proven,
    "gpu": frontier_page.section,
    "by-layers": partial(_with_status, WRAPPED, "decoder layers"),
    "outstanding": partial(_with_status, OUTSTANDING, "decoder layers"),
    "refused": partial(_with_status, REFUSAL, "why"),
    "others": partial(_with_status, NO_DECODER, "status"),
}
"""Generated sections of the page."""
