# SPDX-License-Identifier: Apache-2.0
"""The request fields of the fork RhizoNymph/vllm, offline and over HTTP.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.lazy_names import lazy_names

if TYPE_CHECKING:
    from vllm_steer.peers.rhizonymph.captures import FilesystemCaptureRequest
    from vllm_steer.peers.rhizonymph.fields import translate_fields
    from vllm_steer.peers.rhizonymph.offline import LLM, SamplingParams

__all__ = ["LLM", "FilesystemCaptureRequest", "SamplingParams", "translate_fields"]

__getattr__ = lazy_names(
    __name__,
    {
        "FilesystemCaptureRequest": "captures",
        "LLM": "offline",
        "SamplingParams": "offline",
        "translate_fields": "fields",
    },
)
