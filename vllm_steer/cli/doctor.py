# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer doctor``: what a model will serve, from its configuration alone; with ``--prove``, whether it is true.

vLLM and Transformers run in processes of their own: the first builds the model without weights, and the proof needs
each of the two without the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from vllm_steer.engine.report import CapabilityReport

CONFIG = "config.json"


class DoctorError(Exception):
    """A process that was to look at the model ended without an answer; the text is its last words."""


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """The folder of a model, made where only a configuration file is given; raises FileNotFoundError."""
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is no local model folder and no {CONFIG}; download at least the model's {CONFIG} first"
        )
    if file.name == CONFIG:
        yield file.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / CONFIG)
        yield Path(folder)


def examine(model: Path, settings: Mapping[str, Any], engine: Mapping[str, Any]) -> CapabilityReport:
    """The report of the model in a folder. Raises `DoctorError`, and SteeringError for wrong ``settings``."""
    from vllm_steer.config import SteeringConfig
    from vllm_steer.engine.report import make_report
    from vllm_steer.models.outline import MARK

    config = SteeringConfig.parse(dict(settings))
    asked = {"model": str(model), "steering": dict(settings), "engine": dict(engine)}
    return make_report(_answer("vllm_steer.models.outline", MARK, asked=asked), config)


def prove(model: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Shrink the model and compare: see :mod:`vllm_steer.testing.prove`. Raises `DoctorError`."""
    from vllm_steer.testing.prove.engine import MARK

    words = ["--trust-remote-code"] if trust_remote_code else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        reference = _run("vllm_steer.testing.prove.reference", str(model), str(out), *words)
        if reference.returncode:
            shutil.rmtree(out, ignore_errors=True)
        proof = _answer("vllm_steer.testing.prove.engine", MARK, str(model), str(out), *words)
    if reference.returncode:
        proof["no_reference"] = _last_line(reference.stderr)
    return proof


def run(path: Path, settings: Mapping[str, Any], engine: Mapping[str, Any], *, as_json: bool, with_proof: bool) -> None:
    """The command. Exits with 1 where the model cannot be steered or a proof fails, with 2 for a wrong question."""
    from vllm_steer.errors import SteeringError

    try:
        with model_folder(path) as model:
            report = examine(model, settings, engine)
            if not as_json:
                show(report)
            asked = with_proof and report.problem is None
            proof = prove(model, bool(engine.get("trust_remote_code"))) if asked else None
    except (FileNotFoundError, SteeringError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except DoctorError as error:
        typer.echo(f"no answer about this model: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({**report.model_dump(mode="json"), **({"proof_now": proof} if with_proof else {})}))
    elif proof is not None:
        show_proof(proof)
    if report.problem is not None or (proof is not None and not proof["agrees"]):
        raise typer.Exit(1)


def _answer(module: str, mark: str, *words: str, asked: Any = None) -> dict[str, Any]:
    done = _run(module, *words, text=json.dumps(asked))
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(mark)), None)
    if done.returncode or line is None:
        raise DoctorError(_last_line(done.stderr) or f"{module} ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(line.removeprefix(mark))
    return answer


def _run(module: str, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "["))]
    return lines[-1] if lines else ""


def show(report: CapabilityReport) -> None:
    """Print a report for people."""
    from rich.console import Console
    from rich.table import Table

    from vllm_steer.cli.output import printable

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{printable(report.architecture or 'unknown architecture')} on vLLM {report.vllm}")
    if not report.vllm_is_tested:
        console.print(f"vLLM {report.vllm} is not tested; tested is {report.vllm_tested}")
    if report.problem is not None:
        console.print(f"cannot be steered: {printable(report.problem)}")
        return
    console.print(f"{report.num_layers} layers, hidden size {report.hidden_size}, {report.dtype}\n")
    table = Table("point", "value", "edits", "reads", box=None, pad_edge=False)
    for point in report.points:
        off = not point.on and not point.refused
        table.add_row(point.name, point.value, *("off" if off else _yes(each) for each in (point.edits, point.reads)))
    console.print(table)
    for point in report.points:
        if not point.on and not point.refused:
            console.print(f"{point.name} is off; an engine has it with {point.switched_on_by}")
    for point in report.points:
        for what, refused in (("edited", point.refused), ("read", point.unread)):
            for reason, layers in _by_reason(refused).items():
                console.print(f"{point.name} is not {what} on {len(layers)} layers: {printable(reason)}")
    console.print("\nthe same values elsewhere")
    for point in report.points:
        for library, name in point.names_elsewhere.items():
            console.print(f"{point.name} is, in {library}, {name}")
    console.print("\nrecipes")
    for recipe in report.recipes:
        where = recipe.post_attn_in_front_of
        mid = f"post_attn in front of {where}" if where else "no post_attn"
        console.print(f"{recipe.layer_class}: {len(recipe.layers)} layers, stream {recipe.stream}, {mid}")
    for doubt in report.unproven:
        console.print(f"unproven: {doubt}")
    console.print("proof: " + ("; ".join(_proof(proof) for proof in report.proofs) or "no record"))
    console.print("\nsettings of vLLM that steering does not go with")
    for conflict in report.conflicts:
        console.print(f"{conflict.setting}: {conflict.reason}" + (" (so here)" if conflict.present else ""))
    total = sum(report.table_bytes.values()) / 2**20
    console.print(f"\ntables: {total:.1f} MiB on each rank, at " + _words(report.limits))
    largest = sorted(report.table_bytes.items(), key=lambda item: -item[1])[:3]
    console.print("largest: " + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in largest))


def _yes(served: bool) -> str:
    return "yes" if served else "no"


def _words(limits: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in limits.items())


def _by_reason(refused: Mapping[int, str]) -> dict[str, list[int]]:
    reasons: dict[str, list[int]] = {}
    for layer, reason in refused.items():
        reasons.setdefault(reason, []).append(layer)
    return reasons


def _proof(proof: Any) -> str:
    errors = [("rows", proof.value_error), ("log-probabilities", proof.cause_error)]
    far = ", ".join(f"{what} within {error:.1e}" for what, error in errors if error is not None)
    return f"{proof.kind} on {proof.architecture}" + (f" ({far}, {proof.dtype})" if far else "")


def show_proof(proof: Mapping[str, Any]) -> None:
    """Print what :func:`prove` found."""
    from vllm_steer.cli.output import printable

    if "no_reference" in proof:
        typer.echo(f"HF Transformers does not build this model: {printable(proof['no_reference'])}")
    typer.echo(f"\nproof of the shrunk model: {proof['kind']}")
    typer.echo(f"steps between points that tell: {proof['conclusive']} of {proof['hops']}")
    for name, what in (("value_error", "rows of a plain request"), ("cause_error", "rows behind an edit")):
        if proof[name] is not None:
            typer.echo(f"{what}: off by {proof[name]:.1e} of their length at most")
    typer.echo("agrees" if proof["agrees"] else "DOES NOT AGREE")
