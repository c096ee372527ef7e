# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer patch``: run the patching study in a file, with a model or against a server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.connection import DEFAULT_URL, ApiKey, connect
from vllm_steer.cli.engine import start_engine
from vllm_steer.cli.output import check_image, check_outputs, fail, failing_on, print_table
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.patching import PatchingResult


def patch(
    context: typer.Context,
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="The study: a YAML or JSON file.")],
    model: Annotated[str | None, typer.Option(help="Run offline with this model, a name or a folder.")] = None,
    url: Annotated[
        str | None, typer.Option(envvar="VLLM_STEER_URL", help=f"URL of a server. [default: {DEFAULT_URL}]")
    ] = None,
    api_key: ApiKey = None,
    plot: Annotated[Path | None, typer.Option(help="Write heat maps to this image.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the grids to this HTML page.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write all numbers to this safetensors file; offline, its sweep continues.")
    ] = None,
) -> None:
    """Run a patching study, whose fields are those of POST /v1/steering/patch.

    With --model, options of vLLM's engine may follow, such as --dtype float32 or --max-model-len 4096. On a CPU,
    compiling the model takes minutes: add --enforce-eager.
    """
    if model is not None and url is not None:
        raise typer.BadParameter("cannot be combined with --url (or VLLM_STEER_URL; unset it)", param_hint="--model")
    if model is None and context.args:
        raise typer.BadParameter(
            "is not an option of this command; options of vLLM need --model", param_hint=context.args[0]
        )
    check_outputs(plot, html, out)
    if plot is not None:
        check_image(plot)
    try:
        body = _read(study)
        if model is None:
            with connect(url or DEFAULT_URL, api_key) as client:
                try:
                    result = _over_http(client, body)
                except SteeringError as error:
                    raise fail(f"{study}: {error}") from None
        else:
            result = _offline(model, context.args, body, out)
    except SteeringError as error:
        raise fail(f"{study}: {error}") from None
    for path, write in ((out, result.save), (html, result.to_html), (plot, result.plot)):
        if path is not None:
            write(path)
    _print(result)


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file; YAML contains JSON. Raises ``SteeringError``."""
    import msgspec

    try:
        body = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise fail(f"{path}: cannot be read: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SteeringError("file", f"cannot be parsed as YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(body, dict):
        raise SteeringError("file", "must contain an object with clean, corrupt and answer")
    return body


def _over_http(client: Any, body: Mapping[str, Any]) -> PatchingResult:
    from vllm_steer.client import ServerError
    from vllm_steer.patching.file import decode
    from vllm_steer.patching.progress import Progress

    for name in ("stream", "return_file"):
        if name in body:
            raise SteeringError(name, "has no effect in a file; leave it out")
    failed = total = 0
    try:
        with Progress() as bar:
            for event in client.stream_patch(**body, return_file=True):
                if event["event"] == "start":
                    total = event["cells"]
                elif event["event"] == "cell":
                    failed += event["error"] is not None
                    bar.count(total, 1, failed)
                else:
                    return decode(base64.b64decode(event["file"]), "the server's answer")
    except ServerError as error:
        if error.status == 400 and error.param:
            raise SteeringError(error.param, error.message.removeprefix(f"{error.param}: ")) from None
        raise
    raise fail("the server ended the study without a result")


def _offline(model: str, options: Sequence[str], body: Mapping[str, Any], out: Path | None) -> PatchingResult:
    from vllm_steer.patching.request import check_fields, read_study
    from vllm_steer.points import OPTIONAL_POINTS
    from vllm_steer.request.sites import read_point

    check_fields(body)
    given = body.get("points", ())
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    named = {read_point(name, "points") for name in names}  # also by names of other libraries
    points = [point for point in OPTIONAL_POINTS if point in named]
    llm = start_engine(model, options, "patch", points)
    study, arguments = read_study(body, llm)
    with failing_on(RuntimeError):  # an unpatched run failed
        return study.sweep(**arguments, file=out)


def _print(result: PatchingResult) -> None:
    """Print the largest effects."""
    import numpy as np

    records = [record for record in result.records() if not np.isnan(record["value"])]
    records.sort(key=lambda record: -abs(record["effect"]))
    columns = ("point", "layer", "position", "value", "effect")
    print_table(
        columns,
        (
            (*(record[name] for name in columns[:3]), f"{record['value']:.4g}", f"{record['effect']:+.4g}")
            for record in records[:10]
        ),
    )
    typer.echo(
        f"{result.info.metric}: {result.cells[..., 0].size} cells, {len(result.errors)} failed"
        + (f", {len(result.not_run)} not run" if result.not_run else "")
        + f"; noise floor "
        f"{result.noise_floor():.3g}, control {result.control():.3g}"
        + (f", random subspace {result.random_control():.3g}" if result.info.random_control else "")
    )
    for pair in result.too_close() if result.info.metric == "recovered" else ():
        typer.echo(
            f"pair {pair['pair']}: recovered is missing, because clean ({pair['clean']:.4g}) and corrupt "
            f"({pair['corrupt']:.4g}) differ by less than the noise floor ({pair['noise_floor']:.4g})"
        )
    for each in result.failed()[:3]:
        typer.echo(f"failed: {each['point']} layer {each['layer']} at {each['position']}: {each['error']}")
