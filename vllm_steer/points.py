# SPDX-License-Identifier: Apache-2.0
"""The hook points of a decoder block, defined independently of the architecture.

For block *i*, ``x_in`` is the residual stream that enters it, ``a`` and ``m`` are its attention and MLP branches as
they are added to the stream (after any post-norm and residual multiplier), and ``x_out`` is the stream that leaves it.
``post_block(i)`` and ``pre_attn(i + 1)`` are the same place in the stream; edits of ``post_block(i)`` apply first.

Three points are on the stream and available in every engine. The others are on a branch and available only if the
engine was started with them (:data:`OPTIONAL_POINTS`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal, get_args

PointName = Literal["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"]
OptionalPointName = Literal["attn_out", "mlp_in", "mlp_out"]
POINTS_FLAG = "--steering-points"


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a decoder block that can be read and edited, on the residual stream or on a branch."""

    name: PointName
    """Name in requests."""
    index: int
    """Position in the block's order of computation, from 0."""
    identity: str
    """Formula of the value at this point."""
    seen_by: str
    """The computations that an edit at this point affects."""
    aliases: Mapping[str, str]
    """Expression of the same value in other libraries, by library; ``i`` is the layer."""

    @property
    def optional(self) -> bool:
        """Whether the point is available only if the engine was started with it."""
        return self.name in OPTIONAL_POINTS


def _point(
    name: PointName, index: int, identity: str, seen_by: str, transformer_lens: str, transformers: str, nnsight: str
) -> Point:
    """Return a row of `POINTS`, with the names of three other libraries."""
    aliases = {"TransformerLens": transformer_lens, "HF Transformers": transformers, "nnsight": nnsight}
    return Point(name, index, identity, seen_by, MappingProxyType(aliases))


_POINTS = (
    _point(
        "pre_attn",
        0,
        "x_in(i)",
        "the attention of block i and everything after it",
        "blocks.{i}.hook_resid_pre",
        "hidden_states[i]",
        "model.model.layers[i].input",
    ),
    _point(
        "attn_out",
        1,
        "a(i) = x_mid(i) - x_in(i)",
        "as for post_attn; in parallel blocks, everything except the MLP of block i",
        "blocks.{i}.hook_attn_out",
        "the output of attention in block i, or of the norm after it",
        "model.model.layers[i].self_attn.output[0] (Llama's names)",
    ),
    _point(
        "post_attn",
        2,
        "x_mid(i) = x_in(i) + a(i)",
        "the MLP of block i and everything after it",
        "blocks.{i}.hook_resid_mid",
        "the input of the norm before the MLP of block i",
        "model.model.layers[i].post_attention_layernorm.input (Llama's names)",
    ),
    _point(
        "mlp_in",
        3,
        "norm(x_mid(i)), including the norm's weight",
        "the MLP of block i and, only through it, everything after it",
        "blocks.{i}.ln2.hook_normalized, times the norm's weight if that is folded or applied later; not hook_mlp_in, "
        "which is x_mid(i)",
        "the output of the norm before the MLP of block i",
        "model.model.layers[i].mlp.input (Llama's names)",
    ),
    _point(
        "mlp_out",
        4,
        "m(i) = x_out(i) - x_mid(i)",
        "as for post_block",
        "blocks.{i}.hook_mlp_out",
        "the output of the MLP in block i, or of the norm after it",
        "model.model.layers[i].mlp.output (Llama's names)",
    ),
    _point(
        "post_block",
        5,
        "x_out(i) = x_in(i + 1)",
        "block i + 1 and everything after it",
        "blocks.{i}.hook_resid_post",
        "hidden_states[i + 1], except the last, which is after the final norm",
        "model.model.layers[i].output (its first element if it is a tuple)",
    ),
)
POINTS: Mapping[PointName, Point] = MappingProxyType({point.name: point for point in _POINTS})
POINT_NAMES: tuple[PointName, ...] = tuple(POINTS)
"""All points, in order of computation. A site is numbered ``layer * len(POINT_NAMES) + index`` in programs and rows,
independently of the points that an engine was started with."""
OPTIONAL_POINTS: tuple[OptionalPointName, ...] = get_args(OptionalPointName)
"""Points that an engine has only if it was started with them."""
BRANCH_OUTPUTS: tuple[PointName, ...] = ("attn_out", "mlp_out")
"""Points on what attention and MLP add to the stream."""


def points_on(optional: Sequence[str]) -> tuple[PointName, ...]:
    """Return the points of an engine that was started with the ``optional`` ones, in order of computation."""
    return tuple(name for name, point in POINTS.items() if not point.optional or name in optional)


def how_to_switch_on(name: PointName) -> str:
    """Return the error message for a point that an engine was started without."""
    return f'this engine was started without {name}; add {POINTS_FLAG} {name} or SteeringConfig(points=["{name}"])'


def columns_of(points: Sequence[PointName], num_layers: int) -> dict[int, int]:
    """Return the table column of each site number of an engine with these points; columns of one layer are adjacent."""
    site_numbers = (layer * len(POINT_NAMES) + POINTS[name].index for layer, name in product(range(num_layers), points))
    return {number: column for column, number in enumerate(site_numbers)}
