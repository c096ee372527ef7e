# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer fuzz``: compare random workloads with the same requests run alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer


def fuzz(
    model: Annotated[
        str | None, typer.Argument(help="Name or folder of the model (default: a small random Llama).")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to run.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop after this many rounds.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per workload.")] = 48,
    dtype: Annotated[str, typer.Option(help="The model's dtype; float32 has the strictest tolerance.")] = "float32",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Also test engines with compilation and CUDA graphs.")
    ] = False,
    points: Annotated[str, typer.Option(help="Hook points on the branches to enable, separated by commas.")] = "",
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a finding.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write counts and findings to this JSON file.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Run only the workload in this file.")] = None,
) -> None:
    """Compare random workloads with the same requests run alone and print a minimal reproduction."""
    from vllm_steer.testing.fuzz.model import prepare_environment, save_tiny_llama

    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        model = model or str(save_tiny_llama(Path(folder)))
        if replay is not None:
            _replay(model, dtype, replay)
        else:
            _search(model, minutes, seed, rounds, requests, dtype, graphs, _points(points), keep_going, out)


def _points(text: str) -> tuple[str, ...]:
    from vllm_steer.config import SteeringConfig
    from vllm_steer.errors import SteeringError

    try:
        return SteeringConfig.parse({"points": text.split(",") if text else []}).points
    except SteeringError as error:
        raise typer.BadParameter(str(error), param_hint="--points") from None


def _search(
    model: str, minutes: float, seed: int, rounds: int | None, requests: int, dtype: str, graphs: bool,
    points: tuple[str, ...], keep_going: bool, out: Path | None,
) -> None:  # fmt: skip
    from rich.console import Console

    from vllm_steer.testing.fuzz.session import Session

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    session = Session(
        model, dtype, seed, minutes=minutes, rounds=rounds, requests=requests, graphs=graphs, points=points,
        keep_going=keep_going, log=lambda text: console.print(text, markup=False),
    )  # fmt: skip
    report = session.run()
    if out is not None:
        given: dict[str, Any] = {
            "minutes": minutes,
            "rounds": rounds,
            "seed": seed,
            "requests": requests,
            "dtype": dtype,
        }
        given |= {"points": ",".join(points)} if points else {}
        options = [
            f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
            for name, value in given.items()
            if value is not None
        ]
        command = " ".join(["vllm-steer fuzz", *options, *["--graphs"] * graphs, *["--keep-going"] * keep_going])
        out.write_text(json.dumps({"command": command, **report.to_builtins()}, indent=1) + "\n")
    for finding in report.findings:
        typer.echo(f"round {finding.round}: {next(iter(finding.problems.values()))}")
        typer.echo("save the next line as finding.json, then: vllm-steer fuzz --replay finding.json")
        typer.echo(finding.workload.to_json())
    if report.findings:
        raise typer.Exit(1)
    typer.echo(f"nothing found in {report.seconds / 60:.1f} minutes: {report.counts.requests} requests compared")


def _replay(model: str, dtype: str, path: Path) -> None:
    import msgspec

    from vllm_steer.testing.fuzz.session import replay

    try:
        problems = replay(model, dtype, path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        typer.echo(f"error: {path}: {error}", err=True)
        raise typer.Exit(2) from None
    for name, problem in problems.items():
        typer.echo(f"{name or 'the engine'}: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo("no difference")
