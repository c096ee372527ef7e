# SPDX-License-Identifier: Apache-2.0
"""Projections of captured rows: the engine returns k numbers per row instead of the row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_COMPONENTS, MAX_DIRECTIONS, MAX_ENGINE_DIRECTIONS
from vllm_steer.request.matrix import MatrixInput, MatrixLimits, parse_matrix
from vllm_steer.request.references import ProbeReference, parse_probe
from vllm_steer.request.vector import ByContent, PackedVector, VectorForm, content_digest

DirectionsInput: TypeAlias = MatrixInput
DIRECTIONS = MatrixLimits("directions", "k", MAX_DIRECTIONS, MAX_COMPONENTS)


class DirectionsForm(msgspec.Struct, forbid_unknown_fields=True):
    """Projections on directions."""

    directions: Annotated[list[VectorForm], msgspec.Meta(min_length=1, max_length=MAX_DIRECTIONS)] | PackedVector


class ProbesForm(msgspec.Struct, forbid_unknown_fields=True):
    """Projections on probes of registered modules, each written `module/probe`."""

    probes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_DIRECTIONS)]


TOO_LARGE = "has products with rows that overflow float32 (its norm must be below 1.8447e+19); use smaller numbers"
"""Problem of a vector for which `products_overflow` is true."""


def products_overflow(vector: npt.NDArray[np.float32]) -> bool:
    """Return whether the square of a vector's norm overflows float32.

    Models cannot normalise a row of such a norm. A product of two smaller norms does not overflow.
    """
    with np.errstate(over="ignore"):
        return not np.isfinite(np.dot(vector, vector))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Projection(ByContent):
    """The dot products of every row with k directions, computed in float32.

    Directions are not normalized: a unit vector yields the length of a row along it, the weights of a probe yield its
    score. Equality and hash are by content.

    Examples:
        >>> from vllm_steer import CaptureSpec, Projection
        >>> directions = Projection([[1.0, 0.0], [0.0, 1.0]])
        >>> directions.directions.shape
        (2, 2)
        >>> spec = CaptureSpec(hooks={"post_block": [12]}, reduce=directions)
    """

    directions: npt.NDArray[np.float32]
    """float32 ``[k, H]``, C-contiguous, finite, read-only."""

    def __init__(self, directions: DirectionsInput, field: str = "directions") -> None:
        """Validate the directions.

        Args:
            directions: A list of vectors in any form that `parse_vector` accepts; a numpy array or torch tensor
                ``[k, H]``; or the packed form with shape ``[k, H]``. 1 to 1024 directions of equal width, at most
                2^22 components in total.
            field: Path of the value, for errors.

        Raises:
            SteeringError: ``directions`` has another form, or the square of a norm overflows float32.
        """
        matrix = parse_matrix(directions, field, DIRECTIONS)
        overflows = [products_overflow(each) for each in matrix]
        if any(overflows):
            raise SteeringError(field if len(matrix) == 1 else f"{field}[{overflows.index(True)}]", TOO_LARGE)
        object.__setattr__(self, "directions", matrix)

    @classmethod
    def from_wire(cls, obj: object, field: str = "reduce") -> "Projection":
        """Decode the result of `to_wire`; raise SteeringError on anything else."""
        if not isinstance(obj, Mapping) or set(obj) != {"shape", "data"} or not isinstance(obj["data"], bytes):
            raise SteeringError(field, "is not an encoded projection")
        shape = DIRECTIONS.check(obj["shape"], field)
        if len(obj["data"]) != 4 * shape[0] * shape[1]:
            raise SteeringError(field, f"has {len(obj['data'])} bytes of data for shape {list(shape)} in float32")
        return cls(np.frombuffer(obj["data"], "<f4").reshape(shape), field)

    def to_wire(self) -> dict[str, object]:
        """Return the shape and the float32 bytes, as builtins for msgpack."""
        return {"shape": list(self.directions.shape), "data": self.directions.astype("<f4", copy=False).tobytes()}

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """The content digest of each direction."""
        return tuple(content_digest(direction) for direction in self.vectors)

    @property
    def vectors(self) -> tuple[bytes, ...]:
        """The little-endian float32 bytes of each direction."""
        return tuple(row.astype("<f4", copy=False).tobytes() for row in self.directions)

    @cached_property
    def digest(self) -> bytes:
        """Digest of all directions in order; it identifies projected rows in transfers."""
        return projection_digest(self.digests)

    @property
    def in_engine(self) -> bool:
        """Whether the engine computes the projection; otherwise it is computed where the rows arrive.

        The engine does so if the result is smaller than a row of 16-bit numbers and there are at most
        `MAX_ENGINE_DIRECTIONS` directions, each of which takes an entry of the vector table.
        """
        count, width = self.directions.shape
        return bool(count <= MAX_ENGINE_DIRECTIONS and 2 * count < width)

    def _arguments(self) -> dict[str, Any]:
        return {"directions": self.directions}

    def _content(self) -> tuple[tuple[int, ...], bytes]:
        return self.directions.shape, self.directions.tobytes()

    def __repr__(self) -> str:
        return f"Projection(<float32{list(self.directions.shape)}>)"


def projection_digest(digests: Sequence[bytes]) -> bytes:
    """Return the digest of a projection from the digests of its directions."""
    return content_digest(b"".join(digests))


@dataclass(frozen=True)
class NamedProjection:
    """A projection on probes of registered modules; admission of the request replaces it by a `Projection`."""

    probes: tuple[ProbeReference, ...]
    """Probes in the order of the result's columns."""

    @classmethod
    def parse(cls, value: object, field: str = "probes") -> "NamedProjection":
        """Parse a list of 1 to 1024 probes such as ``"calm/anger"``."""
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_DIRECTIONS:
            raise SteeringError(field, f'must be a list of 1 to {MAX_DIRECTIONS} probes such as ["calm/anger"]')
        return cls(tuple(parse_probe(item, f"{field}[{i}]") for i, item in enumerate(value)))

    def to_wire(self) -> dict[str, object]:
        """Return the names as builtins."""
        return {"probes": [str(probe) for probe in self.probes]}
