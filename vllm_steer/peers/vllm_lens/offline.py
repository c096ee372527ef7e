# SPDX-License-Identifier: Apache-2.0
"""``LLM`` and ``SamplingParams`` that take the request keys of vllm-lens in ``extra_args``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import vllm_steer
from vllm_steer.peers import refusals
from vllm_steer.peers.engines import rows_of
from vllm_steer.peers.vllm_lens.keys import KEYS, read_keys
from vllm_steer.peers.vllm_lens.tensors import stack_layers


class _KeysMeta(type(vllm_steer.SamplingParams)):  # type: ignore[misc]
    """Metaclass that translates the request keys before the parameters are made."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        extra = kwargs.get("extra_args")
        if isinstance(extra, dict) and any(key in extra for key in KEYS):
            keys = read_keys(extra, "extra_args")
            kwargs["extra_args"] = {name: value for name, value in extra.items() if name not in KEYS} or None
            kwargs = keys.add_to(kwargs, "extra_args")
        return super().__call__(*args, **kwargs)


class SamplingParams(vllm_steer.SamplingParams, metaclass=_KeysMeta):
    """``vllm_steer.SamplingParams`` whose ``extra_args`` may hold the request keys of vllm-lens.

    Examples:
        >>> from vllm_steer.peers.vllm_lens import SamplingParams
        >>> SamplingParams(max_tokens=4, extra_args={"output_residual_stream": [1, 3]}).max_tokens
        4
    """


class LLM(vllm_steer.LLM):
    """``vllm_steer.LLM`` with steering enabled, whose outputs have ``activations``.

    ``output.activations["residual_stream"]`` has the shape ``(layers, prompt + generated - 1, hidden)``, with ascending
    layers, in the model's dtype on the CPU.
    """

    def __init__(self, model: str, *args: Any, enable_steering: bool = True, **kwargs: Any) -> None:
        super().__init__(model, *args, enable_steering=enable_steering, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add ``activations`` to each output."""
        return _with_activations(super().generate(*args, **kwargs))

    def chat(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add ``activations`` to each output."""
        return _with_activations(super().chat(*args, **kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        refusals.refuse_attribute(self, name, refusals.REFUSALS["vllm-lens"][refusals.LLM])


def _with_activations(outputs: list[Any]) -> list[Any]:
    for output in outputs:
        output.activations = activations_of(output)
        for completion in output.outputs:
            completion.activations = activations_of(completion)
    return outputs


def activations_of(output: Any) -> dict[str, torch.Tensor] | None:
    """Return the activations of a finished output of ``LLM`` or ``AsyncLLM``, or of one of its samples.

    Args:
        output: A ``RequestOutput`` or ``CompletionOutput``.

    Returns:
        The tensors by name; None if nothing was captured.

    Raises:
        RuntimeError: The rows are not complete.
    """
    if "memory" not in (getattr(output, "capture_results", None) or {}):
        return None
    result = rows_of(output, "the activations are not complete")
    return {"residual_stream": stack_layers({site: rows.rows for site, rows in result.sites.items()})}
