# SPDX-License-Identifier: Apache-2.0
"""Which points on the branches each model of the zoo must serve; all others must be refused, with a reason.

Written from what the blocks of a family are, and not from the package's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.conformance.model import TinyModel

BRANCHES: Final = ("attn_out", "mlp_in", "mlp_out")

_NOT_BY_FAMILY: Final[Mapping[str, tuple[str, ...]]] = {
    # One branch alone: it is the difference of the two points on the stream.
    "FUSED-SINGLE": BRANCHES,
    # The MLP computes on the stream itself.
    "UNFUSED+POSTNORM": ("mlp_in",),
    # Multiplied where they are added.
    "UNFUSED*MULT": ("attn_out", "mlp_out"),
    # The MLP computes on the block's input.
    "PARALLEL": ("mlp_in",),
}
_NOT: Final[Mapping[str, tuple[str, ...]]] = {
    # Norms the sum; its biases are added with the branch; multiplies a branch; scales the whole stream.
    "opt_post_ln": BRANCHES,
    # Its rows are not compared with HF: nothing is read between its branches.
    "cohere2_moe": BRANCHES,
    "falcon": BRANCHES,
    "falcon_new": BRANCHES,
    "falcon_rw": ("attn_out", "mlp_out"),
    "falcon_h1": ("attn_out",),
    "gemma4": ("mlp_in", "mlp_out"),
    "gemma4_wrapper": ("mlp_in", "mlp_out"),
    # Not proven (the first is served, as it is proven in a sister class): in bfloat16, rounding sends tokens to other
    # experts where this branch is ablated.
    "qwen3_5moe_wrapper": ("mlp_out",),
    "bailingmoev2_5": ("mlp_out",),
    "longcat_flash": BRANCHES,
    "museglimmer": BRANCHES,
    "olmo_hybrid": BRANCHES,
}


def served_branches(tiny: TinyModel) -> tuple[str, ...]:
    """The points on the branches that this model serves, in order of computation."""
    not_served = BRANCHES if tiny.one_branch else _NOT.get(tiny.name, _NOT_BY_FAMILY.get(tiny.recipe, ()))
    return tuple(point for point in BRANCHES if point not in not_served)
