# SPDX-License-Identifier: Apache-2.0
"""Matrices of a `replace` edit: rows by position, and the directions of a subspace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_MATRIX_COMPONENTS, MAX_SELECTOR_ITEMS, MAX_SUBSPACE, MAX_WIDTH
from vllm_steer.request.scalars import is_integer, shown
from vllm_steer.request.selector import OPEN_END, Selector, plain_positions
from vllm_steer.request.vector import PackedVector, Vector, decode_packed, parse_vector, read_packed_dtype

if TYPE_CHECKING:
    import torch

Matrix: TypeAlias = npt.NDArray[np.float32]
MatrixInput: TypeAlias = (
    "Sequence[Sequence[float]] | Sequence[npt.NDArray[Any]] | npt.NDArray[Any] | torch.Tensor | Mapping[str, object]"
)
MatrixForm = Annotated[
    Annotated[list[list[float]], msgspec.Meta(min_length=1, max_length=MAX_SUBSPACE)] | PackedVector,
    msgspec.Meta(
        description="Directions of the model's hidden size: a list of vectors, or packed with shape `[k, H]`."
    ),
]
"""JSON form of the directions of a subspace."""

MIN_SINGULAR_VALUE = 1e-5
"""Smallest singular value of normalized directions that counts as independent; float32 resolves about 1e-7."""


def is_matrix(value: object) -> bool:
    """Return whether ``value`` has the form of a matrix: two dimensions, or a list whose first item is a row."""
    if isinstance(value, Mapping):
        shape = value.get("shape")
        return isinstance(shape, (list, tuple)) and len(shape) == 2
    if isinstance(value, (list, tuple)):
        first = value[0] if value else None
        return isinstance(first, (list, tuple, Mapping)) or len(getattr(first, "shape", ())) == 1
    return len(getattr(value, "shape", ())) == 2


@dataclass(frozen=True)
class MatrixLimits:
    """Limits of a matrix ``[n, H]``, and the words for its rows in errors."""

    noun: str
    letter: str
    """Stands for the number of rows in a shape."""
    max_rows: int
    max_components: int = MAX_MATRIX_COMPONENTS

    @property
    def shape(self) -> str:
        """The shape in words."""
        return f"[{self.letter}, H]"

    def check(self, shape: object, field: str) -> tuple[int, int]:
        """Return a shape as two integers; raise SteeringError if it is not one of a matrix within the limits."""
        if not isinstance(shape, (list, tuple)) or not all(map(is_integer, shape)):
            raise SteeringError(field, f"must have a shape of two integers, {self.shape}, not {shown(shape)}")
        if len(shape) != 2:
            hint = f"; a single {self.noun[:-1]} is [1, H]" if len(shape) == 1 else ""
            raise SteeringError(field, f"has shape {shown(list(shape))}; {self.noun} are {self.shape}{hint}")
        count, width = int(shape[0]), int(shape[1])
        if not 1 <= count <= self.max_rows or not 1 <= width <= MAX_WIDTH or count * width > self.max_components:
            raise SteeringError(
                field,
                f"has shape {shown([count, width])}; allowed are 1 to {self.max_rows} {self.noun} of 1 to {MAX_WIDTH} "
                f"components, at most {self.max_components} in total",
            )
        return count, width


ROWS = MatrixLimits("rows", "n", MAX_SELECTOR_ITEMS)
SUBSPACE = MatrixLimits("directions", "k", MAX_SUBSPACE)


def parse_matrix(value: object, field: str = "vector", limits: MatrixLimits = ROWS) -> Matrix:
    """Parse a matrix.

    Args:
        value: A list of vectors in any form that `parse_vector` accepts, a numpy array or torch tensor ``[n, H]``, or
            the packed form with shape ``[n, H]``.
        field: Path of the value, for errors.
        limits: Limits of the shape.

    Returns:
        A float32 array ``[n, H]``: C-contiguous, finite, read-only, sharing no writeable memory.

    Raises:
        SteeringError: ``value`` has another form.
    """
    rows: Any = value
    if isinstance(value, Mapping):
        dtype = read_packed_dtype(value, field)
        shape = limits.check(value["shape"], f"{field}.shape")
        rows = decode_packed(value["data"], shape[0] * shape[1], dtype, f"{field}.data").reshape(shape)
    elif not isinstance(value, (list, tuple)):
        given = getattr(value, "shape", None)
        if not isinstance(given, tuple) or not hasattr(value, "dtype"):
            raise SteeringError(
                field,
                f"must be a list of vectors, a numpy array or torch tensor {limits.shape}, or packed (dtype, shape "
                f"{limits.shape}, data), not {shown(value)} ({type(value).__name__})",
            )
        limits.check(given, field)
        if getattr(getattr(value, "device", None), "type", "cpu") == "cuda":
            rows = rows.cpu()
    if not 1 <= len(rows) <= limits.max_rows:
        raise SteeringError(field, f"has {len(rows)} {limits.noun}; give 1 to {limits.max_rows}")
    vectors: list[Vector] = []
    for i, row in enumerate(rows):
        vectors.append(parse_vector(row, f"{field}[{i}]"))
        if vectors[i].size != vectors[0].size:
            raise SteeringError(
                f"{field}[{i}]", f"has width {vectors[i].size}, but {field}[0] has width {vectors[0].size}"
            )
        if (i + 1) * vectors[0].size > limits.max_components:
            raise SteeringError(field, f"has more than {limits.max_components} components in {len(rows)} {limits.noun}")
    # A view of a bytes object is immutable for good.
    return np.frombuffer(b"".join(vector.tobytes() for vector in vectors), np.float32).reshape(len(vectors), -1)


def parse_subspace(value: object, width: int, field: str = "subspace") -> Matrix:
    """Parse the directions of a subspace, which must be linearly independent.

    Args:
        value: A matrix ``[k, H]`` in any form that `parse_matrix` accepts.
        width: Width of the edit's vector.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``value`` has another form or width, or its rank is below k.
    """
    if not is_matrix(value):
        raise SteeringError(field, "must be a list of directions, or an array [k, H]; write one direction as [v]")
    directions = parse_matrix(value, field, SUBSPACE)
    if directions.shape[1] != width:
        raise SteeringError(field, f"has width {directions.shape[1]}, but vector has width {width}")
    for i, direction in enumerate(directions):
        if not direction.any():
            raise SteeringError(f"{field}[{i}]", "is zero in float32; a direction must not be zero")
    singular = _singular_values(directions.tobytes(), len(directions))
    rank = int((singular > MIN_SINGULAR_VALUE).sum())
    if rank < len(directions):
        raise SteeringError(
            field,
            f"has rank {rank}, but {len(directions)} directions in {width} dimensions (smallest singular value "
            f"{singular[-1] if len(singular) == len(directions) else 0.0:.2g} of the normalized directions; "
            f"at least {MIN_SINGULAR_VALUE:g} is needed); omit dependent directions",
        )
    return directions


def check_num_rows(num_rows: int, tokens: Selector) -> None:
    """Raise SteeringError if a matrix has another number of rows than ``tokens`` has positions."""
    if tokens.is_open:
        raise SteeringError(
            "tokens",
            f"{shown(tokens.to_wire())} has no end, but the matrix has {num_rows} rows; name as many positions, or "
            'use "prompt" if it has one row for each prompt token',
        )
    check_row_count(num_rows, tokens.num_positions, "vector", "tokens selects")


def check_order(tokens: object) -> None:
    """Raise SteeringError if positions are not listed in the order of a matrix's rows."""
    field = "tokens"
    if isinstance(tokens, range):
        # Two that are out of order, if any are; a range can be longer than memory.
        tokens = list(tokens[:2]) if tokens.step < 0 else sorted({tokens[0], tokens[-1]})
    elif isinstance(tokens, Mapping) and isinstance(tokens.get("generated"), list):
        field, tokens = "tokens.generated", tokens["generated"]
    if not isinstance(tokens, list):
        return
    if (places := plain_positions(tokens)) is not None and (np.diff(places + 2 * OPEN_END * (places < 0)) > 0).all():
        return  # in order: positions from the end of the prompt come after those from its start
    starts = [item if is_integer(item) else item[0] for item in tokens]
    order = [(start < 0, start) for start in starts]
    for i in range(1, len(order)):
        if order[i] <= order[i - 1]:
            raise SteeringError(
                f"{field}[{i}]",
                f"{shown(tokens[i])} follows {shown(tokens[i - 1])}; with a matrix, list positions in ascending order, "
                "those from the end of the prompt last: row i belongs to the i-th position",
            )


def check_row_count(num_rows: int, positions: int | None, field: str, selects: str) -> None:
    """Raise SteeringError if a matrix has another number of rows than its edit has positions; None is any number."""
    if positions is not None and positions != num_rows:
        raise SteeringError(field, f"has {num_rows} rows, but {selects} {positions} positions; give one row for each")


def orthonormal_basis(directions: Matrix) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis ``[k, H]`` of the span of linearly independent directions."""
    return _basis(directions.tobytes(), len(directions))


# The edits of a request usually have the same subspace at several sites, and decompositions take long.
@lru_cache(maxsize=4)
def _singular_values(directions: bytes, count: int) -> npt.NDArray[np.floating[Any]]:
    return np.linalg.svd(_normalized(directions, count), compute_uv=False)


@lru_cache(maxsize=4)
def _basis(directions: bytes, count: int) -> npt.NDArray[np.float64]:
    basis: npt.NDArray[np.float64] = np.linalg.qr(_normalized(directions, count).T)[0].T
    return basis


def _normalized(directions: bytes, count: int) -> npt.NDArray[np.float64]:
    wide = np.frombuffer(directions, np.float32).reshape(count, -1).astype(np.float64)
    normalized: npt.NDArray[np.float64] = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return normalized
