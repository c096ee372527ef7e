# SPDX-License-Identifier: Apache-2.0
"""Two taps with nothing between them as one launch: a pass over the compiler's graph.

``post_block`` of a layer and ``pre_attn`` of the next are two sites at, mostly, one place. What a model's own loop does
between its layers is its own affair, so no recipe can say whether they may be joined; the graph says it. Where one
tap's result is taken by the next tap and by nothing else, and both look at the same other summand, nobody can tell one
launch from two. Where nothing is compiled, taps stay as they are.

The pass runs where users' own run (vLLM's ``CompilationConfig.inductor_compile_config``), on a graph without mutations:
a tap is a node that returns its edited summand.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.platforms import current_platform

SCHEMA = "tap(Tensor(a!) target, Tensor? other, Tensor head, Tensor? second) -> ()"
"""How compiled code calls a tap; ``second``: the head of the site that is joined to the first one."""
EAGER = "eager_input_vals"
"""Where torch keeps what a node's arguments were when it was traced (``fx/experimental/proxy_tensor.py``)."""


class TapFusionPass(InductorPass):  # type: ignore[misc]
    """The pass; what a user had set in its place runs ahead of it."""

    def __init__(self, ahead: Any = None) -> None:
        self._ahead = ahead

    def __call__(self, graph: fx.Graph) -> None:
        if self._ahead is not None:
            self._ahead(graph)
        fuse_taps(graph)

    def uuid(self) -> str:
        """Part of the keys of compiled code: the pass, the one ahead, and how the code calls taps."""
        source = self.hash_source(TapFusionPass, fuse_taps, _joined, _is_tap)
        ahead = None if self._ahead is None else str(self._ahead.uuid())
        return str(self.hash_dict({"joining": source, "ahead": ahead, "tap": SCHEMA}))


def install_fusion_pass(vllm_config: Any) -> None:
    """Have the engine's compiler join taps, behind a pass that the user set."""
    passes = vllm_config.compilation_config.inductor_compile_config
    key = current_platform.pass_key
    if not isinstance(passes.get(key), TapFusionPass):
        passes[key] = TapFusionPass(passes.get(key))


def fuse_taps(graph: fx.Graph) -> None:
    """Join what can be joined, in place."""
    for node in list(graph.nodes):
        if not _is_tap(node) or len(node.users) != 1:
            continue
        (edited,) = node.users
        if edited.target is not operator.getitem or len(edited.users) != 1:
            continue
        (follower,) = edited.users
        if (
            _is_tap(follower)
            and follower.kwargs["target"] is edited
            and follower.kwargs.get("other") is node.kwargs.get("other")
        ):
            follower.kwargs = _joined(node.kwargs, follower.kwargs)
            if EAGER in follower.meta:
                # torch lowers by these, and a tensor that they do not have would be left out of the call.
                (_, first), (args, second) = node.meta[EAGER], follower.meta[EAGER]
                follower.meta[EAGER] = (args, _joined(first, second))
            graph.erase_node(edited)
            graph.erase_node(node)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of both taps in one."""
    return {**second, "target": first["target"], "head": first["head"], "second": second["head"]}


def _is_tap(node: Any) -> bool:
    """A tap of one site."""
    return (
        node.target is auto_functionalized
        and str(node.args[0]) == "vllm_steer.tap.default"
        and node.kwargs.get("second") is None
    )
