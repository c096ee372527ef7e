# SPDX-License-Identifier: Apache-2.0
"""Export of stored captures to Arrow tables, `datasets`, Parquet files and .npz archives.

A table has one line per row, with the columns ``run``, ``submission``, ``request_id``, ``sample``, ``model``, ``tag``,
``status``, ``point``, ``layer``, ``position``, ``token_id`` and ``row`` (a fixed-size list). ``run`` and ``submission``
are null for files that a server returned. A mean has no single position, so its ``position`` and ``token_id`` are null.
If the prompt has an embedding at a position, ``token_id`` is null.
"""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.capture.files.reader import StoredRequest
from vllm_steer.capture.results import NO_TOKEN, Site

_ROW = "row"
_TYPES = {
    "run": "string", "submission": "int64", "request_id": "string", "sample": "int32", "model": "string",
    "tag": "string", "status": "string",
}  # fmt: skip
"""Arrow types of a request's properties, which are columns of the table."""
_GROUP_BYTES = 64 << 20
_NO_ROWS = "no rows match; check the request, point and layer"


def to_arrow(requests: Iterable[StoredRequest], point: str | None = None, layer: int | None = None) -> Any:
    """Return all rows as a ``pyarrow.Table``.

    Args:
        requests: Stored requests, for instance `Captures`.
        point: Select one hook point.
        layer: Select one layer.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: Rows differ in width or dtype, or no rows match.
    """
    arrow = _import_optional("pyarrow")
    batches = list(_batches(arrow, requests, point, layer))
    if not batches:
        raise ValueError(_NO_ROWS)
    return arrow.Table.from_batches(batches)


def to_dataset(requests: Iterable[StoredRequest], point: str | None = None, layer: int | None = None) -> Any:
    """Return the table of `to_arrow` as a ``datasets.Dataset``; requires the package ``datasets``."""
    datasets = _import_optional("datasets")
    # Without a fingerprint, datasets pickles all rows to compute one.
    return datasets.Dataset(to_arrow(requests, point, layer), fingerprint=secrets.token_hex(8))


def export_parquet(
    requests: Iterable[StoredRequest], out: Path, point: str | None = None, layer: int | None = None
) -> int:
    """Write the table of `to_arrow` to a new Parquet file, in row groups of 64 to 128 MiB.

    Returns:
        The number of rows written.
    """
    arrow, parquet = _import_optional("pyarrow"), _import_optional("pyarrow.parquet")
    num_rows, writer = 0, None
    with _new_file(out) as file:
        for group in _groups(_batches(arrow, requests, point, layer)):
            table = arrow.Table.from_batches(group)
            if writer is None:
                # A dictionary of the rows would be stored beside them: their numbers rarely repeat.
                names = [name for name in table.column_names if name != _ROW]
                writer = parquet.ParquetWriter(file, table.schema, use_dictionary=names)
            writer.write_table(table, row_group_size=max(1, 2 * _GROUP_BYTES * table.num_rows // table.nbytes))
            num_rows += table.num_rows
        if writer is None:
            raise ValueError(_NO_ROWS)
        writer.close()
    return num_rows


def export_npz(requests: Iterable[StoredRequest], out: Path, point: str | None = None, layer: int | None = None) -> int:
    """Write a new .npz archive, one site at a time.

    Request ``i`` has the arrays ``i.point.layer`` (rows; bfloat16 becomes float32), ``i.point.layer.positions`` and
    ``i.point.layer.token_ids`` (-1 where the prompt has an embedding). The array ``requests`` holds the properties of
    all requests as a JSON list.

    Returns:
        The number of sites written.

    Raises:
        ValueError: No rows match.
    """
    num_sites, descriptions = 0, []
    with _new_file(out) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for i, request in enumerate(requests):
                descriptions.append(describe(request))
                for site in _select_sites(request, point, layer):
                    name = f"{i}.{site[0]}.{site[1]}"  # no client text: members are file names
                    _add_array(archive, name, request.numpy(*site))
                    _add_array(archive, f"{name}.positions", request.positions(*site).numpy())
                    _add_array(archive, f"{name}.token_ids", request.token_ids(*site).numpy())
                    num_sites += 1
            _add_array(archive, "requests", np.array(json.dumps(descriptions)))
        if not num_sites:
            raise ValueError(_NO_ROWS)
    return num_sites


def describe(request: StoredRequest) -> dict[str, Any]:
    """Return all properties of a request except its rows, as JSON types."""
    return {
        **{
            name: getattr(request, name)
            for name in ("request_id", "sample", "model", "tag", "run", "submission", "status", "error")
        },
        "unreached": list(request.unreached),
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "spec": msgspec.to_builtins(request.spec),
        "sites": [
            {"point": point, "layer": layer, "shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch.")}
            for point, layer in request.sites
            for rows in [request.tensor(point, layer)]
        ],
    }


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file that must not exist yet; remove it if writing fails."""
    try:
        opened = path.open("xb")
    except FileExistsError:
        raise FileExistsError(f"{path} exists; name another file, or remove this one") from None
    with opened as file:
        try:
            yield file
        except BaseException:
            path.unlink()
            raise


def _add_array(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)  # type: ignore[no-untyped-call]


def _groups(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Collect batches into groups of at least ``_GROUP_BYTES``, except for the last one."""
    group: list[Any] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _batches(arrow: Any, requests: Iterable[StoredRequest], point: str | None, layer: int | None) -> Iterator[Any]:
    first: tuple[Any, int] | None = None
    for request in requests:
        for site in _select_sites(request, point, layer):
            rows = request.numpy(*site)
            if not len(rows):
                continue
            row_type = rows.dtype, rows.shape[1]
            first = first or row_type
            if row_type != first:
                raise ValueError(
                    f"{site[0]}[{site[1]}] of {request.request_id!r} has {row_type[1]} x {row_type[0]}, earlier rows "
                    f"{first[1]} x {first[0]}; choose a point and layer, or a request"
                )
            yield _batch(arrow, request, site, rows)


def _batch(arrow: Any, request: StoredRequest, site: Site, rows: npt.NDArray[Any]) -> Any:
    n = len(rows)
    columns = {
        name: arrow.repeat(arrow.scalar(getattr(request, name), getattr(arrow, kind)()), n)
        for name, kind in _TYPES.items()
    }
    columns["point"] = arrow.repeat(arrow.scalar(site[0], arrow.string()), n)
    columns["layer"] = arrow.repeat(arrow.scalar(site[1], arrow.int32()), n)
    for name, values in (("position", request.positions(*site)), ("token_id", request.token_ids(*site))):
        if request.spec.get("reduce") == "last":
            values = values[-1:]
        known = len(values) == n and request.spec.get("reduce") != "mean"
        unknown = values.numpy() == NO_TOKEN
        columns[name] = arrow.array(values.numpy(), mask=unknown) if known else arrow.nulls(n, arrow.int64())
    flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
    columns[_ROW] = arrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])
    return arrow.RecordBatch.from_pydict(columns)


def _select_sites(request: StoredRequest, point: str | None, layer: int | None) -> list[Site]:
    return [site for site in request.sites if point in (None, site[0]) and layer in (None, site[1])]


def _import_optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this needs {package}, which is not installed: pip install {package} ({error})") from None
