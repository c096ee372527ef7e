# SPDX-License-Identifier: Apache-2.0
"""The hook points of a decoder block: what each one is, on every architecture.

For block *i*, ``x_in`` is the residual stream that enters it, ``a`` and ``m`` its attention and MLP branches as they
are added to the stream (after any post-norm and residual multiplier), and ``x_out`` the stream that leaves it.
``post_block(i)`` and ``pre_attn(i + 1)`` are one place in the stream; edits of ``post_block(i)`` come first.

Three points are on the stream, and on in every engine. The others are on a branch, and there in an engine that was
started with them only (:data:`OPTIONAL_POINTS`).
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
    """One place in a decoder block that is read and edited: on the residual stream, or on a branch of it."""

    name: PointName
    """What users write."""
    index: int
    """Place in the block's order of computation, from 0."""
    identity: str
    """The value at this point, as a formula."""
    seen_by: str
    """What computes with an edit made here."""
    aliases: Mapping[str, str]
    """The same value in other libraries, ``i`` being the layer; library name to expression."""

    @property
    def optional(self) -> bool:
        """Whether it is there only in an engine that was started with it."""
        return self.name in OPTIONAL_POINTS


POINTS: Mapping[PointName, Point] = MappingProxyType(
    {
        point.name: point
        for point in (
            Point(
                name="pre_attn",
                index=0,
                identity="x_in(i)",
                seen_by="the attention of block i and everything after it",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.hook_resid_pre",
                        "HF Transformers": "hidden_states[i]",
                        "nnsight": "model.model.layers[i].input",
                    }
                ),
            ),
            Point(
                name="attn_out",
                index=1,
                identity="a(i) = x_mid(i) - x_in(i)",
                seen_by="the same as of post_attn; where the two run in parallel, not the MLP of block i",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.hook_attn_out",
                        "HF Transformers": "the output of attention in block i, or of the norm behind it",
                        "nnsight": "model.model.layers[i].self_attn.output[0] (Llama's names)",
                    }
                ),
            ),
            Point(
                name="post_attn",
                index=2,
                identity="x_mid(i) = x_in(i) + a(i)",
                seen_by="the MLP of block i and everything after it",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.hook_resid_mid",
                        "HF Transformers": "the input of the norm before the MLP of block i",
                        "nnsight": "model.model.layers[i].post_attention_layernorm.input (Llama's names)",
                    }
                ),
            ),
            Point(
                name="mlp_in",
                index=3,
                identity="norm(x_mid(i)), the norm's weight applied",
                seen_by="the MLP of block i, and through it alone what follows",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.ln2.hook_normalized, times the norm's weight where that is "
                        "folded or comes later; not hook_mlp_in, which is x_mid(i)",
                        "HF Transformers": "the output of the norm before the MLP of block i",
                        "nnsight": "model.model.layers[i].mlp.input (Llama's names)",
                    }
                ),
            ),
            Point(
                name="mlp_out",
                index=4,
                identity="m(i) = x_out(i) - x_mid(i)",
                seen_by="the same as of post_block",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.hook_mlp_out",
                        "HF Transformers": "the output of the MLP in block i, or of the norm behind it",
                        "nnsight": "model.model.layers[i].mlp.output (Llama's names)",
                    }
                ),
            ),
            Point(
                name="post_block",
                index=5,
                identity="x_out(i) = x_in(i + 1)",
                seen_by="block i + 1 and everything after it",
                aliases=MappingProxyType(
                    {
                        "TransformerLens": "blocks.{i}.hook_resid_post",
                        "HF Transformers": "hidden_states[i + 1], but the last is after the final norm",
                        "nnsight": "model.model.layers[i].output (its first element, where it is a tuple)",
                    }
                ),
            ),
        )
    }
)

POINT_NAMES: tuple[PointName, ...] = tuple(POINTS)
"""All that a request can name, in order of computation. ``layer * len(POINT_NAMES) + index`` numbers the sites of a
model, in programs and with rows, whichever points an engine was started with."""
OPTIONAL_POINTS: tuple[OptionalPointName, ...] = get_args(OptionalPointName)
"""Those that an engine has only if it was started with them."""


def points_on(optional: Sequence[str]) -> tuple[PointName, ...]:
    """The points of an engine that was started with these optional ones, in order of computation."""
    return tuple(name for name, point in POINTS.items() if not point.optional or name in optional)


def how_to_switch_on(name: PointName) -> str:
    """What to do about an optional point that an engine was started without."""
    return f'this engine was started without {name}; add {POINTS_FLAG} {name} (SteeringConfig(points=["{name}"]))'


def columns_of(points: Sequence[PointName], num_layers: int) -> dict[int, int]:
    """Where each site of an engine with these points is in its tables: those of a layer lie side by side."""
    sites = (layer * len(POINT_NAMES) + POINTS[name].index for layer, name in product(range(num_layers), points))
    return {site: column for column, site in enumerate(sites)}
