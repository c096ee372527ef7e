# SPDX-License-Identifier: Apache-2.0
"""Names of vllm-lens that are not supported, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from vllm_steer.errors import SteeringError

_QK = "queries and keys cannot be captured; capture attn_out instead"
_OFFLINE = "functions run offline only, as user hooks: LLM.register_hook(function, point, layers)"
_HTTP = "a server runs no code of its clients; use capture, readouts, or edits with a condition in when"
_REMOVE = "register_hook returns a handle with remove()"
_WEIGHTS = "weights are not served; use lens readouts"

NAMES: Mapping[str, str] = {"Hook": _OFFLINE, "attention_patterns": _QK}
"""Names of vllm-lens' modules."""
LLM_METHODS: Mapping[str, str] = {
    "register_hooks": "use register_hook(function, point, layers)",
    "collect_hook_results": "functions of register_hook keep their own results",
    "clear_hooks": _REMOVE,
    "prefetch_params": _WEIGHTS,
    "clear_prefetched": _WEIGHTS,
}
"""Methods that vllm-lens adds to ``LLM``."""
CLIENT_METHODS: Mapping[str, str] = {
    "register_hooks": _HTTP,
    "collect_hook_results": _HTTP,
    "clear_hooks": _HTTP,
    "prefetch_params": _WEIGHTS,
    "clear_prefetched": _WEIGHTS,
}
"""Methods of ``VLLMLensClient``."""
CLIENT_ARGUMENTS: Mapping[str, str] = {"hooks": _HTTP, "capture_qk": _QK}
"""Arguments of ``VLLMLensClient.generate`` and ``chat``."""


def refuse_attribute(owner: object, name: str, refused: Mapping[str, str]) -> NoReturn:
    """Raise SteeringError for a refused name, and AttributeError for another."""
    if name in refused:
        raise SteeringError(name, refused[name])
    raise AttributeError(f"{type(owner).__name__} has no attribute {name}")
