# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer captures``: look into capture files, and turn them into others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.output import print_table, printable

if TYPE_CHECKING:
    from vllm_steer.capture.files.reader import StoredRequest

app = typer.Typer(
    help="Look into files of captured rows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Where = Annotated[Path, typer.Argument(metavar="PATH", help="A capture file, or a folder of them.")]
RequestId = Annotated[str | None, typer.Option(help="Only requests of this id.")]
Sample = Annotated[int | None, typer.Option(help="Only this sample of each request, from 0.")]
PointName = Annotated[str | None, typer.Option(help="Only this hook point.")]
LayerNumber = Annotated[int | None, typer.Option(help="Only this layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object to a line, in place of a table.")]


@app.command()
def ls(path: Where, request_id: RequestId = None, sample: Sample = None, as_json: AsJson = False) -> None:
    """List the requests in a file or folder."""
    with _failing_plainly():
        requests = _requests(path, request_id, sample)
        if as_json:
            _print_json(requests)
            return
        columns = ("request", "sample", "model", "status", "tokens", "sites", "bytes", "file", "index")
        print_table(columns, (_line(request) for request in requests))


@app.command()
def show(path: Where, request_id: RequestId = None, sample: Sample = None, as_json: AsJson = False) -> None:
    """Show what is there of each request: sites, shapes, positions, norms."""
    from vllm_steer.capture.files.export import describe

    with _failing_plainly():
        requests = _requests(path, request_id, sample)
        if as_json:
            _print_json(requests)
            return
        for request in requests:
            about = describe(request)
            for name in ("request_id", "sample", "model", "tag", "status", "error", "prompt_tokens", "output_tokens"):
                if about[name] is not None:
                    typer.echo(f"{name}: {printable(str(about[name]))}")
            typer.echo(f"spec: {printable(str(about['spec']))}")
            print_table(
                ("site", "shape", "dtype", "positions", "mean norm"),
                (_site_line(request, site) for site in request.sites),
            )


@app.command()
def export(
    path: Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file, its name ending in .npz or .parquet.")],
    request_id: RequestId = None,
    sample: Sample = None,
    point: PointName = None,
    layer: LayerNumber = None,
) -> None:
    """Write rows to a .npz or .parquet file."""
    from vllm_steer.capture.files.export import export_npz, export_parquet

    with _failing_plainly():
        exporters = {".npz": (export_npz, "sites"), ".parquet": (export_parquet, "rows")}
        if out.suffix not in exporters:
            raise ValueError(f"{out} is to end in {' or '.join(exporters)}")
        exporter, what = exporters[out.suffix]
        count = exporter(_requests(path, request_id, sample), out, point, layer)
        typer.echo(f"{count} {what} written to {out}")


def _requests(path: Path, request_id: str | None, sample: int | None) -> Iterator[StoredRequest]:
    from vllm_steer.capture.files.reader import open_captures

    captures = open_captures(path)
    found = captures if request_id is None else captures.find(request_id)
    none = True
    for request in found:
        if sample in (None, request.sample):
            none = False
            yield request
    if none:
        raise ValueError(f"{path} has no such capture")


def _line(request: StoredRequest) -> tuple[Any, ...]:
    about = request.request_id, request.sample, request.model, request.status
    tokens = f"{request.prompt_tokens}+{request.output_tokens}"
    return (*about, tokens, len(request.sites), request.num_bytes, request.path.name, request.index)


def _site_line(request: StoredRequest, site: tuple[str, int]) -> tuple[Any, ...]:
    import torch

    rows = request.tensor(*site)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    dtype = str(rows.dtype).removeprefix("torch.")
    mean = f"{float(norms.mean()):.6g}" if len(norms) else "-"
    return f"{site[0]}[{site[1]}]", list(rows.shape), dtype, _ranges(request.positions(*site).tolist()), mean


def _ranges(positions: list[int]) -> str:
    """``0-4, 7`` for 0, 1, 2, 3, 4, 7."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position - 1:
            ranges[-1] = ranges[-1][0], position
        else:
            ranges.append((position, position))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]]) or "none"


def _print_json(requests: Iterator[StoredRequest]) -> None:
    import json

    from vllm_steer.capture.files.export import describe

    for request in requests:
        typer.echo(json.dumps({"path": str(request.path), "index": request.index, **describe(request)}))


@contextmanager
def _failing_plainly() -> Iterator[None]:
    from vllm_steer.capture.files.format import CaptureFileError

    try:
        yield
    except (CaptureFileError, OSError, ImportError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
