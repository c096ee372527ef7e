# SPDX-License-Identifier: Apache-2.0
"""Builders of vector files, valid and hostile."""

from __future__ import annotations

import io
import json
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

HIDDEN = 8
V = np.arange(1, HIDDEN + 1, dtype=np.float32)


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def pt(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def svec(**directions: Any) -> bytes:
    return json.dumps({"model_type": "llama", "directions": directions, "explained_variances": {}}).encode()


def zip_entry(name: str, content: bytes | None = None, method: int = zipfile.ZIP_STORED, extra: int = 0) -> Any:
    """Return an entry of `zipped`."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type, entry.extra = method, b"\x99\x99\0\0" * (extra // 4)
    return entry, npy(V) if content is None else content


def zipped(*entries: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "w") as archive:  # of equal names
        for entry, content in entries:
            archive.writestr(entry, content)
    return file.getvalue()


def entry_at(data: bytes, number: int) -> int:
    """Return the offset of an entry in the directory of an archive."""
    at = int.from_bytes(data[-6:-2], "little")
    for _ in range(number):
        at += 46 + sum(int.from_bytes(data[at + 28 + 2 * i : at + 30 + 2 * i], "little") for i in range(3))
    return at


def patched(data: bytes, at: int, number: int, size: int = 4) -> bytes:
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def overlapping() -> bytes:
    """Return an archive whose second member lies in the data of the first."""
    inner = zipped(zip_entry("layers.2.npy"))
    data = zipped(
        zip_entry("layers.1.npy", npy(np.frombuffer(inner[: entry_at(inner, 0)], np.float16))),
        zip_entry("layers.2.npy"),
    )
    return patched(data, entry_at(data, 1) + 42, data.index(b"layers.2.npy") - 30)


def control_vector(
    tensors: dict[str, Any],
    architecture: str = "controlvector",
    extra: str = "",
    count: gguf.GGUFValueType | None = gguf.GGUFValueType.UINT32,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> bytes:
    """Return a GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
        writer.add_string("controlvector.model_hint", "llama")
        if count is not None:
            value: Any = [len(tensors)] if count == gguf.GGUFValueType.ARRAY else len(tensors)
            writer.add_key_value("controlvector.layer_count", value, count)
        if extra:
            writer.add_string(extra, "project")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def moved_tensor(offset: int) -> bytes:
    """Return a GGUF file whose second tensor begins at another place."""
    data = control_vector({"direction.1": V, "direction.2": V})
    return patched(data, data.index(b"direction.2") + 11 + 4 + 8 + 4, offset, 8)


def number_tensor() -> bytes:
    """Return a GGUF file with a tensor without dimensions."""
    data = control_vector({"direction.1": V[:1]})
    at = data.index(b"direction.1") + 11
    without = patched(data, at, 0)[: at + 4] + data[at + 12 :]
    header = len(without) - 32  # behind it, the data, on a multiple of 32 bytes
    return without[:header] + bytes(-header % 32) + without[header:]


def renamed(name: str, other: str) -> bytes:
    """Return an archive whose directory has another name than its member."""
    data = zipped(zip_entry(name))
    return data[: entry_at(data, 0)] + data[entry_at(data, 0) :].replace(name.encode(), other.encode())
