# SPDX-License-Identifier: Apache-2.0
"""GPU: the newest models with vLLM's own kernels, mixes and caches, in bfloat16.

Each engine starts with its self-check, and the identities of ``tests/conformance/identities.py`` are examined in it.
For models with several streams, the reference side runs the formulas of ``tests/conformance/mixes.py`` in place of the
layers, with vLLM's attention and experts; the side under test runs vLLM's kernels. Results
are written after each model to ``benchmarks/results/frontier-gpu.json`` or $FRONTIER_OUT, failures included.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
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
from tests.gpu.runner import choose_runner, runner_of  # noqa: E402

pytestmark = pytest.mark.gpu

OUT = Path(os.environ.get("FRONTIER_OUT", "benchmarks/results/frontier-gpu.json"))
MAX_DISTANCE, MAX_FRACTION = 2e-2, 5e-2
"""Largest distance of a row from HF's, and error of an edit by its effect; Triton may multiply in TF32."""
ROWS: dict[str, dict[str, Any]] = {}


@contextmanager
def recorded(name: str) -> Iterator[dict[str, Any]]:
    """Write a row of results, whether the test passes or fails."""
    import torch
    import vllm

    row = ROWS[name] = {"row": name, "passed": False}
    try:
        yield row
        row["passed"] = True
    except BaseException as error:
        row["error"] = "".join(traceback.format_exception(error))[-3000:].splitlines()[-25:]
        raise
    finally:
        about = {
            "vllm": vllm.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(), "dtype": "bfloat16",
        }  # fmt: skip
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps({**about, "rows": list(ROWS.values())}, indent=1) + "\n")


@contextmanager
def norm_without_flashinfer(model_class: str | None, results: dict[str, Any]) -> Iterator[None]:
    """Replace MiniMax M3's norm by its formula if FlashInfer, which vLLM uses for it, is missing; record that."""
    module = (model_class or "").partition(":")[0]
    if "minimax_m3" not in module or find_spec("flashinfer") is not None:
        yield
        return
    results["replaced"] = ["MiniMAXGemmaRMSNorm: FlashInfer is not installed"]
    with patch.object(sys.modules[module].MiniMAXGemmaRMSNorm, "forward", stand_ins.gemma_norm):
        yield


@contextmanager
def own_kernels(prompts: tuple[tuple[int, ...], ...], results: dict[str, Any]) -> Iterator[None]:
    """Run without the replacements for a CPU, on these prompts, at the rows' longest sequence."""
    with ExitStack() as stack:
        norm = partial(norm_without_flashinfer, results=results)
        stack.enter_context(patch.object(engine, "cpu_kernels", norm))
        stack.enter_context(patch.object(engine, "MAX_POSITIONS", POSITIONS))
        for module in (identities, mixed_identities):
            stack.enter_context(patch.object(module, "PROMPTS", prompts))
        yield


def about_engine(llm: Any) -> dict[str, Any]:
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


def examine(row: FrontierRow, folder: Path, results: dict[str, Any]) -> list[str]:
    """Start one engine with its self-check, examine the identities, and return the problems."""
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
    results["problems"] = proof.problems(tiny)
    assert results["self_check"]["ran"]
    return proof.problems(tiny, row.max_miss)


@pytest.mark.parametrize("row", FRONTIER, ids=str)
def test_values_and_causes(row: FrontierRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches taps that are right beside plain attention and formulas only; ``row.catches`` names the special case."""
    choose_runner(monkeypatch, row.runner)
    with recorded(str(row)) as results:
        results["catches"] = row.catches
        problems = examine(row, tmp_path, results)
        assert not problems, "\n".join(problems)


def test_gemma_3n_against_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an edit of the active stream that the prediction of the other streams does not read."""
    choose_runner(monkeypatch, "1")
    with recorded("gemma3n") as results, ReferenceProcess() as reference:
        tiny = BY_NAME["gemma3n"]
        proof = prove_against_hf(tiny, tmp_path, reference)
        results |= {"architecture": proof.architecture, "layers": list(proof.layers), "dtype": "float32"}
        results |= worst(proof)
        problems = [
            f"{check.name}: off by {check.error:.1e} of {check.effect}"
            for check in proof.checks
            if not check.error < (MAX_DISTANCE if check.effect is None else MAX_FRACTION * check.effect)
        ]
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("scheme", [s for s in quantised.SCHEMES if "nvfp4" in s.name], ids=str)
def test_nvfp4_weights(scheme: quantised.Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows and edits that Marlin's order of weights moves; Hopper has no instructions for 4-bit floats."""
    choose_runner(monkeypatch, "1")
    with recorded("llama_nvfp4") as results:
        results["catches"] = "rows that another order of 4-bit weights moves"
        quantised.examine(scheme, tmp_path)
