# SPDX-License-Identifier: Apache-2.0
"""Examination of one of the newest models in a process of its own (``frontier_outcomes.run_model``).

Each engine starts with its self-check, and the identities of ``tests/conformance/identities.py`` are examined in it.
For models with several streams, the reference side runs the formulas of ``tests/conformance/mixes.py`` in place of the
layers, with vLLM's attention and experts; the side under test runs vLLM's kernels. The outcome is written to a JSON
file, also for a failure.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from tests.conformance.engine import prepare_environment

prepare_environment()

from tests.conformance import cases, engine, identities, mixed_identities, quantised, stand_ins  # noqa: E402
from tests.conformance.branches import supported_branches  # noqa: E402
from tests.conformance.frontier_rows import (  # noqa: E402
    FRONTIER,
    LONG,
    POSITIONS,
    FrontierRow,
    frontier_weights,
    save_row,
)
from tests.conformance.identities import check_identities  # noqa: E402
from tests.conformance.model import TinyModel  # noqa: E402
from tests.conformance.proof import Proof, architecture_of, prove_against_hf  # noqa: E402
from tests.conformance.reference_process import ReferenceProcess  # noqa: E402
from tests.conformance.zoo import BY_NAME  # noqa: E402
from tests.gpu.frontier_outcomes import missing_package  # noqa: E402
from tests.gpu.runner import choose_runner, runner_of  # noqa: E402

MAX_DISTANCE, MAX_FRACTION = 2e-2, 5e-2
"""Largest distance of a row from HF's, and error of an edit by its effect; Triton may multiply in TF32."""
Results = dict[str, Any]


@contextmanager
def norm_without_flashinfer(model_class: str | None, results: Results) -> Iterator[None]:
    """Replace MiniMax M3's norm by its formula if FlashInfer, which vLLM uses for it, is missing; record that."""
    module = (model_class or "").partition(":")[0]
    if "minimax_m3" not in module or find_spec("flashinfer") is not None:
        yield
        return
    results["replaced"] = ["MiniMAXGemmaRMSNorm: FlashInfer is not installed"]
    with patch.object(sys.modules[module].MiniMAXGemmaRMSNorm, "forward", stand_ins.gemma_norm):
        yield


@contextmanager
def own_kernels(prompts: tuple[tuple[int, ...], ...], results: Results) -> Iterator[None]:
    """Run without the replacements for a CPU, on these prompts, at the rows' longest sequence."""
    with ExitStack() as stack:
        norm = partial(norm_without_flashinfer, results=results)
        stack.enter_context(patch.object(engine, "cpu_kernels", norm))
        stack.enter_context(patch.object(engine, "MAX_POSITIONS", POSITIONS))
        for module in (identities, mixed_identities):
            stack.enter_context(patch.object(module, "PROMPTS", prompts))
        yield


def about_engine(llm: Any) -> Results:
    """Return the runner, the dtype of the cache and the attention backends of a running engine."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {
        "runner": runner_of(llm),
        "attention": sorted({getattr(backend, "__name__", str(backend)) for backend in found}),
        "cache": config.cache_config.cache_dtype,
        "quantization": config.model_config.quantization,
    }


def worst(proof: Proof) -> dict[str, float]:
    """Return the largest distance of a row and the largest error of an edit, alone and as fractions of effects."""
    edits = [check for check in proof.checks if check.effect]
    return {
        "value": float(f"{proof.value:.1e}"),
        "cause": float(f"{proof.cause:.1e}"),
        "of_effect": max(round(check.error / check.effect, 4) for check in edits if check.effect),
        "of_effect_at_median": max(round(proof.miss(check), 4) for check in edits),
    }


def examine(row: FrontierRow, folder: Path, results: Results) -> None:
    """Start one engine with its self-check, and examine the identities."""
    tiny: TinyModel = row.tiny
    path = save_row(tiny, folder)
    prompts = (cases.PROMPTS[0], LONG, cases.PROMPTS[2]) if row.long else cases.PROMPTS
    with own_kernels(prompts, results), frontier_weights(tiny) as weights:
        tiny = replace(tiny, engine={**(tiny.engine or {}), **weights})
        with engine.steered_engine(tiny, path, "eager", supported_branches(tiny), self_check=True) as llm:
            results |= about_engine(llm)
            (report,) = llm.collective_rpc("steering_capabilities")
            results["self_check"] = report["self_check"]
            checks = check_identities(tiny, llm)
            proof = Proof(architecture_of(path), "identities inside vLLM", sorted(engine.layer_classes(llm)), checks)
    results |= {"architecture": proof.architecture, "layers": list(proof.layers), "checks": len(checks), **worst(proof)}
    results["problems"] = proof.problems(tiny, row.max_miss)
    if not results["self_check"]["ran"]:
        results["problems"].append(f"the self-check did not run: {results['self_check']['reason']}")


def examine_gemma_3n(folder: Path, results: Results) -> None:
    """Compare Gemma 3n with HF Transformers, in float32."""
    with ReferenceProcess() as reference:
        proof = prove_against_hf(BY_NAME["gemma3n"], folder, reference)
    results |= {"architecture": proof.architecture, "layers": list(proof.layers), "dtype": "float32"}
    results |= {"checks": len(proof.checks), **worst(proof)}
    results["problems"] = [
        f"{check.name}: off by {check.error:.1e} of {check.effect}"
        for check in proof.checks
        if not check.error < (MAX_DISTANCE if check.effect is None else MAX_FRACTION * check.effect)
    ]


def examine_nvfp4(folder: Path, results: Results) -> None:
    """Examine weights in NVFP4, which Marlin multiplies; Hopper has no instructions for 4-bit floats."""
    (scheme,) = (scheme for scheme in quantised.SCHEMES if "nvfp4" in scheme.name)
    results |= {"architecture": "LlamaForCausalLM", "layers": ["LlamaDecoderLayer"]}
    results |= {"quantization": "nvfp4", "problems": []}
    quantised.examine(scheme, folder)


OTHERS: Final[dict[str, tuple[str, Callable[[Path, Results], None], str]]] = {
    "gemma3n": (
        "an edit of the active stream that the prediction of the other streams misses", examine_gemma_3n, "ALTUP"
    ),
    "llama_nvfp4": ("rows that another order of 4-bit weights moves", examine_nvfp4, "FUSED"),
}  # fmt: skip
"""Models with other proofs: what their tests catch, the test, and the family."""
ROWS: Final = {str(row): row for row in FRONTIER}
NAMES: Final = (*ROWS, *OTHERS)
"""All models, by priority."""


def outcome_of(name: str, folder: Path) -> Results:
    """Examine a model and return its outcome."""
    row = ROWS.get(name)
    results: Results = {"row": name, "outcome": "failed", "catches": OTHERS[name][0] if row is None else row.catches}
    results |= {"dtype": "bfloat16", "recipe": OTHERS[name][2] if row is None else row.tiny.recipe}
    try:
        with pytest.MonkeyPatch.context() as change:
            choose_runner(change, "1" if row is None else row.runner)
            if row is None:
                OTHERS[name][1](folder, results)
            else:
                examine(row, folder, results)
        results["outcome"] = "failed" if results["problems"] else "passed"
    except Exception as error:
        text = "".join(traceback.format_exception(error)).replace(str(Path.home()), "~")
        results["error"] = text[-3000:].splitlines()[-25:]
        if (reason := missing_package(error)) is not None:
            results |= {"outcome": "skipped", "reason": reason}
    return results


def write_outcome(name: str, out: str) -> None:
    """Examine a model and write its outcome to a file."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = outcome_of(name, Path(folder))
    Path(out).write_text(json.dumps(outcome))
