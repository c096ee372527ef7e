# SPDX-License-Identifier: Apache-2.0
"""Compiler pass that fuses two adjacent taps into one launch.

``post_block`` of a layer and ``pre_attn`` of the next are usually adjacent, but a model may compute something between
its layers, which only the traced graph shows. Two taps are fused if the second one is the only user of the summands
that the first one returns. Eager models are not affected.

The pass runs as vLLM's custom Inductor pass (``CompilationConfig.inductor_compile_config``), on a functionalized graph,
in which a tap returns its edited summands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from vllm_steer.compat.internals import InductorPass, current_platform

SCHEMA = "tap(Tensor(a!) target, Tensor(b!)? other, Tensor head, Tensor? second) -> ()"
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
        if not _is_single_tap(node):
            continue
        # Results of the call by index: 1 is the edited target, 2 the other summand.
        edited = {user.args[1]: user for user in node.users}
        followers = {follower for summand in edited.values() for follower in summand.users}
        num_summands = 1 if node.kwargs.get("other") is None else 2
        if len(edited) != num_summands or len(followers) != 1:
            continue
        (follower,) = followers
        if (
            _is_single_tap(follower)
            and follower.kwargs["target"] is edited.get(1)
            and follower.kwargs.get("other") is edited.get(2)
        ):
            follower.kwargs = _fused_arguments(node.kwargs, follower.kwargs)
            if _EAGER_INPUTS in follower.meta:
                # Inductor lowers the call by its traced arguments; one that is missing there would be dropped.
                (_, first), (args, second) = node.meta[_EAGER_INPUTS], follower.meta[_EAGER_INPUTS]
                follower.meta[_EAGER_INPUTS] = (args, _fused_arguments(first, second))
            for summand in edited.values():
                graph.erase_node(summand)
            graph.erase_node(node)


def _fused_arguments(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    summands = {name: first[name] for name in ("target", "other") if name in first}
    return {**second, **summands, "head": first["head"], "second": second["head"]}


def _is_single_tap(node: Any) -> bool:
    """Return whether ``node`` is a tap of one site."""
    return (
        node.target is auto_functionalized
        and str(node.args[0]) == "vllm_steer.tap.default"
        and node.kwargs.get("second") is None
    )
