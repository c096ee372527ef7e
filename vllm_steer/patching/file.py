# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of sweeps."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors import safe_open as open_file
from safetensors.numpy import save as encode_arrays

from vllm_steer.errors import SteeringError
from vllm_steer.patching.header import VERSION, SweepInfo
from vllm_steer.patching.metrics import NUM_MEASURES
from vllm_steer.patching.result import PatchingResult

_KEY = "vllm_steer.patching"
_ARRAYS = ("clean", "corrupt", "cells", "controls", "random")
MOST_CHANGE = 0.25
"""Largest distance, in nats or units of the metric, of the unpatched runs of a sweep from those in its file."""


class _Document(msgspec.Struct, frozen=True):
    info: SweepInfo
    errors: list[tuple[tuple[int, int, int, int], str]]
    cached_tokens: int
    prompt_tokens: int
    control_errors: list[tuple[tuple[int, int, int, int], str]] = []
    not_run: list[tuple[tuple[int, int, int, int], str]] = []


def encode(result: PatchingResult) -> bytes:
    """Return the bytes of the file."""
    document = _Document(
        result.info,
        list(result.errors.items()),
        result.cached_tokens,
        result.prompt_tokens,
        list(result.control_errors.items()),
        list(result.not_run.items()),
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
    repeats = list(zip(arrays["repeat_cases"].tolist(), arrays["repeats"], strict=True))
    return PatchingResult(
        info,
        arrays["clean"],
        arrays["corrupt"],
        arrays["cells"],
        arrays["controls"],
        repeats,
        dict(document.errors),
        arrays["random"],
        document.cached_tokens,
        document.prompt_tokens,
        dict(document.control_errors),
        dict(document.not_run),
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
    return PatchingResult(
        fresh.info, found.clean, found.corrupt, found.cells, found.controls, found.repeats, {}, found.random,
        found.cached_tokens, found.prompt_tokens,
    )  # fmt: skip
