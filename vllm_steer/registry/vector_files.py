# SPDX-License-Identifier: Apache-2.0
"""Files of modules and vector files of other tools as modules, and modules as files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError, install_hint
from vllm_steer.registry.metadata import METADATA_KEYS, ModuleMetadata, parse_metadata
from vllm_steer.registry.module import CONTENT_KEYS, EDITS, PROBES, Module, parse_module
from vllm_steer.registry.module_files import MLP_PROBES, module_of, write_module
from vllm_steer.vectors import Choice, read_vectors
from vllm_steer.vectors.containers import MAX_FILE_BYTES, Container, open_container
from vllm_steer.vectors.read import CONVERT

_TENSOR_PREFIXES = (*CONTENT_KEYS, MLP_PROBES)


def read_vector_file(
    source: str | Path | bytes,
    choice: Choice = Choice(),  # noqa: B008 - immutable
    out: str | Path = "OUT.safetensors",
) -> tuple[Module, ModuleMetadata]:
    """Read a module's file, or a vector file of another tool as a module.

    Args:
        source: A path, or the file's bytes.
        choice: What a file of another tool does not tell, or the layers to take.
        out: The file to convert it to, for errors.

    Raises:
        SteeringError: The file cannot be read, is invalid, or does not tell where its vectors belong.
    """
    if isinstance(source, bytes):
        return _read(source, choice, CONVERT)
    try:
        if (size := Path(source).stat().st_size) > MAX_FILE_BYTES:
            raise SteeringError("file", f"has {size} bytes; at most {MAX_FILE_BYTES} are read")
        command = f"vllm-steer convert {shlex.quote(str(source))} {shlex.quote(str(out))}"
        return _read(Path(source).read_bytes(), choice, command)
    except OSError as error:
        raise SteeringError("file", f"{source} cannot be read: {error.strerror or error}") from None
    except SteeringError as error:
        raise SteeringError(f"{source}: {error.field}", error.problem) from None


def module_body(file: Container) -> dict[str, Any] | None:
    """Return the request body in a JSON file, as `SteeringRegistry.register` takes it; None for all other files."""
    is_body = file.kind == "json" and file.content.keys() & {*CONTENT_KEYS, "name"}
    return file.content if is_body else None


def _read(data: bytes, choice: Choice, command: str) -> tuple[Module, ModuleMetadata]:
    file = open_container(data)
    if (body := module_body(file)) is not None:
        content = {key: value for key, value in body.items() if key not in (*METADATA_KEYS, "name")}
        module, metadata = parse_module(content), parse_metadata(body)
    elif file.kind == "safetensors" and (
        not file.content or any(name.partition(".")[0] in _TENSOR_PREFIXES for name in file.content)
    ):
        module, metadata = module_of(file)
    else:
        found = read_vectors(file, choice, command)
        base: dict[str, dict[str, Any]] = {}
        for (point, layer), vector in found.vectors.items():
            base.setdefault(point, {})[str(layer)] = vector
        return parse_module({"base": base}), parse_metadata({"model": found.model, "provenance": found.provenance})
    if choice != Choice():
        raise SteeringError("file", "is a module, which names its sites itself; omit --format, --layer and --point")
    return module, metadata


def check_suffix(path: Path) -> None:
    """Raise SteeringError unless files with the suffix of a path can be written."""
    if path.suffix not in (".safetensors", ".gguf"):
        raise SteeringError("out", f"{path} has an unknown suffix; use .safetensors or .gguf")


def write_vector_file(path: Path, module: Module, metadata: ModuleMetadata) -> None:
    """Write a module as ``.safetensors``, or as the control vector of repeng and llama.cpp as ``.gguf``.

    Raises:
        SteeringError: The suffix is another one, or a control vector cannot contain the module.
    """
    check_suffix(path)
    if path.suffix == ".safetensors":
        path.write_bytes(write_module(module, metadata))
        return
    if beyond := [key for key in ("prefill", "decode", EDITS, PROBES) if getattr(module, key)]:
        raise SteeringError("out", f"a control vector has no place for {', '.join(beyond)}; write .safetensors")
    for edit in module.base:
        if edit.point != "post_block" or edit.layers[0] == 0:
            problem = "a control vector has post_block from layer 1 on; take those with --layer, or write .safetensors"
            raise SteeringError("out", f"{edit.point} of layer {edit.layers[0]} has no place: {problem}")
    try:
        import gguf
    except ImportError:
        raise SteeringError("out", f".gguf files need the package gguf; {install_hint('gguf')}") from None
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", metadata.model or "")
    writer.add_uint32("controlvector.layer_count", len(module.base))
    for edit in module.base:
        writer.add_tensor(f"direction.{edit.layers[0]}", edit.vector * np.float32(edit.strength))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
