# SPDX-License-Identifier: Apache-2.0
"""Page docs/reference/architectures.md: the status of every architecture in vLLM's registry."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import frontier_page
import msgspec
from pages import RESULTS, load_result, table

from vllm_steer.models.proofs import Proof
from vllm_steer.models.recipes import RECIPES
from vllm_steer.models.unsupported import UNSUPPORTED, UNSUPPORTED_ARCHITECTURES

BACKEND_LAYERS = {
    "Emu3ForConditionalGeneration": "Emu3DecoderLayer",
    "HunYuanVLForConditionalGeneration": "HunYuanVLDenseV1DecoderLayer",
    "VibeVoiceAsrForConditionalGeneration": "Qwen2DecoderLayer",
}
"""Layers of multimodal models that vLLM runs on its Transformers backend, whose source does not name them."""
Row = Mapping[str, Any]

PROVEN, WRAPPED, REFUSAL, NO_DECODER = "proven", "by its language model", "refused", "no decoder"
OUTSTANDING = "outstanding"
POOLS = "refused: pools hidden states and generates no tokens"
DRAFTS = "drafter: not steered; its target model is"
BY_CONFIG = "the decoder layers of the language model in `config.json`"
BACKEND = "runs a model of Transformers: its decoder-layer class decides"
HEAD = """# Architectures

Status of every architecture in the registry of vLLM {vllm}, which has {names} names:

* {proven} are proven (and {beyond} more that are not in this registry, {later} of them in that of a later version),
* {wrapped} are steered by decoder layers that are proven in other models (multimodal wrappers),
* {waiting}{refused} {are} refused when the engine starts,
* {drafts} are drafters for speculative decoding, which are not steered; their target models are,
* {pools} pool hidden states and generate no tokens, and are refused,
* {backend} are vLLM's Transformers backend: the decoder-layer class of the model decides whether it is steered.

Measured on {date} with Transformers {transformers} by `make conformance`; architectures that run on GPUs only by
`tests/gpu/test_architectures.py`. The column *vLLM* names the version.

Each model is the real architecture with four layers, at least one layer of each kind, and random weights. There are two kinds of proof:

* **HF Transformers**: every captured row and every edit is compared with hooks on HF's modules.
* **Identities inside vLLM**, if HF has no such model or computes different numbers: rows are compared with forward hooks on vLLM's
  modules, edits with the same change made by such hooks.

DeepSeek V4, GLM 5 Next, HY V4, Qwen 4 (Exp), Inkling and Kimi-Linear exist in HF Transformers, but vLLM has their attention for GPUs
only. `tests/conformance/test_hf_streams.py` compares the formulas that take part in their identities with HF's layers on the same
random weights: rows, edits and the final mix agree within 1e-5 in float32. Edits that the next sublayer does not read,
edits of one stream only, streams mixed in the wrong direction, and branches without their convolution are off by more than 10 %.
Transformers has no DeepSeek V4.1 and no Kimi K3.

| column | meaning |
| --- | --- |
| family | how the decoder layer computes the stream, see below |
| points | the hook points that the run has compared. [Models](models.md) lists what each class serves, which can be more. `post_attn` is missing if attention and MLP run in parallel, or if the layer has no such sum |
| capture error | the largest relative error of a captured row |
| edit error | the largest error of a log-probability after an edit |

In float32, both errors must be below 1e-4. In bfloat16, for models whose CPU kernels have no float32, these limits hold:

| error in bfloat16 | limit | for comparison |
| --- | --- | --- |
| of a captured row | 0.8 % of the stream's length | a sum is rounded by up to 0.4 % |
| of an edit, at the median token | 2 % of the effect of the strongest edit | 1.7 % is the most measured; edits one sublayer late: 30 % or more |
| the same | 50 % of the edit's own effect | |

Single tokens may be off by more: if the tests' large edits meet random weights, a rounding difference can send a token to another expert. An
*edit error* such as 2e+00 in bfloat16 is the largest such difference. DeepSeek V3 and V3.2, GLM 4.5 and 5, Kimi-Linear, gpt-oss, Nemotron-H,
Gemma 4, MiniMax M3 and Ling 3, which have proofs in float32, are also compared in bfloat16 (`tests/conformance/test_bfloat16.py`). Gemma 3n is not: these
limits are for identities inside vLLM, where both sides round alike, and its streams are compared with HF Transformers only.

| family | decoder layer |
| --- | --- |
| `FUSED` | the layer returns the stream as two summands, which the fused norm of the next layer adds |
| `FUSED-SINGLE` | the same with one branch in each layer, such as a Mamba mixer or an MLP |
| `UNFUSED` | the layer adds each branch itself and returns the stream as one tensor |
| `UNFUSED+POSTNORM` | the same; the output of a branch is normalized before it is added |
| `UNFUSED*MULT` | the same; the output of a branch is multiplied by a constant before it is added |
| `PARALLEL` | attention and MLP read the same input |
| `HYPER-CONNECTIONS`, `ALTUP` | several streams, see [models with several residual streams](streams.md) |
| `ATTENTION-RESIDUALS` | the input of each sublayer mixes stored sums of earlier layers (Kimi K3), see [streams](streams.md) |
| `CONVOLVED` | the output of a branch is convolved over tokens before it is added (Inkling) |

The runs on a CPU replace kernels that vLLM has for GPUs only:

| models | replaced | by |
| --- | --- | --- |
| Mamba 1 | the recurrence | its formula in PyTorch |
| Step 1 | the square root in the attention bias | left out |
| DeepSeek V3.2, GLM 5, MiniMax M3, Kimi-Linear, Ling 3, models with [several residual streams](streams.md) | sparse and delta attention | plain attention |
| models with several residual streams | the kernels of the mixes | their formulas |
| DeepSeek V4, Qwen 4 | experts | an MLP |
| Whisper, Cohere ASR, Nemotron Parse | the attention to the encoder | a function of the token |
| Inkling | attention and the convolutions of branches, each with its cache | plain attention with a cache of its own |

All other code, including the decoder layers, is vLLM's own. {inkling} Requests to multimodal
models contain only text.

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


def page() -> str:
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
    others = Counter(why for _, kind, why in found if kind == NO_DECODER)
    return (
        HEAD.format(
            vllm=about["vllm"],
            names=len(found),
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
            inkling=frontier_page.inkling(),
        )
        + "## Proven\n\n"
        + table(
            (
                "architecture",
                "decoder layers",
                "family",
                "points",
                "proof",
                "vLLM",
                "capture error",
                "edit error",
                "dtype",
            ),
            proven,
        )
        + frontier_page.section()
        + "\n## By their layers\n\n"
        "These are multimodal wrappers, and a few other models without a row of their own. vllm-steer steers the language model, whose\n"
        "layers are proven above or by `tests/gpu/test_architectures.py`, or inherit from such layers, and never the towers. If a wrapper's\n"
        "config names the language model, the engine checks its layers at start.\n\n"
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
        + "\n## Drafters, pooling models and the Transformers backend\n\n"
        + table(("architecture", "status"), _two(found, NO_DECODER))
    )


def _waiting(outstanding: int) -> str:
    return f"{outstanding} need a proof and are refused until then, " if outstanding else ""


def _figures(row: Row | None, why: str) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", why, "", "", "", "")
    return (
        ", ".join(f"`{layer}`" for layer in row["layers"]), row["recipe"], ", ".join(f"`{p}`" for p in (*row["points"], *row.get("branches", ()))),
        why, row["vllm"], f"{row['value']:.0e}", f"{row['cause']:.0e}", row["dtype"],
    )  # fmt: skip


def _two(found: Sequence[tuple[Row, str, str]], wanted: str) -> list[tuple[str, ...]]:
    return [(f"`{entry['architecture']}`", why) for entry, kind, why in found if kind == wanted]
