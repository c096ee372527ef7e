# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM`` whose outputs have hidden states, with those of each new token as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from vllm_steer.capture.results import SiteRows
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, ensure_engine_context
from vllm_steer.peers.probe_hook.base import ProbingEngine, show_first
from vllm_steer.peers.probe_hook.options import (
    check_global_steering,
    complete_rows,
    last_params,
    last_prompt,
    last_rows,
    require_global_steering,
)

_SAME_REQUEST = ("lora_request", "trace_headers", "priority", "data_parallel_rank")
"""Arguments of ``generate`` that the request of the last token has as well."""


class AsyncLLM(ProbingEngine):
    """An asynchronous engine whose outputs have hidden states; its arguments are those of :class:`ProbingEngine`.

    Outputs of a running request have the rows of the tokens so far; with ``RequestOutputKind.DELTA``, the new rows.

    Examples:
        >>> from vllm_steer.peers.probe_hook import AsyncLLM  # doctest: +SKIP
        >>> llm = AsyncLLM("demo/model", layers=[1])  # doctest: +SKIP
    """

    def _is_engine(self, model: Any) -> bool:
        import vllm_steer

        return isinstance(model, vllm_steer.AsyncLLM)

    def _start(self, model: str, arguments: dict[str, Any]) -> Any:
        import vllm_steer
        from vllm_steer.compat.internals import AsyncEngineArgs

        arguments = {**arguments, **vllm_steer.engine_kwargs()}
        return vllm_steer.AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Run vLLM's method and add hidden states to each output.

        Raises:
            SteeringError: The sampling parameters have steering or captures, or ``include_last`` cannot be served with
                global steering.
            RuntimeError: Rows are missing, or global steering changed before the last row was read.
        """
        from vllm_steer.compat.internals import RequestOutputKind

        kind = sampling_params.output_kind
        delta = sampling_params.clone()
        if kind is not RequestOutputKind.FINAL_ONLY:
            delta.output_kind = RequestOutputKind.DELTA
        delta = self.options.unsteered(delta, streamed=kind is not RequestOutputKind.FINAL_ONLY)
        digest = await self._check_global_steering() if self.options.include_last else None
        again = {name: kwargs[name] for name in _SAME_REQUEST if name in kwargs}
        samples: dict[int, _Sample] = {}
        prompt_logprobs: Any = None
        async for output in self.engine.generate(prompt, delta, request_id, *args, **kwargs):
            # Deltas have them once.
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
            if kind is RequestOutputKind.CUMULATIVE:
                output.prompt_logprobs = prompt_logprobs
            for completion in output.outputs:
                sample = samples.setdefault(completion.index, _Sample())
                sample.add(completion)
                last = None
                if completion.finish_reason is not None:
                    sites = complete_rows(completion)
                    if kind is not RequestOutputKind.DELTA:
                        sample.sites = sites
                    if self.options.include_last:
                        name = f"{request_id}-last-{completion.index}"
                        longest = self.engine.model_config.max_model_len
                        repeated = await self._last(last_prompt(output, sample.tokens, longest), name, again)
                        require_global_steering((output, repeated), digest)
                        last = last_rows(repeated)
                shown = sample.new if kind is RequestOutputKind.DELTA else sample.sites
                if kind is RequestOutputKind.CUMULATIVE:
                    sample.complete(completion)
                self.options.attach(completion, shown, len(output.prompt_token_ids), last)
            show_first(output)
            yield output

    async def _check_global_steering(self) -> str | None:
        """Return the digest of global steering; raise SteeringError if ``include_last`` cannot be served with it."""
        context = await ensure_engine_context(self.engine)
        if context is None:
            raise SteeringError("include_last", NOT_ENABLED)
        return check_global_steering(await context.registry.refresh())

    async def _last(self, prompt: Any, request_id: str, kwargs: dict[str, Any]) -> Any:
        """Return the output of a request that reads the last token of a prompt."""
        params = last_params(self.options)
        outputs = [each async for each in self.engine.generate(prompt, params, request_id, **kwargs)]
        return outputs[-1]


class _Sample:
    """Text, tokens and rows of one sample so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: Any = None
        self.sites: dict[Any, SiteRows] | Any = {}
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
            self.sites[site] = SiteRows(
                np.asarray(new.positions) if old is None else np.concatenate([old.positions, new.positions]),
                new.rows if old is None else torch.cat([old.rows, new.rows]),
            )

    def complete(self, completion: Any) -> None:
        """Give a delta all text, tokens and log-probabilities so far."""
        completion.text, completion.token_ids, completion.logprobs = self.text, list(self.tokens), self.logprobs
