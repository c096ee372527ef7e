# SPDX-License-Identifier: Apache-2.0
"""Helper table: the points on the branches that each model of the zoo must support. It must refuse all others.

Derived from the structure of the blocks of a family, not from the package's recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.conformance.model import TinyModel

BRANCHES: Final = ("attn_out", "mlp_in", "mlp_out")

_REFUSED_BY_FAMILY: Final[Mapping[str, tuple[str, ...]]] = {
    # Only one branch, which is the difference of the two points on the stream.
    "FUSED-SINGLE": BRANCHES,
    # The MLP reads the stream itself.
    "UNFUSED+POSTNORM": ("mlp_in",),
    # The branches are multiplied when they are added.
    "UNFUSED*MULT": ("attn_out", "mlp_out"),
    # Several streams add different multiples of the branches.
    "ALTUP": ("attn_out", "mlp_out"),
    "HYPER-CONNECTIONS": ("attn_out", "mlp_out"),
    # Branches are convolved when they are added.
    "CONVOLVED": ("attn_out", "mlp_out"),
    # The MLP reads the block's input.
    "PARALLEL": ("mlp_in",),
}
_REFUSED_BY_ROW: Final[Mapping[str, tuple[str, ...]]] = {
    # Normalizes the sum, adds biases with the branch, multiplies a branch, or scales the whole stream.
    "opt_post_ln": BRANCHES,
    # No tensor between its branches is read.
    "cohere2_moe": BRANCHES,
    "falcon": BRANCHES,
    "falcon_new": BRANCHES,
    "falcon_rw": ("attn_out", "mlp_out"),
    "falcon_h1": ("attn_out",),
    "gemma4": ("mlp_in", "mlp_out"),
    "gemma4_wrapper": ("mlp_in", "mlp_out"),
    # Not proven, since in bfloat16 rounding routes tokens to other experts when this branch is ablated. The first is
    # supported nevertheless, because the point is proven on another row of its class.
    "qwen3_5moe_wrapper": ("mlp_out",),
    "bailingmoev2_5": ("mlp_out",),
    # Only some of its blocks have both branches.
    "decilm_no_ops": BRANCHES,
    "longcat_flash": BRANCHES,
    "museglimmer": BRANCHES,
    "olmo_hybrid": BRANCHES,
}


def supported_branches(tiny: TinyModel) -> tuple[str, ...]:
    """Return the points on the branches that this model supports, in order of computation."""
    not_served = (
        BRANCHES if tiny.one_branch else _REFUSED_BY_ROW.get(tiny.name, _REFUSED_BY_FAMILY.get(tiny.recipe, ()))
    )
    return tuple(point for point in BRANCHES if point not in not_served)
