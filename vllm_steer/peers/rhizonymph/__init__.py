# SPDX-License-Identifier: Apache-2.0
"""The request fields of the fork RhizoNymph/vllm, offline and over HTTP.

Public: the names in ``__all__``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_steer.adapters import imported_on_use

if TYPE_CHECKING:
    from vllm_steer.peers.rhizonymph.fields import FilesystemCaptureRequest, translate_fields
    from vllm_steer.peers.rhizonymph.offline import LLM, SamplingParams

__all__ = ["LLM", "FilesystemCaptureRequest", "SamplingParams", "translate_fields"]

_MODULES = {
    ".fields": "FilesystemCaptureRequest translate_fields",
    ".offline": "LLM SamplingParams",
}

__getattr__ = imported_on_use(__name__, _MODULES)
