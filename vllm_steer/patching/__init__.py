# SPDX-License-Identifier: Apache-2.0
"""Activation patching: run one prompt with activations of another, and see how much of its answer comes back."""

from vllm_steer.patching.metrics import LogProbs
from vllm_steer.patching.result import PatchingResult
from vllm_steer.patching.study import PatchingStudy

__all__ = ["LogProbs", "PatchingResult", "PatchingStudy"]
