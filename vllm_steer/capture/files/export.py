# SPDX-License-Identifier: Apache-2.0
"""Stored captures as tables and archives: Arrow, `datasets`, Parquet, and numpy's .npz.

A table has a line for each row: ``request_id``, ``sample``, ``model``, ``tag``, ``status``, ``point``, ``layer``,
``position`` and ``token_id`` (null for a mean, which has no one position), and ``row``, a list of fixed length.
"""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.capture.files.reader import StoredRequest


def to_arrow(requests: Iterable[StoredRequest], point: str | None = None, layer: int | None = None) -> Any:
    """A ``pyarrow.Table`` of all rows, or those of one point, or layer.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: rows differ in width or dtype, or there are none.
    """
    arrow = _optional("pyarrow")
    batches = list(_batches(arrow, requests, point, layer))
    if not batches:
        raise ValueError("no row was captured there")
    return arrow.Table.from_batches(batches)


def to_dataset(requests: Iterable[StoredRequest], point: str | None = None, layer: int | None = None) -> Any:
    """A ``datasets.Dataset`` of the table of `to_arrow`; raises as it does, and ImportError without ``datasets``."""
    datasets = _optional("datasets")
    # Without a fingerprint it would pickle all rows to make one.
    return datasets.Dataset(to_arrow(requests, point, layer), fingerprint=secrets.token_hex(8))


def export_parquet(
    requests: Iterable[StoredRequest], out: Path, point: str | None = None, layer: int | None = None
) -> int:
    """Write the table of `to_arrow` to a new file, request by request; the number of lines. Raises as `to_arrow`."""
    arrow, parquet = _optional("pyarrow"), _optional("pyarrow.parquet")
    lines, writer = 0, None
    with out.open("xb") as file:
        try:
            for batch in _batches(arrow, requests, point, layer):
                writer = writer or parquet.ParquetWriter(file, batch.schema)
                writer.write_batch(batch)
                lines += batch.num_rows
            if writer is None:
                raise ValueError("no row was captured there")
            writer.close()
        except BaseException:
            out.unlink()
            raise
    return lines


def export_npz(requests: Iterable[StoredRequest], out: Path, point: str | None = None, layer: int | None = None) -> int:
    """Write a new .npz archive, site by site; the number of sites.

    For request ``i`` it has ``i.point.layer`` (rows; bfloat16 becomes float32), ``i.point.layer.positions`` and
    ``i.point.layer.token_ids``. ``requests`` is what else is known of the requests, a JSON list as a string.

    Raises:
        ValueError: no row was captured there.
    """
    sites, about = 0, []
    with out.open("xb") as file:
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for i, request in enumerate(requests):
                    about.append(describe(request))
                    for site in _chosen(request, point, layer):
                        name = f"{i}.{site[0]}.{site[1]}"  # never a client's text: it would be a file name
                        _add(archive, name, request.numpy(*site))
                        _add(archive, f"{name}.positions", request.positions(*site).numpy())
                        _add(archive, f"{name}.token_ids", request.token_ids(*site).numpy())
                        sites += 1
                if not sites:
                    raise ValueError("no row was captured there")
                _add(archive, "requests", np.array(json.dumps(about)))
        except BaseException:
            out.unlink()
            raise
    return sites


def describe(request: StoredRequest) -> dict[str, Any]:
    """All that is known of a request but its rows, in JSON's types."""
    return {
        "request_id": request.request_id,
        "sample": request.sample,
        "model": request.model,
        "tag": request.tag,
        "status": request.status,
        "error": request.error,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "spec": msgspec.to_builtins(request.spec),
        "sites": [
            {"point": point, "layer": layer, "shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch.")}
            for point, layer in request.sites
            for rows in [request.tensor(point, layer)]
        ],
    }


def _add(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)  # type: ignore[no-untyped-call]


def _batches(arrow: Any, requests: Iterable[StoredRequest], point: str | None, layer: int | None) -> Iterator[Any]:
    first: tuple[Any, int] | None = None
    for request in requests:
        for site in _chosen(request, point, layer):
            rows = request.numpy(*site)
            if not len(rows):
                continue
            kind = rows.dtype, rows.shape[1]
            first = first or kind
            if kind != first:
                raise ValueError(
                    f"{site[0]}[{site[1]}] of {request.request_id!r} has {kind[1]} x {kind[0]}, rows before it "
                    f"{first[1]} x {first[0]}; a table has one kind: choose a point and layer, or a request"
                )
            yield _batch(arrow, request, site, rows)


def _batch(arrow: Any, request: StoredRequest, site: tuple[str, int], rows: npt.NDArray[Any]) -> Any:
    n = len(rows)
    same = {
        "request_id": arrow.scalar(request.request_id, arrow.string()),
        "sample": arrow.scalar(request.sample, arrow.int32()),
        "model": arrow.scalar(request.model, arrow.string()),
        "tag": arrow.scalar(request.tag, arrow.string()),
        "status": arrow.scalar(request.status, arrow.string()),
        "point": arrow.scalar(site[0], arrow.string()),
        "layer": arrow.scalar(site[1], arrow.int32()),
    }
    columns = {name: arrow.repeat(value, n) for name, value in same.items()}
    for name, values in (("position", request.positions(*site)), ("token_id", request.token_ids(*site))):
        if request.spec.get("reduce") == "last":
            values = values[-1:]
        known = len(values) == n and request.spec.get("reduce") != "mean"
        columns[name] = arrow.array(values.numpy()) if known else arrow.nulls(n, arrow.int64())
    flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
    columns["row"] = arrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])
    return arrow.RecordBatch.from_pydict(columns)


def _chosen(request: StoredRequest, point: str | None, layer: int | None) -> list[tuple[str, int]]:
    return [site for site in request.sites if point in (None, site[0]) and layer in (None, site[1])]


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this needs {package}, which is not installed: pip install {package} ({error})") from None
