# SPDX-License-Identifier: Apache-2.0
"""``LLM`` whose outputs have hidden states."""

from __future__ import annotations

from typing import Any

from vllm_steer.llm import LLM as SteerLLM
from vllm_steer.params import SamplingParams
from vllm_steer.peers.probe_hook.base import ProbingEngine, show_first
from vllm_steer.peers.probe_hook.options import (
    check_global_steering,
    complete_rows,
    last_params,
    last_prompt,
    last_rows,
    require_global_steering,
)


class LLM(ProbingEngine):
    """An offline engine whose outputs have hidden states; its arguments are those of :class:`ProbingEngine`.

    Examples:
        >>> from vllm_steer.peers.probe_hook import LLM  # doctest: +SKIP
        >>> LLM("demo/model", layers=[1]).generate("one")[0].hidden_states[1].shape  # doctest: +SKIP
    """

    def _is_engine(self, model: Any) -> bool:
        return isinstance(model, SteerLLM)

    def _start(self, model: str, arguments: dict[str, Any]) -> Any:
        return SteerLLM(model, **{"enable_steering": True, **arguments})

    @property
    def capture(self) -> dict[str, Any]:
        """The capture of this engine, for ``SamplingParams`` that have steering as well."""
        return self.options.capture()

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add hidden states to each output.

        Raises:
            SteeringError: The sampling parameters have steering and not this engine's capture, or ``include_last``
                cannot be served with them or with global steering.
            RuntimeError: Rows are missing, or global steering changed before the last row was read.
        """
        return self._run(self.engine.generate, prompts, sampling_params, kwargs)

    def chat(self, messages: Any, sampling_params: Any = None, **kwargs: Any) -> list[Any]:
        """Run vLLM's method and add hidden states to each output; raises as :meth:`generate` does."""
        return self._run(self.engine.chat, messages, sampling_params, kwargs)

    def _run(self, method: Any, prompts: Any, params: Any, kwargs: dict[str, Any]) -> list[Any]:
        if params is None:
            params = self.engine.get_default_sampling_params() or SamplingParams()
        many = isinstance(params, (list, tuple))
        capturing = [self.options.params(each) for each in params] if many else self.options.params(params)
        digest = check_global_steering(self.engine.steering.snapshot()) if self.options.include_last else None
        outputs: list[Any] = method(prompts, capturing, **kwargs)
        samples = [(output, completion) for output in outputs for completion in output.outputs]
        last: list[Any] = [None] * len(samples)
        if self.options.include_last:
            again = {name: kwargs[name] for name in ("lora_request", "use_tqdm") if name in kwargs}
            if isinstance(adapters := again.get("lora_request"), (list, tuple)):
                again["lora_request"] = [
                    adapter for adapter, output in zip(adapters, outputs, strict=True) for _ in output.outputs
                ]
            longest = self.engine.model_config.max_model_len
            texts = [last_prompt(output, completion.token_ids, longest) for output, completion in samples]
            repeated = self.engine.generate(texts, last_params(self.options), **again)
            require_global_steering([*outputs, *repeated], digest)
            last = [last_rows(each) for each in repeated]
        for (output, completion), rows in zip(samples, last, strict=True):
            self.options.attach(completion, complete_rows(completion), len(output.prompt_token_ids), rows)
        for output in outputs:
            show_first(output)
        return outputs
