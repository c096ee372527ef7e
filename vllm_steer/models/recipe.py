# SPDX-License-Identifier: Apache-2.0
"""Recipes: where the hook points of a decoder-layer class are, and which of them are refused.

vLLM's decoder layers pass the residual stream on in one of three shapes:

* **pair**: ``(hidden_states, residual)``, summed by the next fused add-norm. The taps edit the residual summand, which
  is complete on every tensor-parallel rank; vLLM's all-reduce fusion still matches. The other summand is the branch.
  Layers with ``reduced_by`` pass the branch on as one partial sum per rank, and the norm that consumes it reduces it
  first; their taps are at the norms (``reduced_norm.py``).
* **single**: one tensor. ``post_attn`` is the tensor that enters the second norm. These layers keep that same tensor as
  their residual, so an in-place edit reaches both the MLP and the residual sum.

* **streams**: several streams, which the layer mixes (``streams.py``). One of them, or their mean, is the stream of the
  points.

A parallel block, which computes attention and MLP from the same input, never holds the stream after attention. Such a
block refuses edits at ``post_attn``; captures return the block's input plus the attention branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from torch import nn

from vllm_steer.points import OPTIONAL_POINTS, PointName

BLOCK_INPUT: Final = "the block's input"
"""Location of ``post_attn`` in a block that has only an MLP."""
BLOCK_OUTPUT: Final = "the block's output"
"""Location of ``post_attn`` in a block that has only a token mixer."""
MLP_MIX: Final = "the mix that the MLP reads"
"""Location of ``post_attn`` in layers of hyper-connections."""
SUMMAND: Final = "the summand beside the residual"
"""Location of a branch in layers of shape ``pair``."""

PARALLEL: Final = (
    "attention and MLP of {layer} run in parallel on the same input, so no edit between them can reach the MLP; "
    "use pre_attn or post_block"
)
PARTIAL_STREAM: Final = (
    "under tensor parallelism {layer} reduces attention and MLP in one sum, so no rank holds the stream after "
    "attention; use pre_attn, post_block or --tensor-parallel-size 1"
)
PARTIAL_BRANCH: Final = (
    "under tensor parallelism {layer} reduces attention and MLP in one sum, so no rank holds this branch; "
    "use pre_attn, post_block or --tensor-parallel-size 1"
)
REDUCED_BRANCH: Final = (
    "under tensor parallelism {layer} reduces the branch in the kernel that adds it, so no rank holds this branch; "
    "use post_attn, post_block or --tensor-parallel-size 1"
)
MIXED_BRANCH: Final = (
    "{layer} adds different multiples of the branch to several streams, so no tensor holds what is added to the "
    "stream; use pre_attn, post_attn or post_block"
)
ONE_BRANCH: Final = (
    "{layer} has only one branch, which is the difference of post_block and pre_attn; use these two points"
)
NO_SUBMODULE: Final = (
    "no known submodule of {layer} outputs exactly the value of this point; use pre_attn or post_block"
)
MIXED_HEAD: Final = (
    "{layer} has several streams, and the final norm reads another mix of them than the points, which are on {stream}"
)
PARALLEL_MLP: Final = "the MLP of {layer} runs in parallel with attention, on the block's own input; use pre_attn"
NO_NORM: Final = "the MLP of {layer} reads the stream itself, without a norm; use post_attn"

Reasons = Mapping[PointName, str]
"""Reasons for refusal by point. ``{layer}`` is replaced by the name of the layer's class."""


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Recipe:
    """Locations of the hook points in one decoder-layer class.

    The fields ``post_attn``, ``attn_out`` and ``mlp_out`` locate the points of these names.
    """

    layer_class: str
    """Qualified name of the class."""
    shape: Literal["pair", "single", "streams"]
    post_attn: str | None = "post_attention_layernorm"
    """Submodule that reads the stream after attention, ``BLOCK_INPUT`` or ``BLOCK_OUTPUT``; None if no tensor holds
    that stream. The tap runs before the submodule; ``mlp_in`` is the submodule's output."""
    attn_out: str = ""
    """Shape ``single``: the submodule that outputs the attention branch. ``a|b`` is the first that the layer has."""
    mlp_out: str = ""
    """Shape ``single``: the submodule that outputs the MLP branch, in the same form."""
    attn_added: Callable[[Any], Any] = _first
    """Parallel blocks: what the output of ``attn_out`` adds to the stream."""
    partial_sums: bool = False
    """Parallel blocks: whether each tensor-parallel rank holds only its part of the branches."""
    mlp_in: str = ""
    """Submodule whose output the MLP reads, if it is not the one of ``post_attn``."""
    cross_attention: bool = False
    """Whether the layer attends to an encoder between ``post_attn`` and the MLP."""
    pass_argument: str = ""
    """Argument of ``forward`` with the number of the pass, in models that run their layers several times per token."""
    runs: Callable[[Any, Any], Sequence[tuple[Any, int]]] | None = None
    """Given the model and its configuration, return these layers in the order in which they run, with their passes."""
    recalls: bool = False
    """Whether later runs of the layer also attend to the keys and values of its first run."""
    gaps: Callable[[Any], Sequence[int]] = lambda config: ()
    """Return the layers, by number, that do not read what the layer before them leaves."""
    residual_at: int = 1
    """Shape ``pair``: place of the residual in what the layer returns; the branch is the first."""
    install: Callable[[Any, Mapping[PointName, Any]], None] | None = None
    """Install the taps of one layer, for layers of shape ``streams`` and those that convolve their branches."""
    stream: str = ""
    """Shape ``streams``: which of the streams is the stream of the points, in words."""
    normed: bool = True
    """Whether the model's final norm reads the stream of the last layer."""
    restarts: bool = False
    """Whether the stream after attention is the attention branch alone."""
    mixed: bool = False
    """Whether the layer also reads streams other than the one of its points, so that this one alone does not decide
    what the layer computes."""
    reduced_by: str = ""
    """Shape ``pair``: the function in the layer's module that reduces the branch, adds it and norms the sum."""
    altered: tuple[PointName, ...] = ()
    """Branches that are not what the module of attention or MLP returns in HF Transformers: the layer scales or norms
    its output or adds another one, or the module adds the stream. A location that is a norm need not be named."""
    altered_in: Callable[[Any], tuple[PointName, ...]] | None = None
    """Return ``altered`` for a layer instance, where it depends on the layer's settings."""
    refused_points: Reasons = field(default_factory=dict)
    """Points that are refused although the rules of the shape would allow them."""
    variant: Callable[[Any], Mapping[str, Any]] = lambda layer: {}
    """Return the fields that differ for a layer instance, by its settings; ``refused_points`` is merged."""
    why_unsupported: Callable[[Any], str | None] = lambda layer: None
    """Return why a layer instance cannot be steered, by its settings, or None."""
    inherits: str = ""
    """Qualified name of the base class whose ``forward`` this class runs and whose recipe it shares."""
    inner_class: str = ""
    """Class of a submodule that contains a hook point; the same module has its name, and it counts for the digest."""
    proven: bool = True
    """False until the conformance tests have passed on this class; it then needs ``allow_unproven``."""

    def of(self, layer: nn.Module) -> Recipe:
        """Return the recipe of a layer instance, with its variant applied."""
        changes = dict(self.variant(layer))
        if self.altered_in is not None:
            changes["altered"] = self.altered_in(layer)
        return replace(self, refused_points={**self.refused_points, **changes.pop("refused_points", {})}, **changes)

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP read the same input and ``post_attn`` can be computed from the attention branch."""
        return self.post_attn is None and bool(self.attn_out)

    def refusal(self, point: PointName, *, capturing: bool = False, tensor_parallel: bool = False) -> str | None:
        """Return why a point is refused, or None.

        Args:
            point: The hook point.
            capturing: Whether the point is captured; otherwise it is edited.
            tensor_parallel: Whether the layer is split over several ranks.
        """
        if point == "post_attn" and self.post_attn is None:
            if capturing and self.parallel:
                return PARTIAL_STREAM if self.partial_sums and tensor_parallel else None
            return self.refused_points.get(point, PARALLEL)
        if self.reduced_by and tensor_parallel and point in ("attn_out", "mlp_out"):
            return REDUCED_BRANCH
        if point not in OPTIONAL_POINTS:
            return None
        if point in self.refused_points:
            return self.refused_points[point]
        if self.post_attn in (BLOCK_INPUT, BLOCK_OUTPUT):
            return ONE_BRANCH
        if point == "mlp_in":
            return PARALLEL_MLP if self.post_attn is None else NO_NORM if self.post_attn == "mlp" else None
        if self.shape == "single" and not self._branch(point):
            return NO_SUBMODULE
        return PARTIAL_BRANCH if self.parallel and self.partial_sums and tensor_parallel else None

    def is_altered(self, point: PointName) -> bool:
        """Return whether a branch is another quantity than the output of its module, see ``altered``."""
        return point in self.altered or "norm" in self._branch(point).rpartition(".")[2]

    def location(self, point: PointName, layer: nn.Module) -> str:
        """Return ``SUMMAND`` or the submodule whose (first) output is the value of a served optional point."""
        if point == "mlp_in":
            return self.mlp_in or str(self.post_attn)
        if self.shape == "pair":
            return SUMMAND
        names = self._branch(point).split("|")
        return next(name for name in names if getattr(layer, name.partition(".")[0], None) is not None)

    def _branch(self, point: PointName) -> str:
        return self.attn_out if point == "attn_out" else self.mlp_out


def qualified_name(cls: type) -> str:
    """Return the module and the name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
