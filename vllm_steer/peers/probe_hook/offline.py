# SPDX-License-Identifier: Apache-2.0
"""``LLM`` whose outputs have hidden states."""

from __future__ import annotations

from typing import Any

from vllm_steer.llm import LLM as SteerLLM
from vllm_steer.params import SamplingParams
from vllm_steer.peers.probe_hook.options import ProbeOptions, complete_rows, last_params, last_prompt, last_rows


class LLM:
    """An engine whose outputs have hidden states of some layers.

    ``output.hidden_states[layer]`` has the rows of the generated tokens, ``output.prefill_hidden_states[layer]`` those
    of the prompt; ``output.hidden`` and ``output.prefill_hidden`` are the same dicts. Each sample in
    ``output.outputs`` has the same attributes.

    Args:
        model: Name or folder of a model, or a ``vllm_steer.LLM`` with steering enabled.
        layers: Layer numbers, or ``["all"]``. A row is the stream after the layer (``post_block``).
        include_prefill: Whether outputs have the rows of the prompt.
        include_decode: Whether outputs have the rows of generated tokens: one row less than there are tokens, because
            the last one is never forwarded.
        last_prefill_token: Keep only the last row of the prompt.
        last_decode_token: Keep only the last row of the generated tokens.
        include_last: Add the row of the last generated token, which costs a second request per sample.
        dtype: Dtype of the model, and so of the rows.
        **kwargs: Further arguments of ``vllm_steer.LLM``.

    Raises:
        SteeringError: An option is invalid.

    Example:
        >>> from vllm_steer.peers.probe_hook import LLM  # doctest: +SKIP
        >>> LLM("demo/model", layers=[1]).generate("one")[0].hidden_states[1].shape  # doctest: +SKIP
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
        self._options = ProbeOptions.read(
            layers,
            include_prefill=include_prefill,
            include_decode=include_decode,
            last_prefill_token=last_prefill_token,
            last_decode_token=last_decode_token,
            include_last=include_last,
        )
        if isinstance(model, SteerLLM):
            self._llm = model
        else:
            self._llm = SteerLLM(str(model), **{"enable_steering": True, "dtype": dtype, **kwargs})

    @property
    def capture(self) -> dict[str, Any]:
        """The capture of this engine, for ``SamplingParams`` that have steering as well."""
        return self._options.capture()

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add hidden states to each output.

        Raises:
            SteeringError: The sampling parameters have steering and not this engine's capture.
            RuntimeError: Rows are missing.
        """
        return self._run(self._llm.generate, prompts, sampling_params, kwargs)

    def chat(self, messages: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add hidden states to each output; raises as :meth:`generate` does."""
        return self._run(self._llm.chat, messages, sampling_params, kwargs)

    def _run(self, method: Any, prompts: Any, params: Any, kwargs: dict[str, Any]) -> list[Any]:
        if params is None:
            params = self._llm.get_default_sampling_params() or SamplingParams()
        many = isinstance(params, (list, tuple))
        capturing = [self._options.params(each) for each in params] if many else self._options.params(params)
        outputs: list[Any] = method(prompts, capturing, **kwargs)
        samples = [(output, completion) for output in outputs for completion in output.outputs]
        last: list[Any] = [None] * len(samples)
        if self._options.include_last:
            again = {name: kwargs[name] for name in ("lora_request", "use_tqdm") if name in kwargs}
            texts = [last_prompt(output, completion) for output, completion in samples]
            last = [last_rows(each) for each in self._llm.generate(texts, last_params(self._options), **again)]
        for (output, completion), rows in zip(samples, last, strict=True):
            self._options.attach(completion, complete_rows(completion), len(output.prompt_token_ids), rows)
        for output in outputs:
            first = output.outputs[0]
            for name in ("hidden_states", "hidden", "prefill_hidden_states", "prefill_hidden"):
                setattr(output, name, getattr(first, name))
        return outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_llm":
            raise AttributeError(name)
        return getattr(self._llm, name)
