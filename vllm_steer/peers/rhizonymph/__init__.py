# SPDX-License-Identifier: Apache-2.0
"""The request fields of the fork RhizoNymph/vllm, offline and over HTTP.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_steer.peers.rhizonymph.captures import FilesystemCaptureRequest
    from vllm_steer.peers.rhizonymph.fields import translate_fields
    from vllm_steer.peers.rhizonymph.offline import LLM, SamplingParams

__all__ = ["LLM", "FilesystemCaptureRequest", "SamplingParams", "translate_fields"]

_MODULES = {
    "FilesystemCaptureRequest": "captures",
    "LLM": "offline",
    "SamplingParams": "offline",
    "translate_fields": "fields",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
