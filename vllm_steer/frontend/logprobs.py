# SPDX-License-Identifier: Apache-2.0
"""Check that an engine returns log-probabilities of the model itself, which lenses and patching studies read."""

from __future__ import annotations

from typing import Any

from vllm_steer.errors import SteeringError

RAW = "raw_logprobs"
"""vLLM's default of ``logprobs_mode``."""
_PROCESSED = "processed_logprobs"


def check_logprobs_mode(mode: str, logits_processors: Any = None, *, shared: bool = False) -> None:
    """Check that the scores of greedy requests without penalties are log-probabilities of the model.

    Processed scores of such requests are the raw ones, with two exceptions: the engine has logits processors of its
    own, or the batch has other requests. If one of these has ``top_p``, vLLM filters all rows of the batch, and tokens
    whose probability rounds to zero get -inf.

    Args:
        mode: The engine's ``logprobs_mode``.
        logits_processors: Logits processors of the engine.
        shared: Whether requests of other clients may be in the same batch.

    Raises:
        SteeringError: The scores are logits, or may be those of another distribution.
    """
    if mode == RAW or (mode == _PROCESSED and not logits_processors and not shared):
        return
    problem = "logits, not log-probabilities" if mode.endswith("logits") else "scores that other settings change"
    raise SteeringError(
        "logprobs_mode", f"is {mode!r}, so the engine returns {problem}; start it with {RAW!r}, the default"
    )
