# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer fuzz``: compare random workloads with the same requests run alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_steer.cli.output import check_outputs, fail
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.testing.fuzz.session import Report, Session


def fuzz(
    model: Annotated[str | None, typer.Argument(help="Name or folder; a small random Llama by default.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Maximum number of rounds.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per workload.")] = 48,
    dtype: Annotated[str, typer.Option(help="Dtype of the model; float32 is compared most strictly.")] = "float32",
    graphs: Annotated[bool, typer.Option("--graphs", help="Also run compiled engines with CUDA graphs.")] = False,
    points: Annotated[str, typer.Option(help="Optional hook points of all engines, comma-separated.")] = "",
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a finding.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write counts and findings to this JSON file.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Run only the workload in this file.")] = None,
) -> None:
    """Compare random workloads under pressure with the same requests run alone; print a minimal reproduction."""
    from vllm_steer.testing.fuzz.model import prepare_environment, save_tiny_llama
    from vllm_steer.testing.fuzz.session import Session

    check_outputs(out)
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = model or str(save_tiny_llama(Path(folder)))
        if replay is not None:
            _replay(model, dtype, replay)
            return
        session = Session(
            model, dtype, seed, minutes=minutes, rounds=rounds, requests=requests, graphs=graphs,
            points=_parse_points(points), keep_going=keep_going, log=_print_progress,
        )  # fmt: skip
        report = session.run()
    if out is not None:
        out.write_text(json.dumps({"command": _command(session), **report.to_builtins()}, indent=1) + "\n")
    _print_report(report)


def _parse_points(text: str) -> tuple[str, ...]:
    from vllm_steer.config import SteeringConfig

    try:
        return SteeringConfig.parse({"points": text.split(",") if text else []}).points
    except SteeringError as error:
        raise typer.BadParameter(str(error), param_hint="--points") from None


def _print_progress(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def _command(session: Session) -> str:
    """Return the command line that repeats the session."""
    values = {"minutes": session.minutes, "rounds": session.rounds, "seed": session.seed, "requests": session.requests}
    options = [
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
        for name, value in values.items()
        if value is not None
    ]
    options.append(f"--dtype {session.dtype}")
    options += [f"--points {','.join(session.points)}"] if session.points else []
    options += ["--graphs"] * session.graphs + ["--keep-going"] * session.keep_going
    return " ".join(["vllm-steer fuzz", *options])


def _print_report(report: Report) -> None:
    for finding in report.findings:
        typer.echo(f"round {finding.round}: {next(iter(finding.problems.values()))}")
        typer.echo("save the next line as finding.json, then run: vllm-steer fuzz --replay finding.json")
        typer.echo(finding.workload.to_json())
    if report.findings:
        raise typer.Exit(1)
    if not report.counts.requests:
        raise fail("no request was compared; give more minutes")
    typer.echo(f"no findings in {report.seconds / 60:.1f} minutes: {report.counts.requests} requests compared")


def _replay(model: str, dtype: str, path: Path) -> None:
    import msgspec

    from vllm_steer.testing.fuzz.session import replay

    try:
        problems = replay(model, dtype, path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise fail(f"{path}: {error}", status=2) from None
    for name, problem in problems.items():
        typer.echo(f"{name or 'engine'}: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo("no problems")
