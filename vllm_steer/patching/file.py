# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of sweeps."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors import safe_open as open_file
from safetensors.numpy import save as encode_arrays

from vllm_steer.errors import SteeringError
from vllm_steer.patching.header import VERSION, SweepInfo
from vllm_steer.patching.metrics import NUM_MEASURES
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.sweep import Cell

_KEY = "vllm_steer.patching"
_ARRAYS = ("clean", "corrupt", "cells", "controls", "random")
_TABLES = ("errors", "control_errors", "not_run")
MOST_CHANGE = 0.25
"""Largest distance, in nats or units of the metric, of the unpatched runs of a sweep from those in its file."""


_Reasons = list[tuple[Cell, str]]


class _Document(msgspec.Struct, frozen=True):
    info: SweepInfo
    errors: _Reasons
    cached_tokens: int
    prompt_tokens: int
    control_errors: _Reasons = []
    not_run: _Reasons = []


def encode(result: PatchingResult) -> bytes:
    """Return the bytes of the file."""
    tables = {name: list(getattr(result, name).items()) for name in _TABLES}
    document = _Document(
        info=result.info, cached_tokens=result.cached_tokens, prompt_tokens=result.prompt_tokens, **tables
    )
    arrays = {name: np.ascontiguousarray(getattr(result, name)) for name in _ARRAYS}
    arrays["repeat_cases"] = np.array([case for case, _ in result.repeats], np.int64)
    arrays["repeats"] = np.array([measures for _, measures in result.repeats]).reshape(-1, NUM_MEASURES)
    return encode_arrays(arrays, {_KEY: msgspec.json.encode(document).decode()})


def save(result: PatchingResult, path: Path) -> None:
    """Write ``result``; an interrupted call leaves an existing file as it was."""
    # Not the name itself, which may be as long as the file system allows.
    name = hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()
    temporary = path.with_name(f".{name}.{os.getpid()}")
    try:
        temporary.write_bytes(encode(result))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Raise ``SteeringError`` if no file can be written at ``path``, where the results of a sweep would be lost."""
    folder = path.absolute().parent
    if path.is_dir():
        raise SteeringError("file", f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise SteeringError("file", f"the folder {folder} does not exist; create it")
    if not os.access(folder, os.W_OK):
        raise SteeringError("file", f"cannot write to the folder {folder}; use another one")


def load(path: Path) -> PatchingResult:
    """Read a file; raise ``SteeringError`` if it is not one of this module."""
    try:
        with open_file(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if _KEY not in metadata:
            raise SteeringError(str(path), "has no patching study in its metadata")
        document = msgspec.json.decode(metadata[_KEY], type=_Document)
    except (SafetensorError, msgspec.MsgspecError, TypeError) as error:  # numpy lacks some dtypes of safetensors
        raise SteeringError(str(path), f"is not a file of a patching study: {error}") from None
    info = document.info
    if info.version != VERSION:
        raise SteeringError(str(path), f"has version {info.version} of the format; this release reads {VERSION}")
    for name, shape in _shapes(info, arrays.get("repeat_cases", np.empty(0))).items():
        if name not in arrays:
            raise SteeringError(str(path), f"is damaged: it has no array {name}; run the sweep again")
        if (found := arrays[name].shape) != shape:
            problem = f"is damaged: {name} has shape {list(found)}, not {list(shape)}; run the sweep again"
            raise SteeringError(str(path), problem)
    tables: dict[str, Any] = {name: dict(getattr(document, name)) for name in _TABLES}
    repeats = list(zip(arrays["repeat_cases"].tolist(), arrays["repeats"], strict=True))
    return PatchingResult(
        info,
        repeats=repeats,
        cached_tokens=document.cached_tokens,
        prompt_tokens=document.prompt_tokens,
        **{name: arrays[name] for name in _ARRAYS},
        **tables,
    )


def _shapes(info: SweepInfo, repeat_cases: np.ndarray) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's arrays."""
    columns = len(info.pairs[0].columns) if info.pairs else 0
    runs, rows, repeats = len(info.pairs) * info.draws, (len(info.points), len(info.layers)), repeat_cases.size
    cells = (runs, *rows, columns, NUM_MEASURES)
    return {
        "cells": cells,
        "clean": (runs, NUM_MEASURES),
        "corrupt": (runs, NUM_MEASURES),
        "controls": (runs, *rows, NUM_MEASURES),
        "random": cells if info.random_control else (0,),
        "repeat_cases": (repeats,),
        "repeats": (repeats, NUM_MEASURES),
    }


def decode(data: bytes, name: str) -> PatchingResult:
    """Read the bytes of a file; raise ``SteeringError`` for ``name`` if they are not one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.safetensors")
        path.write_bytes(data)
        try:
            return load(path)
        except SteeringError as error:
            raise SteeringError(name, error.problem) from None


def resume(path: Path, fresh: PatchingResult) -> PatchingResult:
    """Return the result in a file with the unpatched runs of ``fresh``, to which the sweep's other cells are added.

    Raises:
        SteeringError: The file is of another sweep.
    """
    found = load(path)
    if found.info.digest != fresh.info.digest:
        raise SteeringError(
            "file", f"{path} has the results of another sweep (other prompts, cells or settings); use another file"
        )
    pairs = ((fresh.clean, found.clean), (fresh.corrupt, found.corrupt))
    change = max(float(np.nan_to_num(np.abs(now - before)).max()) for now, before in pairs)
    if change > MOST_CHANGE:
        raise SteeringError(
            "file",
            f"{path} has unpatched runs that differ by {change:.3g} from those of this model and metric; use another "
            "file",
        )
    return replace(found, info=fresh.info, errors={}, control_errors={}, not_run={})
