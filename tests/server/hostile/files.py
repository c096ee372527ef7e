# SPDX-License-Identifier: Apache-2.0
"""Hostile safetensors files, and files of other formats."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
from safetensors.numpy import save

WIDTH = 64
_VECTOR = np.full(WIDTH, 0.5, np.float32)
_SIZE = _VECTOR.nbytes
GOOD = save({"base.post_block.1": _VECTOR})


def file_of(header: object, data: bytes = _VECTOR.tobytes(), size: int | None = None) -> bytes:
    """Return a file with this header (text, or an object for JSON); ``size`` replaces the length of the header."""
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def tensor(**parts: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [WIDTH], "data_offsets": [0, _SIZE], **parts}


def one(name: str = "base.post_block.1", **parts: Any) -> bytes:
    """Return a file of one tensor; ``parts`` replace its valid attributes."""
    return file_of({name: tensor(**parts)})


def with_metadata(**metadata: Any) -> bytes:
    """Return a valid file with this metadata."""
    return file_of({"__metadata__": metadata, "base.post_block.1": tensor()})


def _archive(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "npz":
        np.savez(buffer, _VECTOR)
    elif kind == "npy":
        np.save(buffer, _VECTOR)
    else:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", b"\x80\x02c")
            file.writestr("archive/zeros", bytes(1 << 24))
    return buffer.getvalue()


_ENTRY = '"base.post_block.1": ' + json.dumps(tensor())
FILES: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": GOOD[:7],
    "the length alone": GOOD[:8],
    "half a header": GOOD[:40],
    "no data": file_of({"base.post_block.1": tensor()}, b""),
    "one byte too few": GOOD[:-1],
    "one byte too many": GOOD + b"x",
    "a header of 0 bytes": file_of("", size=0),
    "a header of 2 ** 63 bytes": file_of({}, size=2**63),
    "a header of -1 bytes": b"\xff" * 8 + GOOD[8:],
    "a header of 100 MB": file_of({}, size=100_000_000),
    "a header one byte too long": file_of({"base.post_block.1": tensor()}, size=len(GOOD)),
    "a header that ends in the data": file_of({"base.post_block.1": tensor()}, size=len(GOOD) - 20),
    "a header of spaces": file_of(" " * 1000),
    "a header that is a list": file_of([tensor()]),
    "a header that is a number": file_of("1"),
    "a header that is null": file_of("null"),
    "a header in UTF-16": file_of(json.dumps({"base.post_block.1": tensor()}).encode("utf-16").decode("latin-1")),
    "a header with a byte-order mark": file_of("\ufeff" + json.dumps({"base.post_block.1": tensor()})),
    "a header 50,000 deep": file_of('{"a": ' * 50_000 + "1" + "}" * 50_000),
    "metadata 50,000 deep": file_of('{"__metadata__": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    "a name twice": file_of("{" + _ENTRY + ", " + _ENTRY + "}"),
    "offsets twice": file_of('{"base.post_block.1": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256], '
                             '"data_offsets": [0, 256]}}'),
    "NaN in the header": file_of('{"base.post_block.1": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 256]}}'),
    "a header without tensors": file_of({}, b""),
    "metadata alone": file_of({"__metadata__": {"description": "x"}}, b""),
    "5,200 tensors": file_of({f"base.post_block.{i}": tensor(shape=[0], data_offsets=[0, 0]) for i in range(5200)}),
    "overlapping offsets": file_of({"base.post_block.1": tensor(), "base.post_block.2": tensor()}),
    "half overlapping offsets": file_of(
        {"base.post_block.1": tensor(), "base.post_block.2": tensor(data_offsets=[128, 384])}, bytes(384)
    ),
    "a gap": file_of(
        {"base.post_block.1": tensor(), "base.post_block.2": tensor(data_offsets=[300, 556])}, bytes(556)
    ),
    "a gap in front": file_of({"base.post_block.1": tensor(data_offsets=[64, 320])}, bytes(320)),
    "offsets that run back": one(data_offsets=[_SIZE, 0]),
    "offsets beyond the file": one(data_offsets=[0, 2**40]),
    "offsets of 2 ** 64": one(data_offsets=[0, 2**64]),
    "negative offsets": one(data_offsets=[-_SIZE, 0]),
    "fractional offsets": one(data_offsets=[0.0, float(_SIZE)]),
    "offsets as strings": one(data_offsets=["0", "256"]),
    "one offset": one(data_offsets=[0]),
    "three offsets": one(data_offsets=[0, 128, 256]),
    "no offsets": file_of({"base.post_block.1": {"dtype": "F32", "shape": [WIDTH]}}),
    "an empty range for 64 numbers": one(data_offsets=[0, 0]),
    "another shape": one(shape=[32]),
    "a shape of 10 ** 12": one(shape=[10**12]),
    "a shape that overflows": one(shape=[2**62, 4]),
    "a shape of 2 ** 64": one(shape=[2**64 + WIDTH]),
    "a negative shape": one(shape=[-WIDTH]),
    "a fractional shape": one(shape=[64.0]),
    "a shape of strings": one(shape=["64"]),
    "no shape": file_of({"base.post_block.1": {"dtype": "F32", "data_offsets": [0, _SIZE]}}),
    "a matrix": one(shape=[8, 8]),
    "a scalar": file_of({"base.post_block.1": tensor(shape=[], data_offsets=[0, 4])}, bytes(4)),
    "10,000 dimensions": one(shape=[1] * 10_000),
    "an empty vector": file_of({"base.post_block.1": tensor(shape=[0], data_offsets=[0, 0])}, b""),
    "too narrow": save({"base.post_block.1": _VECTOR[1:]}),
    "too wide": save({"base.post_block.1": np.ones(WIDTH + 1, np.float32)}),
    "widths that differ": save({"base.post_block.1": _VECTOR, "base.post_block.2": _VECTOR[1:]}),
    "int64": save({"base.post_block.1": np.ones(WIDTH, np.int64)}),
    "booleans": save({"base.post_block.1": np.ones(WIDTH, np.bool_)}),
    "an unknown dtype": one(dtype="F99"),
    "a dtype of null": one(dtype=None),
    "a list of dtypes": one(dtype=["F32"]),
    "float8": one(dtype="F8_E4M3", shape=[256]),
    "four bits": one(dtype="F4", shape=[512]),
    "an entry that is a list": file_of({"base.post_block.1": [0, _SIZE]}),
    "an entry that is null": file_of({"base.post_block.1": None}),
    "an entry with a file": one(file="/etc/passwd"),
    "NaN": save({"base.post_block.1": np.full(WIDTH, np.nan, np.float32)}),
    "Infinity": save({"base.post_block.1": np.full(WIDTH, np.inf, np.float32)}),
    "beyond float32": save({"base.post_block.1": np.full(WIDTH, 1e300, np.float64)}),
    "an empty name": one(""),
    "a path as name": one("../../etc/passwd"),
    "a name of dots": one("base..1"),
    "a tier alone": one("base"),
    "an unknown tier": one("always.post_block.1"),
    "an unknown point": one("base.mlp.1"),
    "a layer out of range": one("base.post_block.4"),
    "a negative layer": one("base.post_block.-1"),
    "a layer of full-width digits": one("base.post_block.１"),
    "a layer of 100,000 digits": one("base.post_block." + "1" * 100_000),
    "a NUL in a name": one("base.post_block.1\0"),
    "a name that runs right to left": one("base.post_block.\u202e1"),
    "a look-alike tier": one("bаse.post_block.1"),
    "a probe without a name": one("probes."),
    "a probe of a path": one("probes.../../evil"),
    "half a surrogate pair in a name": file_of('{"probes.\\ud800": ' + json.dumps(tensor()) + "}"),
    "a vector that no edit refers to": one("edits.0"),
    "unknown metadata": with_metadata(__reduce__="x"),
    "metadata that is a number": with_metadata(description=1),
    "metadata that is a list": file_of({"__metadata__": ["x"], "base.post_block.1": tensor()}),
    "a description of 100,000 letters": with_metadata(description="x" * 100_000),
    "half a surrogate pair in a description": with_metadata(description="\ud800"),
    "provenance that is not JSON": with_metadata(provenance="{"),
    "provenance that is a list": with_metadata(provenance="[]"),
    "provenance of numbers": with_metadata(provenance='{"x": 1}'),
    "provenance twice": with_metadata(provenance='{"x": "1", "x": "2"}'),
    "provenance 50,000 deep": with_metadata(provenance="[" * 50_000),
    "scales of NaN": with_metadata(scales='{"base.post_block.1": NaN}'),
    "a scale of an unknown tensor": with_metadata(scales='{"base.post_block.2": 1}'),
    "scales that are a list": with_metadata(scales="[1]"),
    "scales as strings": with_metadata(scales='{"base.post_block.1": "2"}'),
    "edits with an unknown vector": with_metadata(edits='[{"kind": "add", "vector": "edits.9"}]'),
    "edits with a path as vector": with_metadata(edits='[{"kind": "add", "vector": "/etc/passwd"}]'),
    "edits that are numbers": with_metadata(edits="[1]"),
    "edits with a vector of their own": with_metadata(edits='[{"kind": "add", "vector": [1]}]'),
    "edits 50,000 deep": with_metadata(edits="[" * 50_000 + "]" * 50_000),
    "JSON": b'{"base": {"post_block": {"1": [1]}}}',
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "numpy's file": _archive("npy"),
    "numpy's archive": _archive("npz"),
    "a zip with 16 MiB of zeros": _archive("zip"),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(100),
    "gzip": b"\x1f\x8b\x08" + bytes(100),
    "zeros": bytes(10_000),
}  # fmt: skip
