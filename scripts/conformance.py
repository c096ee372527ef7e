# SPDX-License-Identifier: Apache-2.0
"""Prove every architecture that a CPU can run, and write benchmarks/results/architectures.json.

    python scripts/conformance.py                 all rows, in two processes
    python scripts/conformance.py llama zamba2    only these rows, merged into the existing results

Rows that run on another vLLM than the results' (``PYTHONPATH=build/newest:.``) name its version.
scripts/reference.py writes docs/reference/architectures.md from the results. The exit status is 1 if a row is not
proven.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OUT = ROOT / "benchmarks" / "results" / "architectures.json"
WORKERS = 2
TASK = 8
"""Rows per process: starting a process takes as long as proving a few rows."""


def main(names: Annotated[list[str] | None, typer.Argument(help="Rows; all if none.")] = None) -> None:
    """Prove the rows and write the results."""
    from tests.conformance.engine import prepare_environment

    prepare_environment()
    from tests.conformance.inventory import inventory
    from tests.conformance.no_reference import NO_REFERENCE
    from tests.conformance.selection import runs_here
    from tests.conformance.zoo import ZOO

    rows = [tiny for tiny in (*ZOO, *NO_REFERENCE) if not tiny.gpu_only]
    here = [tiny.name for tiny in rows if runs_here(tiny)]
    chosen = names or here
    if unknown := [name for name in chosen if name not in here]:
        raise typer.BadParameter(f"no such rows for a CPU and this vLLM: {', '.join(unknown)}")
    results = json.loads(OUT.read_text()) if OUT.exists() else {"rows": []}
    by_name = {row["row"]: row for row in results["rows"] if names or row["row"] not in here}
    about = _about()
    version = {"vllm": about["vllm"]} if names and about["vllm"] != results.get("vllm", about["vllm"]) else {}
    if not version:
        results |= {**about, "registry": [asdict(entry) for entry in inventory()]}
    found: list[dict[str, Any]] = []
    parts = [chosen[start : start + TASK] for start in range(0, len(chosen), TASK)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_run, part) for part in parts]):
            found += [{**row, **version} for row in done.result()]
            by_name |= {row["row"]: row for row in found}
            results["rows"] = [by_name[tiny.name] for tiny in rows if tiny.name in by_name]
            # Written after each task, so that a later crash loses nothing.
            OUT.write_text(json.dumps(results, indent=1) + "\n")
    failed = [row for row in found if "problem" in row]
    print(f"{len(found) - len(failed)} rows proven, {len(failed)} not")
    for row in failed:
        print(f"{row['row']}: {row['problem']}")
    raise typer.Exit(bool(failed))


def _about() -> dict[str, Any]:
    import transformers
    import vllm

    return {
        "vllm": vllm.__version__, "transformers": transformers.__version__, "device": "CPU", "dtype": "float32",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }  # fmt: skip


def _run(names: Sequence[str]) -> list[dict[str, Any]]:
    """Prove some rows in this process; a failed row reports its problem and does not stop the others."""
    from tests.conformance.engine import prepare_environment

    prepare_environment()
    from tests.conformance.no_reference import NO_REFERENCE
    from tests.conformance.proof import prove
    from tests.conformance.reference_process import ReferenceProcess
    from tests.conformance.zoo import ZOO

    by_name = {tiny.name: tiny for tiny in (*ZOO, *NO_REFERENCE)}
    rows = []
    with tempfile.TemporaryDirectory() as folder, ReferenceProcess() as reference:
        for name in names:
            tiny = by_name[name]
            try:
                proof = prove(tiny, Path(folder), reference)
            except Exception as error:
                traceback.print_exc()
                rows.append({"row": name, "problem": f"{type(error).__name__}: {error}"})
                continue
            row = proof.as_row(tiny)
            if problems := proof.problems(tiny):
                row["problem"] = "; ".join(problems[:5])
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    typer.run(main)
