# SPDX-License-Identifier: Apache-2.0
"""The commands ``vllm-steer captures``: list, inspect and export capture files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllm_steer.cli.output import failing_on, group, print_table, printable

if TYPE_CHECKING:
    from vllm_steer.capture.files.reader import StoredRequest
    from vllm_steer.capture.results import Site

app = group("List, inspect and export files of captured rows.")

_EXPECTED = (OSError, ImportError, ValueError)  # CaptureFileError is a ValueError

_CapturePath = Annotated[Path, typer.Argument(metavar="PATH", help="A capture file, or a directory of them.")]
_RequestId = Annotated[str | None, typer.Option(help="Only requests with this id.")]
_Sample = Annotated[int | None, typer.Option(help="Only this sample of each request, from 0.")]
_Run = Annotated[str | None, typer.Option(help="Only requests of the run with this name.")]
_Tag = Annotated[str | None, typer.Option(help="Only requests with this tag.")]
_Point = Annotated[str | None, typer.Option(help="Only this hook point, or site such as resid_post.3.")]
_Layer = Annotated[int | None, typer.Option(help="Only this layer.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of a table.")]


@app.command()
def ls(
    path: _CapturePath,
    request_id: _RequestId = None,
    sample: _Sample = None,
    run: _Run = None,
    tag: _Tag = None,
    as_json: _AsJson = False,
) -> None:
    """List the requests in a file or directory."""
    with failing_on(*_EXPECTED):
        requests = _find_requests(path, request_id, sample, run, tag)
        if as_json:
            _print_json(requests)
            return
        columns = (
            *("run", "submission", "request", "sample", "tag", "model", "status", "tokens", "sites", "bytes"),
            *("file", "index"),
        )
        print_table(columns, (_request_cells(request) for request in requests))


@app.command()
def show(
    path: _CapturePath,
    request_id: _RequestId = None,
    sample: _Sample = None,
    run: _Run = None,
    tag: _Tag = None,
    as_json: _AsJson = False,
) -> None:
    """Show the properties and sites of each request."""
    from vllm_steer.capture.files.export import describe

    with failing_on(*_EXPECTED):
        requests = _find_requests(path, request_id, sample, run, tag)
        if as_json:
            _print_json(requests)
            return
        for request in requests:
            properties = describe(request)
            del properties["sites"]
            for name, value in properties.items():
                if value is not None:
                    typer.echo(f"{name}: {printable(str(value))}")
            columns = ("site", "shape", "dtype", "positions", "mean norm")
            print_table(columns, (_site_cells(request, site) for site in request.sites))


@app.command()
def export(
    path: _CapturePath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file with the suffix .npz or .parquet.")],
    request_id: _RequestId = None,
    sample: _Sample = None,
    run: _Run = None,
    tag: _Tag = None,
    point: _Point = None,
    layer: _Layer = None,
) -> None:
    """Write rows to a .npz or .parquet file."""
    from vllm_steer.capture.files.export import export_npz, export_parquet
    from vllm_steer.request.sites import read_site

    exporters = {".npz": (export_npz, "sites"), ".parquet": (export_parquet, "rows")}
    with failing_on(*_EXPECTED):
        if out.suffix not in exporters:
            raise ValueError(f"unknown suffix of {out}; use {' or '.join(exporters)}")
        exporter, unit = exporters[out.suffix]
        if point is not None:
            point, named = read_site(site := point, "--point")
            if named is not None and layer not in (None, named):
                raise ValueError(f"--point {site} is a site of layer {named}, but --layer is {layer}; leave one out")
            layer = named if layer is None else layer
        count = exporter(_find_requests(path, request_id, sample, run, tag), out, point, layer)
        typer.echo(f"{count} {unit} written to {out}")


@app.command()
def missing(path: _CapturePath, run: _Run = None, as_json: _AsJson = False) -> None:
    """List the requests that were submitted but are not stored."""
    from vllm_steer.capture.files.reader import open_captures

    with failing_on(*_EXPECTED):
        found = open_captures(path, run).missing()
    if as_json:
        for entry in found:
            typer.echo(msgspec.json.encode(entry).decode())
    elif found:
        lines = (
            (entry.run, entry.submission, entry.request_id, entry.sample, entry.tag or "", entry.error or "")
            for entry in found
        )
        print_table(("run", "submission", "request", "sample", "tag", "error"), lines)
    else:
        typer.echo("none")


def _find_requests(
    path: Path, request_id: str | None, sample: int | None, run: str | None, tag: str | None
) -> Iterator[StoredRequest]:
    from vllm_steer.capture.files.reader import open_captures

    captures = open_captures(path, run)
    found = False
    for request in captures if request_id is None and tag is None else captures.find(request_id, tag=tag):
        if sample in (None, request.sample):
            found = True
            yield request
    if not found:
        raise ValueError(f"no captures found in {path}")


def _request_cells(request: StoredRequest) -> tuple[Any, ...]:
    run = request.run or "", "" if request.submission is None else request.submission
    properties = *run, request.request_id, request.sample, request.tag or "", request.model, request.status
    tokens = f"{request.num_prompt_tokens}+{request.num_output_tokens}"
    return (*properties, tokens, len(request.sites), request.num_bytes, request.path.name, request.index)


def _site_cells(request: StoredRequest, site: Site) -> tuple[Any, ...]:
    import torch

    rows = request.tensor(*site)
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    dtype = str(rows.dtype).removeprefix("torch.")
    mean_norm = f"{float(norms.mean()):.6g}" if len(norms) else "-"
    positions = _format_ranges(request.positions(*site).tolist())
    return f"{site[0]}[{site[1]}]", list(rows.shape), dtype, positions, mean_norm


def _format_ranges(positions: list[int]) -> str:
    """Format ascending positions: ``0-4, 7`` for 0, 1, 2, 3, 4, 7."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position - 1:
            ranges[-1] = ranges[-1][0], position
        else:
            ranges.append((position, position))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]]) or "none"


def _print_json(requests: Iterator[StoredRequest]) -> None:
    from vllm_steer.capture.files.export import describe

    for request in requests:
        typer.echo(json.dumps({"path": str(request.path), "index": request.index, **describe(request)}))
