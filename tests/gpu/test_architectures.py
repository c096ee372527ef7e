# SPDX-License-Identifier: Apache-2.0
"""GPU: proofs of architectures whose kernels exist on GPUs only, and of one per family, in bfloat16.

Value and cause are proven inside vLLM (``tests/conformance/identities.py``). If HF Transformers has the model, captured
rows are also compared with HF's in float32 on the CPU, loosely, since bfloat16 rounds every sum (``Proof.problems``).
Results are written to ``benchmarks/results/architectures-gpu.json`` or $ARCHITECTURES_OUT.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.engine import prepare_environment

prepare_environment()

from tests.conformance.gpu_rows import ON_GPU  # noqa: E402
from tests.conformance.proof import Proof, prove_by_identities  # noqa: E402
from tests.conformance.reference_process import ReferenceProcess  # noqa: E402

pytestmark = pytest.mark.gpu

RUNNER = "0"
"""Runner V1 supports every architecture; test_engine.py compares both runners."""
OUT = Path(os.environ.get("ARCHITECTURES_OUT", "benchmarks/results/architectures-gpu.json"))


@pytest.fixture(scope="module")
def reference_process() -> Iterator[ReferenceProcess]:
    with ReferenceProcess() as process:
        yield process


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    import torch
    import vllm

    found: list[dict[str, Any]] = []
    yield found
    about = {
        "vllm": vllm.__version__, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(), "dtype": "bfloat16",
    }  # fmt: skip
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


@pytest.mark.parametrize("name", list(ON_GPU))
def test_values_and_causes(
    name: str, reference_process: ReferenceProcess, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Catches a tap on the wrong side of a sublayer, on one summand of two, or off by one layer."""
    tiny = dataclasses.replace(ON_GPU[name], dtype="bfloat16")
    proof: Proof = prove_by_identities(tiny, tmp_path, reference_process)
    problems = proof.problems(tiny)
    assert not problems, "\n".join(problems)
    results.append(proof.as_row(tiny))
