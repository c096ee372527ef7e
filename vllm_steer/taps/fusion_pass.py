# SPDX-License-Identifier: Apache-2.0
"""Compiler pass that fuses two adjacent taps into one launch.

``post_block`` of a layer and ``pre_attn`` of the next are usually adjacent, but a model may compute something between
its layers, which only the traced graph shows. Two taps are fused if the second one is the only user of the first one's
result and both have the same other summand. Eager models are not affected.

The pass runs as vLLM's custom Inductor pass (``CompilationConfig.inductor_compile_config``), on a functionalized graph,
in which a tap returns its edited summand.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_steer.compat.internals import InductorPass, current_platform

SCHEMA = "tap(Tensor(a!) target, Tensor? other, Tensor head, Tensor? second) -> ()"
"""Schema of the tap's custom op; ``second`` is the head of the fused second site."""
_EAGER_INPUTS = "eager_input_vals"
"""Key of a node's metadata with its traced arguments (``torch/fx/experimental/proxy_tensor.py``)."""


class TapFusionPass(InductorPass):  # type: ignore[misc]
    """Fuses taps, after running the pass that the user had configured, if any."""

    def __init__(self, previous: Any = None) -> None:
        self._previous = previous

    def __call__(self, graph: fx.Graph) -> None:
        if self._previous is not None:
            self._previous(graph)
        fuse_taps(graph)

    def uuid(self) -> str:
        """Return a digest of both passes and the op's schema, a part of the keys of compiled code."""
        source = self.hash_source(TapFusionPass, fuse_taps, _fused_arguments, _is_single_tap)
        previous = None if self._previous is None else str(self._previous.uuid())
        return str(self.hash_dict({"fusion": source, "previous": previous, "tap": SCHEMA}))


def install_fusion_pass(vllm_config: Any) -> None:
    """Add the pass to an engine's configuration."""
    passes = vllm_config.compilation_config.inductor_compile_config
    key = current_platform.pass_key
    if not isinstance(passes.get(key), TapFusionPass):
        passes[key] = TapFusionPass(passes.get(key))


def fuse_taps(graph: fx.Graph) -> None:
    """Fuse adjacent taps of a functionalized graph, in place."""
    for node in list(graph.nodes):
        if not _is_single_tap(node) or len(node.users) != 1:
            continue
        (edited,) = node.users
        if edited.target is not operator.getitem or len(edited.users) != 1:
            continue
        (follower,) = edited.users
        if (
            _is_single_tap(follower)
            and follower.kwargs["target"] is edited
            and follower.kwargs.get("other") is node.kwargs.get("other")
        ):
            follower.kwargs = _fused_arguments(node.kwargs, follower.kwargs)
            if _EAGER_INPUTS in follower.meta:
                # Inductor lowers the call by its traced arguments; one that is missing there would be dropped.
                (_, first), (args, second) = node.meta[_EAGER_INPUTS], follower.meta[_EAGER_INPUTS]
                follower.meta[_EAGER_INPUTS] = (args, _fused_arguments(first, second))
            graph.erase_node(edited)
            graph.erase_node(node)


def _fused_arguments(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {**second, "target": first["target"], "head": first["head"], "second": second["head"]}


def _is_single_tap(node: Any) -> bool:
    """Return whether ``node`` is a tap of one site."""
    return (
        node.target is auto_functionalized
        and str(node.args[0]) == "vllm_steer.tap.default"
        and node.kwargs.get("second") is None
    )
