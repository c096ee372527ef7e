# SPDX-License-Identifier: Apache-2.0
"""The hook points of a decoder block: what each one is, on every architecture.

For block *i*, ``x_in`` is the residual stream that enters it, ``a`` its attention branch as it is added to
the stream (after any post-norm and residual multiplier), and ``x_out`` the stream that leaves it.
``post_block(i)`` and ``pre_attn(i + 1)`` are one place in the stream; edits of ``post_block(i)`` come first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

PointName = Literal["pre_attn", "post_attn", "post_block"]


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a decoder block where the residual stream is read and edited."""

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
                name="post_attn",
                index=1,
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
                name="post_block",
                index=2,
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
