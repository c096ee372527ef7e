# SPDX-License-Identifier: Apache-2.0
"""Base class of ``LLM`` and ``AsyncLLM``: their arguments, and access to the engine."""

from __future__ import annotations

from typing import Any

from vllm_steer.peers.engines import refuse_settings
from vllm_steer.peers.probe_hook.options import ProbeOptions

ATTRIBUTES = ("hidden_states", "hidden", "prefill_hidden_states", "prefill_hidden")
"""Attributes of outputs and samples. The code of vllm-probe-hook has the longer names, its README the shorter ones."""


class ProbingEngine:
    """An engine whose outputs have hidden states of some layers.

    ``output.hidden_states[layer]`` has the rows of the generated tokens, ``output.prefill_hidden_states[layer]`` those
    of the prompt; ``output.hidden`` and ``output.prefill_hidden`` are the same dicts. Each sample in
    ``output.outputs`` has the same attributes.

    Args:
        model: Name or folder of a model, or an engine of ``vllm_steer`` with steering enabled.
        layers: Layer numbers, or ``["all"]``. A row is the stream after the layer (``post_block``).
        include_prefill: Whether outputs have the rows of the prompt.
        include_decode: Whether outputs have the rows of generated tokens: one row less than there are tokens, because
            the last one is never forwarded.
        last_prefill_token: Keep only the last row of the prompt.
        last_decode_token: Keep only the last row of the generated tokens.
        include_last: Add the row of the last generated token, which costs a second request per sample.
        dtype: Dtype of the model, and so of the rows; not used with an engine.
        **kwargs: Further arguments of the engine.

    Raises:
        SteeringError: An option is invalid.
    """

    def __init__(
        self,
        model: Any,
        layers: Any = ("all",),
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        include_last: bool = False,
        dtype: Any = "bfloat16",
        **kwargs: Any,
    ) -> None:
        self.options = ProbeOptions.read(
            layers,
            include_prefill=include_prefill,
            include_decode=include_decode,
            last_prefill_token=last_prefill_token,
            last_decode_token=last_decode_token,
            include_last=include_last,
        )
        if self._is_engine(model):
            refuse_settings(kwargs)
            self.engine = model
        else:
            self.engine = self._start(str(model), {"dtype": dtype, **kwargs})

    def _is_engine(self, model: Any) -> bool:
        """Return whether ``model`` is an engine that already runs."""
        raise NotImplementedError

    def _start(self, model: str, arguments: dict[str, Any]) -> Any:
        """Start an engine."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)


def show_first(output: Any) -> None:
    """Give an output the attributes of its first sample."""
    for name in ATTRIBUTES:
        setattr(output, name, getattr(output.outputs[0], name))
