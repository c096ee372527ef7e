# SPDX-License-Identifier: Apache-2.0
"""Request keys of vllm-lens, translated to captures and edits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, field_validator

from vllm_steer import Edit
from vllm_steer.adapters import MASK_HINT, MAX_EDITS, refuse_repeated, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.refusals import KEY, REFUSALS
from vllm_steer.peers.vllm_lens.tensors import MAX_BYTES, deserialize_tensor, measure, serialize_tensor

CAPTURE_KEY = "output_residual_stream"
STEERING_KEY = "apply_steering_vectors"
TRANSPORT_KEY = "activations_transport"
PREFIX_CACHE_KEY = "skip_reading_prefix_cache"
REFUSED_KEYS = REFUSALS["vllm-lens"][KEY]
KEYS = (CAPTURE_KEY, STEERING_KEY, TRANSPORT_KEY, PREFIX_CACHE_KEY, *REFUSED_KEYS)
TRANSPORTS = ("base64", "binary")
PARENTS = ("extra_args", "vllm_xargs")
"""Fields of a body that have request keys."""
LORA_FIELD = "lora_request"


class SteeringVector(BaseModel):
    """Vectors to add to the stream after some layers.

    Examples:
        >>> import torch
        >>> from vllm_steer.peers.vllm_lens import SteeringVector
        >>> SteeringVector(activations=torch.ones(1, 4), layer_indices=[2], scale=2.0).norm_match
        False
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    activations: torch.Tensor
    """``[layers, hidden]``: added at every token; ``[layers, positions, hidden]``: added at some positions."""
    layer_indices: list[int]
    """Layer of each entry of ``activations``; the vector is added to the layer's output."""
    scale: float = 1.0
    """Factor of the vectors."""
    norm_match: bool = False
    """Whether vectors are scaled to the norm of the row that they are added to, times ``scale``."""
    position_indices: list[int] | None = None
    """Positions of the second dimension of ``activations``, from 0; None for 0, 1, 2 and so on."""

    @field_validator("activations", mode="before")
    @classmethod
    def _read_activations(cls, value: Any) -> torch.Tensor:
        if isinstance(value, Mapping):
            value = deserialize_tensor(value, "activations")
        elif isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        elif isinstance(value, (list, tuple)):
            try:
                value = torch.tensor(value, dtype=torch.float32)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"not a list of numbers: {shown(str(error))}") from None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise ValueError("must be a tensor of a floating dtype, an array, nested lists or its JSON form")
        return value.detach().cpu()

    @field_validator("position_indices", "layer_indices", mode="before")
    @classmethod
    def _refuse_masks(cls, value: Any) -> Any:
        # pydantic reads true as 1.
        if isinstance(value, (list, tuple)) and bool in set(map(type, value)):
            raise ValueError(f"has booleans; {MASK_HINT}")
        return value

    @field_serializer("activations")
    def _write_activations(self, value: torch.Tensor) -> dict[str, Any]:
        return serialize_tensor(value)

    def edits(self, field: str = STEERING_KEY) -> list[Edit]:
        """Return the edits that add the vectors.

        Args:
            field: Path of the vector, for errors.

        Raises:
            SteeringError: The shapes do not agree, or a value is invalid.
        """
        shape, layers = tuple(self.activations.shape), self.layer_indices
        if len(shape) not in (2, 3) or 0 in shape:
            raise SteeringError(
                f"{field}.activations", f"has shape {list(shape)}; use [layers, hidden] or [layers, positions, hidden]"
            )
        if len(layers) != shape[0]:
            raise SteeringError(f"{field}.layer_indices", f"names {len(layers)} layers; activations has {shape[0]}")
        seen: set[int] = set()
        for layer in layers:
            if layer in seen:
                raise SteeringError(f"{field}.layer_indices", f"names layer {layer} more than once; name it once")
            seen.add(layer)
        if (count := math.prod(shape[:-1])) > MAX_EDITS:
            raise SteeringError(f"{field}.activations", f"has {count} vectors; at most {MAX_EDITS} are accepted")
        if len(shape) == 2:
            if self.position_indices is not None:
                raise SteeringError(
                    f"{field}.position_indices",
                    "needs activations of shape [layers, positions, hidden]; a 2-D vector is added at every token",
                )
            rows: list[tuple[int, Any, torch.Tensor]] = [
                (layer, "all", self.activations[i]) for i, layer in enumerate(layers)
            ]
        else:
            positions = self._positions(shape[1], field)
            rows = [
                (layer, [position], self.activations[i, j])
                for i, layer in enumerate(layers)
                for j, position in enumerate(positions)
            ]
        return [self._edit(row, field) for row in rows]

    def _positions(self, count: int, field: str) -> Sequence[int]:
        if self.position_indices is None:
            return range(count)
        positions = self.position_indices
        refuse_repeated(positions, f"{field}.position_indices")
        if len(positions) != count:
            raise SteeringError(f"{field}.position_indices", f"must have {count} positions, as many as activations")
        if min(positions) < 0:
            raise SteeringError(f"{field}.position_indices", f"positions count from 0, not {min(positions)}")
        return positions

    def _edit(self, row: tuple[int, Any, torch.Tensor], field: str) -> Edit:
        layer, tokens, vector = row
        kind: Any = "add_normed" if self.norm_match else "add"
        try:
            return Edit(kind=kind, point="post_block", layers=layer, vector=vector, strength=self.scale, tokens=tokens)
        except SteeringError as error:
            names = {"layers": "layer_indices", "vector": "activations", "strength": "scale"}
            name = names.get(error.field.partition("[")[0], error.field)
            raise SteeringError(f"{field}.{name}", error.problem) from None


@dataclass(frozen=True)
class LensRequest:
    """Request keys, checked and translated."""

    layers: list[int] | str | None
    """Layers to capture; None for no capture."""
    edits: tuple[Edit, ...]
    binary: bool
    """Whether large activations are returned as a handle over HTTP."""

    @property
    def capture(self) -> dict[str, Any] | None:
        """Spec of the consumer ``memory``: the stream after each block, at all forwarded tokens."""
        return None if self.layers is None else {"hooks": {"post_block": self.layers}, "positions": "all"}

    def add_to(self, fields: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Return the request fields ``fields`` with the captures and edits of the keys.

        Raises:
            SteeringError: A field is already used for something else.
        """
        joined = dict(fields)
        if self.capture is not None:
            capture = joined.get("capture") or {}
            if not isinstance(capture, Mapping) or "memory" in capture:
                raise SteeringError(f"{field}.{CAPTURE_KEY}", "conflicts with capture.memory; use one of them")
            joined["capture"] = {**capture, "memory": self.capture}
        if self.edits:
            edits = joined.get("steering") or []
            if not isinstance(edits, (list, tuple)):
                raise SteeringError("steering", "must be a list of edits")
            joined["steering"] = [*edits, *self.edits]
        return joined


def read_keys(given: Mapping[str, Any], field: str, max_bytes: int = MAX_BYTES) -> LensRequest:
    """Check and translate the request keys in ``given``; other keys are ignored.

    Args:
        given: Values by key, as Python or JSON values, or JSON texts.
        field: Path of ``given``, for errors.
        max_bytes: Most bytes of all tensors together.

    Raises:
        SteeringError: A value is invalid, or a key is not supported.
    """
    values = {key: _from_json(given[key], f"{field}.{key}") for key in KEYS if given.get(key) is not None}
    for key, advice in REFUSED_KEYS.items():
        if values.get(key) not in (None, False, []):
            raise SteeringError(f"{field}.{key}", advice)
    transport = values.get(TRANSPORT_KEY, TRANSPORTS[0])
    if transport not in TRANSPORTS:
        raise SteeringError(f"{field}.{TRANSPORT_KEY}", f"must be base64 or binary, not {shown(transport)}")
    if not isinstance(values.get(PREFIX_CACHE_KEY, True), bool):
        raise SteeringError(f"{field}.{PREFIX_CACHE_KEY}", "must be true or false; captures are complete with either")
    return LensRequest(
        _read_layers(values.get(CAPTURE_KEY), f"{field}.{CAPTURE_KEY}"),
        _read_vectors(values.get(STEERING_KEY), f"{field}.{STEERING_KEY}", max_bytes),
        transport == "binary",
    )


def read_adapter(value: Any) -> str:
    """Return the name of the adapter in the field ``lora_request`` of a body.

    Raises:
        SteeringError: The field has something else, such as the path of an adapter.
    """
    name = value.get("lora_name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or set(value) - {"lora_name", "lora_int_id"}:
        raise SteeringError(
            LORA_FIELD, 'must be {"lora_name": name} of an adapter that the server has loaded (--lora-modules)'
        )
    return name


def _from_json(value: Any, field: str) -> Any:
    """Return the value of a JSON text, and other values unchanged."""
    if not isinstance(value, str) or (field.endswith(TRANSPORT_KEY) and value[:1] != '"'):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SteeringError(field, f"is not valid JSON: {shown(str(error))}") from None


def _read_layers(value: Any, field: str) -> list[int] | str | None:
    if value is None or value is False:
        return None
    if value is True:
        return "all"
    if not isinstance(value, (list, tuple, range)) or not value:
        raise SteeringError(field, f"must be true or a list of layer numbers, not {shown(value)}")
    return list(value)  # the spec checks the numbers


def _read_vectors(value: Any, field: str, max_bytes: int) -> tuple[Edit, ...]:
    if value is None:
        return ()
    if isinstance(value, (SteeringVector, Mapping)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise SteeringError(field, f"must be a list of steering vectors, not {shown(value)}")
    _check_sizes(value, field, max_bytes)
    vectors = [_read_vector(item, f"{field}[{i}]") for i, item in enumerate(value)]
    edits = [edit for i, vector in enumerate(vectors) for edit in vector.edits(f"{field}[{i}]")]
    _refuse_second_norms(vectors, field)
    return tuple(edits)


def _check_sizes(items: Sequence[Any], field: str, max_bytes: int) -> None:
    """Raise SteeringError if vectors are too many or too large, from their shapes, before any is decompressed."""
    size = count = 0
    for i, item in enumerate(items):
        activations: Any = item.activations if isinstance(item, SteeringVector) else None
        if isinstance(item, Mapping):
            activations = item.get("activations")
        if isinstance(activations, Mapping):
            size += measure(activations, f"{field}[{i}].activations")[1]
            count += math.prod(map(int, activations["shape"][:-1]))
        elif activations is not None:
            shape = getattr(activations, "shape", None)
            rows = len(activations) if isinstance(activations, (list, tuple)) else 0
            count += max(1, rows if shape is None else math.prod(shape[:-1]))
        if size > max_bytes:
            raise SteeringError(field, f"has tensors of more than {max_bytes} bytes; send fewer or smaller ones")
        if count > MAX_EDITS:
            raise SteeringError(field, f"has more than {MAX_EDITS} vectors, the most that are accepted")


def _refuse_second_norms(vectors: Sequence[SteeringVector], field: str) -> None:
    """Raise SteeringError if a norm-matched vector follows another vector of its layer and token.

    It would be scaled to the norm after the other vector. vllm-lens does the same in models whose layers return one
    tensor; in those whose layers return the stream in two parts, it takes the norm before all vectors.
    """
    whole: set[int] = set()  # layers with a vector at all tokens
    touched: dict[int, set[int]] = {}  # positions with a vector, by layer
    for i, vector in enumerate(vectors):
        positions: Sequence[int] | None = None
        if vector.activations.ndim == 3:
            positions = vector._positions(vector.activations.shape[1], field)
        for layer in vector.layer_indices:
            taken = touched.setdefault(layer, set())
            follows = bool(taken) if positions is None else not taken.isdisjoint(positions)
            if vector.norm_match and (follows or layer in whole):
                raise SteeringError(
                    f"{field}[{i}].norm_match",
                    f"is ambiguous: an earlier vector changes the norm of layer {layer} at the same tokens; list "
                    "norm-matched vectors first, at most one for each layer and token",
                )
            if positions is None:
                whole.add(layer)
            else:
                taken.update(positions)


def _read_vector(item: Any, field: str) -> SteeringVector:
    if isinstance(item, SteeringVector):
        return item
    try:
        return SteeringVector.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SteeringError(f"{field}.{where}" if where else field, first["msg"]) from None
