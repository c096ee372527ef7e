# SPDX-License-Identifier: Apache-2.0
"""``LLM`` and ``AsyncLLM`` whose outputs have hidden states; those of ``AsyncLLM`` come with each new token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import vllm

import vllm_steer
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import open_engine, refuse_settings
from vllm_steer.peers.probe_hook.options import (
    ProbeOptions,
    check_global_steering,
    complete_rows,
    last_params,
    last_prompt,
    last_rows,
    require_global_steering,
)

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
        self.engine = self._open(model, dtype, kwargs)

    def _open(self, model: Any, dtype: Any, arguments: dict[str, Any]) -> Any:
        """Return an engine that already runs, or start one."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)


def show_first(output: Any) -> None:
    """Give an output the attributes of its first sample."""
    for name in ATTRIBUTES:
        setattr(output, name, getattr(output.outputs[0], name))


class LLM(ProbingEngine):
    """An offline engine whose outputs have hidden states; its arguments are those of :class:`ProbingEngine`.

    Examples:
        >>> from vllm_steer.peers.probe_hook import LLM  # doctest: +SKIP
        >>> LLM("demo/model", layers=[1]).generate("one")[0].hidden_states[1].shape  # doctest: +SKIP
    """

    def _open(self, model: Any, dtype: Any, arguments: dict[str, Any]) -> Any:
        return open_engine(model, arguments, dtype=dtype)

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
            params = self.engine.get_default_sampling_params() or vllm_steer.SamplingParams()
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


_SAME_REQUEST = ("lora_request", "trace_headers", "priority", "data_parallel_rank")
"""Arguments of ``generate`` that the request of the last token has as well."""


class AsyncLLM(ProbingEngine):
    """An asynchronous engine whose outputs have hidden states; its arguments are those of :class:`ProbingEngine`.

    Outputs of a running request have the rows of the tokens so far; with ``RequestOutputKind.DELTA``, the new rows.

    Examples:
        >>> from vllm_steer.peers.probe_hook import AsyncLLM  # doctest: +SKIP
        >>> llm = AsyncLLM("demo/model", layers=[1])  # doctest: +SKIP
    """

    def _open(self, model: Any, dtype: Any, arguments: dict[str, Any]) -> Any:
        if isinstance(model, vllm_steer.AsyncLLM):
            refuse_settings(arguments)
            return model
        given = vllm.AsyncEngineArgs(model=str(model), **{"dtype": dtype, **arguments, **vllm_steer.engine_kwargs()})
        return vllm_steer.AsyncLLM.from_engine_args(given)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Run vLLM's method and add hidden states to each output.

        Raises:
            SteeringError: The sampling parameters have steering or captures, or ``include_last`` cannot be served with
                global steering.
            RuntimeError: Rows are missing, or global steering changed before the last row was read.
        """
        kind = sampling_params.output_kind
        kinds = type(kind)
        delta = sampling_params.clone()
        if kind is not kinds.FINAL_ONLY:
            delta.output_kind = kinds.DELTA
        delta = self.options.unsteered(delta, streamed=kind is not kinds.FINAL_ONLY)
        digest = await self._check_global_steering() if self.options.include_last else None
        again = {name: kwargs[name] for name in _SAME_REQUEST if name in kwargs}
        samples: dict[int, _Sample] = {}
        prompt_logprobs: Any = None
        async for output in self.engine.generate(prompt, delta, request_id, *args, **kwargs):
            # Deltas have them once.
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
            if kind is kinds.CUMULATIVE:
                output.prompt_logprobs = prompt_logprobs
            for completion in output.outputs:
                sample = samples.setdefault(completion.index, _Sample())
                sample.add(completion)
                last = None
                if completion.finish_reason is not None:
                    sites = complete_rows(completion)
                    if kind is not kinds.DELTA:
                        sample.sites = sites
                    if self.options.include_last:
                        name = f"{request_id}-last-{completion.index}"
                        longest = self.engine.model_config.max_model_len
                        text = last_prompt(output, sample.tokens, longest)
                        answers = self.engine.generate(text, last_params(self.options), name, **again)
                        repeated = [each async for each in answers][-1]
                        require_global_steering((output, repeated), digest)
                        last = last_rows(repeated)
                shown = sample.new if kind is kinds.DELTA else sample.sites
                if kind is kinds.CUMULATIVE:
                    sample.complete(completion)
                self.options.attach(completion, shown, len(output.prompt_token_ids), last)
            show_first(output)
            yield output

    async def _check_global_steering(self) -> str | None:
        """Return the digest of global steering; raise SteeringError if ``include_last`` cannot be served with it."""
        try:
            return check_global_steering(await self.engine.steering.snapshot())
        except SteeringError as error:
            if error.field != "steering":
                raise
            raise SteeringError("include_last", error.problem) from None


class _Sample:
    """Text, tokens and rows of one sample so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: Any = None
        self.sites: Any = {}
        self.new: Any = {}
        """Rows of the latest delta."""

    def add(self, completion: Any) -> None:
        """Add a delta."""
        self.text += completion.text
        self.tokens += completion.token_ids
        if completion.logprobs is not None:
            # Of vLLM's class, which is not a list with `flat_logprobs`. Each output has a copy of its own.
            joined = completion.logprobs[:0] if self.logprobs is None else self.logprobs[:]
            joined.extend(completion.logprobs)
            self.logprobs = joined
        self.new = (getattr(completion, "capture_rows", None) or {}).get("memory", {})
        for site, new in self.new.items():
            old = self.sites.get(site)
            self.sites[site] = (
                new
                if old is None
                else replace(
                    new,
                    positions=np.concatenate([old.positions, new.positions]),
                    rows=torch.cat([old.rows, new.rows]),
                )
            )

    def complete(self, completion: Any) -> None:
        """Give a delta all text, tokens and log-probabilities so far."""
        completion.text, completion.token_ids, completion.logprobs = self.text, list(self.tokens), self.logprobs
