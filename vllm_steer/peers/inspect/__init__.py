# SPDX-License-Identifier: Apache-2.0
"""Inspect AI: a model provider, solvers and scorers; needs the extra ``inspect``.

Public: the names in ``__all__``. Inspect finds the provider ``vllm-steer`` by the entry point group ``inspect_ai``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.adapters import imported_on_use

if TYPE_CHECKING:
    from vllm_steer.peers.inspect.api import VllmSteerAPI
    from vllm_steer.peers.inspect.registry import add_alias
    from vllm_steer.peers.inspect.rows import StoredTensor, read_activations
    from vllm_steer.peers.inspect.scorers import LinearProbe, auroc, probe_score, probe_scorer
    from vllm_steer.peers.inspect.solvers import ask_oracle, steer

__all__ = [
    "LinearProbe",
    "StoredTensor",
    "VllmSteerAPI",
    "add_alias",
    "ask_oracle",
    "auroc",
    "probe_score",
    "probe_scorer",
    "read_activations",
    "steer",
]

_MODULES = {
    ".api": "VllmSteerAPI",
    ".registry": "add_alias",
    ".rows": "StoredTensor read_activations",
    ".scorers": "LinearProbe auroc probe_score probe_scorer",
    ".solvers": "ask_oracle steer",
}

__getattr__ = imported_on_use(__name__, _MODULES)
