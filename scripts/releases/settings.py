# SPDX-License-Identifier: Apache-2.0
"""Engine arguments and environment variables that came with a version of vLLM: served, refused, or not yet run.

``python scripts/release_diff.py`` prints the rows of new settings and lists those that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Verdict(Enum):
    """What happens when a setting is used together with steering."""

    SERVED = "served"
    """Does not touch what steering uses."""
    REFUSED = "refused"
    """The engine, or every model class to which the setting applies, is refused."""
    UNTESTED = "served, not run"
    """Compatible according to the source of vLLM; no test has run it."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: Field of ``EngineArgs``, or environment variable.
        verdict: The class of the setting.
        reason: Why.
    """

    name: str
    verdict: Verdict
    reason: str


def _rows(verdict: Verdict, reason: str, names: str) -> Iterator[Setting]:
    return (Setting(name, verdict, reason) for name in names.split())


SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: setting
    for setting in (
        # New in 0.33.
        *_rows(
            Verdict.REFUSED,
            "one kernel decodes whole layers, so their taps would not run (compat/version.py)",
            "monokernel",
        ),
        *_rows(
            Verdict.UNTESTED,
            "sleep level 2 saves and restores the tables under every backend",
            "sleep_mode_backend",
        ),
        *_rows(Verdict.SERVED, "dumps the stacks of a process that hangs", "watchdog_config"),
        *_rows(
            Verdict.SERVED,
            "parsing of texts and chat templates",
            "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_FUEL",
        ),
        *_rows(
            Verdict.UNTESTED,
            "attention and experts of a layer on two streams; the layer class has to be proven again",
            "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD",
        ),
        *_rows(
            Verdict.UNTESTED,
            "also limits bodies with vectors; vLLM answers HTTP 413",
            "VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
        ),
        *_rows(
            Verdict.SERVED,
            "size of images, audio and video in a request",
            "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
        ),
        *_rows(
            Verdict.UNTESTED,
            "bodies with vectors are logged too; leave it at DEBUG where vectors are confidential",
            "VLLM_REQUEST_BODY_LOG_LEVEL",
        ),
        *_rows(
            Verdict.REFUSED,
            "for new layer classes without a recipe, which are refused",
            "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_STEP5_SHARD_SP_SHARED_EXPERT",
        ),
    )
}
"""Settings by name."""
