# SPDX-License-Identifier: Apache-2.0
"""Directions that captured rows are projected on, so that k numbers leave the engine in place of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_COMPONENTS, MAX_DIRECTIONS, MAX_ENGINE_DIRECTIONS, MAX_WIDTH
from vllm_steer.spec.references import ProbeReference, parse_probe
from vllm_steer.spec.scalars import is_integer, shown
from vllm_steer.spec.vector import PACKED_DTYPES, PACKED_KEYS, content_digest, decode_packed, parse_vector

if TYPE_CHECKING:
    import torch

DirectionsInput: TypeAlias = (
    "Sequence[Sequence[float]] | Sequence[npt.NDArray[Any]] | npt.NDArray[Any] | torch.Tensor | Mapping[str, object]"
)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Projection:
    """The dot product of every row with each of k directions, computed in the engine in float32.

    Directions are taken as they are given: a unit vector gives the length of a row along it, a probe's weights
    give the probe's score. Equality and hash are by content.
    """

    directions: npt.NDArray[np.float32]
    """float32 ``[k, H]``, C-contiguous, finite, not writeable."""

    def __init__(self, directions: DirectionsInput, field: str = "directions") -> None:
        """Check and keep the directions.

        Args:
            directions: a list of vectors, each what `parse_vector` reads; a numpy array or torch tensor
                ``[k, H]``; or ``{"dtype": ..., "shape": [k, H], "data": base64}``. 1 to 1024 directions of equal
                width, of 2^22 components at most together.
            field: where they stand, for the error.

        Raises:
            SteeringError: ``directions`` is anything else.
        """
        object.__setattr__(self, "directions", _read(directions, field))

    @classmethod
    def from_wire(cls, obj: object, field: str = "reduce") -> "Projection":
        """Inverse of `to_wire`; raises SteeringError on what it did not write."""
        if not isinstance(obj, Mapping) or set(obj) != {"shape", "data"} or not isinstance(obj["data"], bytes):
            raise SteeringError(field, "is not a projection in wire form")
        shape = _shape(obj["shape"], field)
        if len(obj["data"]) != 4 * shape[0] * shape[1]:
            raise SteeringError(field, f"has {len(obj['data'])} bytes of data for shape {list(shape)} in float32")
        return cls(np.frombuffer(obj["data"], "<f4").reshape(shape), field)

    def to_wire(self) -> dict[str, object]:
        """The projection in builtins that msgpack can carry: its shape and its float32 bytes."""
        return {"shape": list(self.directions.shape), "data": self.directions.astype("<f4", copy=False).tobytes()}

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Each direction's content digest, as an edit's vector has it."""
        return tuple(content_digest(direction) for direction in self.vectors)

    @property
    def vectors(self) -> tuple[bytes, ...]:
        """Each direction as little-endian float32 bytes."""
        return tuple(row.astype("<f4", copy=False).tobytes() for row in self.directions)

    @cached_property
    def digest(self) -> bytes:
        """Of all directions in their order: the name under which products travel."""
        return projection_digest(self.digests)

    @property
    def in_engine(self) -> bool:
        """Whether products leave the engine in the place of rows: where they are fewer bytes than a 16-bit row, and
        their directions no more than :data:`MAX_ENGINE_DIRECTIONS`. The others are formed where the rows arrive."""
        count, width = self.directions.shape
        return bool(count <= MAX_ENGINE_DIRECTIONS and 2 * count < width)

    def _content(self) -> tuple[tuple[int, ...], bytes]:
        return self.directions.shape, self.directions.tobytes()

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Projection) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        return f"Projection(<float32{list(self.directions.shape)}>)"

    def __deepcopy__(self, memo: object) -> "Projection":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor: an unpickled array would come back writeable.
        return partial(Projection, self.directions), ()


def projection_digest(digests: Sequence[bytes]) -> bytes:
    """The digest of a projection on the directions of these digests."""
    return content_digest(b"".join(digests))


@dataclass(frozen=True)
class NamedProjection:
    """A projection on probe directions of registered modules; becomes a `Projection` when the request is admitted."""

    probes: tuple[ProbeReference, ...]
    """In the order of the columns of the result."""

    @classmethod
    def parse(cls, value: object, field: str = "probes") -> "NamedProjection":
        """Read a list of 1 to 1024 names like ``"calm/anger"``."""
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_DIRECTIONS:
            raise SteeringError(field, f'must be a list of 1 to {MAX_DIRECTIONS} probes, e.g. ["calm/anger"]')
        return cls(tuple(parse_probe(item, f"{field}[{i}]") for i, item in enumerate(value)))

    def to_wire(self) -> dict[str, object]:
        """The names, in builtins."""
        return {"probes": [str(probe) for probe in self.probes]}


def _read(value: object, field: str) -> npt.NDArray[np.float32]:
    if isinstance(value, Mapping):
        rows: Any = _unpacked(value, field)
    elif isinstance(value, (list, tuple)):
        rows = value
    else:
        shape = getattr(value, "shape", None)
        if not isinstance(shape, tuple) or not hasattr(value, "dtype"):
            raise SteeringError(
                field,
                "must be a list of vectors, a numpy array or torch tensor [k, H], or packed (dtype, shape [k, H], "
                f"data), not {shown(value)} ({type(value).__name__})",
            )
        _shape(shape, field)
        rows = value
    if not 1 <= len(rows) <= MAX_DIRECTIONS:
        raise SteeringError(field, f"has {len(rows)} directions; give 1 to {MAX_DIRECTIONS}")
    vectors = []
    for i, row in enumerate(rows):
        vectors.append(parse_vector(row, f"{field}[{i}]"))
        if vectors[i].size != vectors[0].size:
            raise SteeringError(
                f"{field}[{i}]", f"has width {vectors[i].size}, but {field}[0] has {vectors[0].size}; all are [H]"
            )
        if (i + 1) * vectors[0].size > MAX_COMPONENTS:
            raise SteeringError(field, f"has more than {MAX_COMPONENTS} components in {len(rows)} directions")
    # A bytes object underneath makes the array immutable for good.
    return np.frombuffer(b"".join(vector.tobytes() for vector in vectors), np.float32).reshape(len(vectors), -1)


def _shape(shape: object, field: str) -> tuple[int, int]:
    if not isinstance(shape, (list, tuple)) or not all(map(is_integer, shape)):
        raise SteeringError(field, f"must have a shape of two integers, [k, H], not {shown(shape)}")
    if len(shape) != 2:
        hint = "; a single direction is [1, H]" if len(shape) == 1 else ""
        raise SteeringError(field, f"has shape {shown(list(shape))}; directions are [k, H]{hint}")
    count, width = int(shape[0]), int(shape[1])
    if not 1 <= count <= MAX_DIRECTIONS or not 1 <= width <= MAX_WIDTH or count * width > MAX_COMPONENTS:
        raise SteeringError(
            field,
            f"has shape {shown([count, width])}; give 1 to {MAX_DIRECTIONS} directions of 1 to {MAX_WIDTH} "
            f"components, {MAX_COMPONENTS} at most together",
        )
    return count, width


def _unpacked(packed: Mapping[Any, object], field: str) -> npt.NDArray[Any]:
    if set(packed) != PACKED_KEYS:
        raise SteeringError(field, f"packed directions have the keys dtype, shape and data, not {shown(list(packed))}")
    name = packed["dtype"]
    dtype = PACKED_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise SteeringError(f"{field}.dtype", f"must be one of {', '.join(PACKED_DTYPES)}, not {shown(name)}")
    shape = _shape(packed["shape"], f"{field}.shape")
    return decode_packed(packed["data"], shape[0] * shape[1], dtype, f"{field}.data").reshape(shape)
