# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer doctor``: report what a model supports from its configuration alone; with ``--prove``, verify it.

vLLM and Transformers run in child processes: vLLM builds the model without weights, and the proof needs each of the two
without the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from vllm_steer.cli.output import fail, print_table, printable
from vllm_steer.errors import IncompatibleError, SteeringError

if TYPE_CHECKING:
    from vllm_steer.engine.report import CapabilityReport, PointReport, ProofReport


CONFIG = "config.json"


class DoctorError(Exception):
    """Raised when a child process fails. The message is the last line of its stderr."""


def run(
    path: Path,
    settings: Mapping[str, Any],
    engine: Mapping[str, Any],
    *,
    as_json: bool,
    with_proof: bool,
    modules: Iterable[Path] = (),
) -> None:
    """Run the command.

    Exits with status 1 if an engine with these arguments would not start or the proof fails, with status 2 if an
    argument is wrong.

    Args:
        path: A model folder, or its configuration file.
        settings: Fields of ``SteeringConfig``.
        engine: Engine arguments of vLLM.
        as_json: Print one JSON object instead of text.
        with_proof: Also compare a shrunk copy of the model with Transformers.
        modules: Files of modules whose lengths of the stream are shown.
    """
    from vllm_steer.compat.version import check_version

    try:
        streams = {str(file): read_streams(file) for file in modules}
        with model_folder(path) as model:
            report = examine(model, settings, engine)
            if not as_json:
                print_report(report)
                print_streams(streams)
            supported = report.problem is None
            proof = prove(model, bool(engine.get("trust_remote_code"))) if with_proof and supported else None
    except (OSError, SteeringError) as error:
        raise fail(error, status=2) from None
    except DoctorError as error:
        raise fail(f"the model could not be examined: {error}") from None
    if as_json:
        document = {**report.model_dump(mode="json"), **({"proof_now": proof} if with_proof else {})}
        document |= {"streams": streams} if streams else {}
        # Errors that are not numbers become null.
        typer.echo(msgspec.json.encode(document).decode())
    elif proof is not None:
        print_proof(proof)
    try:
        check_version(report.vllm)
    except IncompatibleError as error:
        raise fail(error) from None
    conflicts = any(conflict.present for conflict in report.conflicts)
    if not supported or conflicts or (proof is not None and not proof["agrees"]):
        raise typer.Exit(1)


@contextmanager
def model_folder(path: Path) -> Iterator[Path]:
    """Yield the folder of a model, a temporary one if ``path`` is a configuration file of another name.

    Raises:
        FileNotFoundError: ``path`` is neither a model folder nor a file.
        SteeringError: The file is not the configuration of a model.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} is neither a local model folder nor a {CONFIG}; download the {CONFIG} first")
    _check_config(file)
    if file.name == CONFIG:
        yield file.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(file, Path(folder) / CONFIG)
        yield Path(folder)


def _check_config(file: Path) -> None:
    """Raise SteeringError if a file cannot be the configuration of a model, which vLLM is not asked to read then."""
    try:
        config = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise SteeringError(str(file), f"cannot be parsed as JSON: {str(error)[:200]}; download it again") from None
    if not isinstance(config, dict):
        raise SteeringError(str(file), "must contain a JSON object, the configuration of a model")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SteeringError(f"{file}: architectures", "must be a list of names, such as LlamaForCausalLM")


def examine(model: Path, settings: Mapping[str, Any], engine: Mapping[str, Any]) -> CapabilityReport:
    """Return the report on the model in a folder. Raises ``DoctorError``, and ``SteeringError`` for ``settings``."""
    from vllm_steer.config import SteeringConfig
    from vllm_steer.engine.report import make_report
    from vllm_steer.models.dry_run import MARK

    config = SteeringConfig.parse(dict(settings))
    request = {"model": str(model), "steering": dict(settings), "engine": dict(engine)}
    return make_report(_run_module("vllm_steer.models.dry_run", MARK, stdin=json.dumps(request)), config)


def prove(model: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Compare a shrunk copy of the model with Transformers, see :mod:`vllm_steer.testing.prove`.

    Returns:
        The result of ``testing.prove.engine``; with ``no_reference``, the reason, if Transformers cannot build it.

    Raises:
        DoctorError: The engine could not run.
    """
    from vllm_steer.testing.prove.engine import MARK

    options = ["--trust-remote-code"] if trust_remote_code else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        reference = _start_module("vllm_steer.testing.prove.reference", str(model), str(out), *options)
        if reference.returncode:
            shutil.rmtree(out, ignore_errors=True)
        proof = _run_module("vllm_steer.testing.prove.engine", MARK, str(model), str(out), *options)
    if reference.returncode:
        proof["no_reference"] = _last_line(reference.stderr)
    return proof


def _run_module(module: str, mark: str, *arguments: str, stdin: str = "") -> dict[str, Any]:
    """Run a module and return the JSON on its last line that begins with ``mark``. Raises ``DoctorError``."""
    done = _start_module(module, *arguments, stdin=stdin)
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(mark)), None)
    if done.returncode or line is None:
        raise DoctorError(_last_line(done.stderr) or f"{module} ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(line.removeprefix(mark))
    return result


def _start_module(module: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "HF_HUB_OFFLINE": "1"}
    # -P: not with the packages in the present folder, which this process does not import either.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "["))]
    return lines[-1] if lines else ""


Print = Callable[..., None]


def print_report(report: CapabilityReport) -> None:
    """Print a report."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{printable(report.architecture or 'unknown architecture')} on vLLM {report.vllm}")
    if not report.vllm_is_tested:
        console.print(f"vLLM {report.vllm} is not tested; tested are {report.vllm_tested}")
        console.print(printable(report.vllm_check or ""))
    if not report.examined:
        console.print(f"cannot be examined on this machine, since vLLM refuses it: {printable(report.problem or '')}")
        console.print(
            "run doctor where the model is to be served; many models with sparse or linear attention need a GPU"
        )
        console.print(_proofs_text(report))
        return
    if report.problem is not None:
        console.print(f"cannot be steered: {printable(report.problem)}")
        return
    console.print(f"{report.num_layers} layers, hidden size {report.hidden_size}, {report.dtype}\n")
    console.print(_points_table(report))
    for point in report.points:
        _print_restrictions(point, console.print)
    console.print("\nnames in other libraries")
    for point in report.points:
        for library, name in point.names_elsewhere.items():
            console.print(f"{point.name}: {name} ({library})")
    console.print("\nrecipes")
    for recipe in report.recipes:
        before = recipe.post_attn_in_front_of
        mid = f"post_attn before {before}" if before else "no post_attn"
        console.print(f"{recipe.layer_class}: {len(recipe.layers)} layers, stream {recipe.stream}, {mid}")
    for reason in report.unproven:
        console.print(f"unproven: {reason}")
    console.print(_proofs_text(report))
    console.print("\nvLLM settings that conflict with steering")
    for conflict in report.conflicts:
        console.print(f"{conflict.setting}: {conflict.reason}" + (" (set here)" if conflict.present else ""))
    total = sum(report.table_bytes.values()) / 2**20
    limits = ", ".join(f"{name} {value}" for name, value in report.limits.items())
    console.print(f"\ntables: {total:.1f} MiB on each rank, with {limits}")
    largest = sorted(report.table_bytes.items(), key=lambda item: -item[1])[:3]
    console.print("largest: " + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in largest))


def read_streams(file: Path) -> list[dict[str, Any]]:
    """Return the lengths of the stream that a module's file has, by site; raise SteeringError if it cannot be read."""
    from vllm_steer.registry.describe import stream_lengths
    from vllm_steer.registry.vector_files import read_vector_file

    return [each.model_dump(mode="json") for each in stream_lengths(*read_vector_file(file))]


def print_streams(streams: Mapping[str, list[dict[str, Any]]]) -> None:
    """Print the lengths of the stream of each file."""
    for file, lengths in streams.items():
        if not lengths:
            typer.echo(f"{printable(file)}: has no length of the stream; make and dose measure it")
            continue
        typer.echo(f"\n{printable(file)}")
        lines = ((e["point"], e["layer"], f"{e['length']:.4g}", f"{e['strength']:.4g}") for e in lengths)
        print_table(("point", "layer", "length of the stream", "strength of dose 1"), lines)


def print_proof(proof: Mapping[str, Any]) -> None:
    """Print the result of ``--prove``."""
    if "no_reference" in proof:
        typer.echo(f"HF Transformers cannot build this model: {printable(proof['no_reference'])}")
    typer.echo(f"\nproof of the shrunk model: {proof['kind']}")
    typer.echo(f"conclusive steps between points: {proof['conclusive']} of {proof['hops']}")
    for name, what in (("value_error", "rows of a plain request"), ("cause_error", "rows after an edit")):
        if proof[name] is not None:
            typer.echo(f"{what}: largest relative error {proof[name]:.1e}")
    typer.echo("agrees" if proof["agrees"] else "DOES NOT AGREE")


def _points_table(report: CapabilityReport) -> Any:
    from rich.table import Table

    table = Table("point", "value", "edits", "reads", box=None, pad_edge=False)
    for point in report.points:
        values = ("yes" if supported else "no" for supported in (point.edits, point.reads))
        table.add_row(point.name, point.value, *(("off", "off") if _is_off(point) else values))
    return table


def _is_off(point: PointReport) -> bool:
    return not point.on and not point.refused


def _print_restrictions(point: PointReport, write: Print) -> None:
    if _is_off(point):
        write(f"{point.name} is off; enable it with {point.switched_on_by}")
    for verb, refused in (("edited", point.refused), ("read", point.unread)):
        layers_by_reason: dict[str, int] = {}
        for reason in refused.values():
            layers_by_reason[reason] = layers_by_reason.get(reason, 0) + 1
        for reason, count in layers_by_reason.items():
            write(f"{point.name} cannot be {verb} on {count} layers: {printable(reason)}")


def _proofs_text(report: CapabilityReport) -> str:
    return "proof: " + ("; ".join(map(_proof_text, report.proofs)) or "none recorded")


def _proof_text(proof: ProofReport) -> str:
    errors = [("rows", proof.value_error), ("log-probabilities", proof.cause_error)]
    figures = [f"{what} within {error:.1e}" for what, error in errors if error is not None]
    return f"{proof.kind} on {proof.architecture} ({', '.join([*figures, proof.dtype, f'vLLM {proof.vllm}'])})"
