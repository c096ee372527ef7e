# SPDX-License-Identifier: Apache-2.0
"""Tensors in ``ModelOutput.metadata``: tensors in this process, and a reference to a file in Inspect's log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic_core import SchemaSerializer, core_schema

from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog
    from inspect_ai.model import ModelOutput

FOLDER_SUFFIX = ".activations"
"""Suffix of the folder beside a log; the folder has the log's name."""


class StoredTensor(torch.Tensor):
    """A tensor that is a reference to its file in JSON. Results of operations are plain tensors.

    Treat it as immutable: copies of a ``ModelOutput`` share it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __pydantic_serializer__ = SchemaSerializer(
        core_schema.any_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.reference)
        )
    )
    reference: Mapping[str, Any]
    """``path``, ``digest``, ``name``, ``shape``, ``dtype``, and ``layers`` of a residual stream."""

    @classmethod
    def of(cls, tensor: torch.Tensor, reference: Mapping[str, Any]) -> StoredTensor:
        """Return a view of ``tensor`` with its reference."""
        stored = tensor.as_subclass(cls)
        stored.reference = reference
        return stored

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return StoredTensor.of, (self.as_subclass(torch.Tensor), dict(self.reference))


def store(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Mapping[str, Any]], folder: str | None, base: str | None
) -> dict[str, StoredTensor]:
    """Write tensors to a safetensors file named after its digest, and return them with references to it.

    Args:
        tensors: Tensors by name.
        facts: JSON facts of tensors by name, which become part of the references.
        folder: Path or URL of the file's folder; None to write nothing.
        base: Folder that ``path`` is relative to; None for a complete path.
    """
    if not tensors:
        return {}
    where: dict[str, Any] = {"path": None, "digest": None}
    if folder is not None:
        from fsspec.core import url_to_fs
        from safetensors.torch import save

        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"facts": json.dumps(facts)})
        digest = hashlib.sha256(data).hexdigest()
        system, root = url_to_fs(folder)
        system.makedirs(root, exist_ok=True)
        with system.open(f"{root}/{digest[:32]}.safetensors", "wb") as file:
            file.write(data)
        path = f"{folder}/{digest[:32]}.safetensors"
        where = {"path": path if base is None else path.removeprefix(f"{base}/"), "digest": f"sha256:{digest}"}
    return {
        name: StoredTensor.of(
            tensor,
            {
                **where,
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                **facts.get(name, {}),
            },
        )
        for name, tensor in tensors.items()
    }


def load(reference: Mapping[str, Any], base: str | None) -> StoredTensor:
    """Read a tensor from its file.

    Args:
        reference: A reference, read from a log.
        base: Folder that a relative path starts at.

    Raises:
        SteeringError: The file is missing, or is another one.
    """
    from fsspec.core import url_to_fs
    from safetensors.torch import load as load_bytes

    path = reference.get("path")
    if path is None:
        raise SteeringError("activations", "were not stored; run within an evaluation, or with activations_dir")
    relative = "://" not in path and not path.startswith("/")
    system, full = url_to_fs(f"{base}/{path}" if relative and base else path)
    if not system.exists(full):
        hint = "; pass the log that the output comes from" if relative and not base else ""
        raise SteeringError("activations", f"{path} does not exist{hint}")
    with system.open(full, "rb") as file:
        data = file.read()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != reference["digest"]:
        raise SteeringError("activations", f"{path} is not the file that the log refers to: its digest differs")
    return StoredTensor.of(load_bytes(data)[reference["name"]], reference)


def read_activations(
    output: ModelOutput | Mapping[str, Any], log: EvalLog | str | None = None
) -> dict[str, StoredTensor]:
    """Return the activations of an output by name.

    Args:
        output: An output of the provider, in the process that made it or read from a log; or its ``metadata``.
        log: The log that the output was read from, or its path. Required for rows that lie beside a log.

    Raises:
        SteeringError: The output has no activations, or their file is not there.
    """
    metadata = output if isinstance(output, Mapping) else output.metadata
    found = (metadata or {}).get("activations")
    if not found:
        raise SteeringError("activations", "the output has none; set output_residual_stream or capture in extra_body")
    return read_tensors(found, log)


def read_tensors(values: Mapping[str, Any], log: EvalLog | str | None) -> dict[str, StoredTensor]:
    """Return tensors by name, given as such or as references in a log; None is left out.

    Raises:
        SteeringError: A file is not there.
    """
    location = log if log is None or isinstance(log, str) else log.location
    base = None if location is None else folder_of(location)
    return {
        name: value if isinstance(value, StoredTensor) else load(value, base)
        for name, value in values.items()
        if value is not None
    }


def folder_of(location: str) -> str:
    """Return the folder of a log, as a path or URL."""
    folder, separator, _ = location.rpartition("/")
    return folder if separator else "."
