# SPDX-License-Identifier: Apache-2.0
"""Replacement of vLLM's names for scripts that import them from ``vllm``."""

from __future__ import annotations


def install() -> None:
    """Replace ``vllm.LLM`` and ``vllm.SamplingParams`` by the subclasses of this package, in this process.

    Call it ahead of ``from vllm import LLM``. Names that a module has imported from ``vllm`` before, and the classes in
    vLLM's own modules (``vllm.entrypoints.llm.LLM``), stay the same. Without ``enable_steering=True`` and without
    steering fields, the subclasses behave as vLLM's classes.

    Examples:
        >>> import vllm_steer
        >>> vllm_steer.install()  # doctest: +SKIP
        >>> from vllm import LLM  # doctest: +SKIP
    """
    import vllm

    from vllm_steer.llm import LLM
    from vllm_steer.params import SamplingParams

    vllm.LLM = LLM
    vllm.SamplingParams = SamplingParams
