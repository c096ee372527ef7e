# SPDX-License-Identifier: Apache-2.0
"""``AsyncLLM`` whose outputs have hidden states, with those of each new token as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch

from vllm_steer.capture.results import SiteRows
from vllm_steer.errors import SteeringError
from vllm_steer.peers.probe_hook.options import ProbeOptions, complete_rows


class AsyncLLM:
    """An asynchronous engine whose outputs have hidden states of some layers.

    Outputs of a running request have the rows of the tokens so far; with ``RequestOutputKind.DELTA``, the new rows.
    The arguments are those of :class:`~vllm_steer.peers.probe_hook.LLM` without ``include_last``.

    Example:
        >>> from vllm_steer.peers.probe_hook import AsyncLLM  # doctest: +SKIP
        >>> llm = AsyncLLM("demo/model", layers=[1])  # doctest: +SKIP
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
        if include_last:
            raise SteeringError("include_last", "is served by LLM only; omit it")
        self._options = ProbeOptions.read(
            layers,
            include_prefill=include_prefill,
            include_decode=include_decode,
            last_prefill_token=last_prefill_token,
            last_decode_token=last_decode_token,
            include_last=False,
        )
        import vllm_steer
        from vllm_steer.compat.internals import AsyncEngineArgs

        if isinstance(model, vllm_steer.AsyncLLM):
            self._engine = model
        else:
            arguments = {"dtype": dtype, **kwargs, **vllm_steer.engine_kwargs()}
            self._engine = vllm_steer.AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Run vLLM's method and add hidden states to each output.

        Raises:
            SteeringError: The sampling parameters have steering or captures.
            RuntimeError: Rows are missing.
        """
        from vllm_steer.compat.internals import RequestOutputKind
        from vllm_steer.params import has_steering

        if has_steering(sampling_params):
            raise SteeringError("sampling_params", "have steering or captures; use vllm_steer.AsyncLLM for both")
        kind = sampling_params.output_kind
        delta = sampling_params.clone()
        if kind is not RequestOutputKind.FINAL_ONLY:
            delta.output_kind = RequestOutputKind.DELTA
        delta = self._options.params(delta, streamed=kind is not RequestOutputKind.FINAL_ONLY)
        so_far: dict[int, _Sample] = {}
        async for output in self._engine.generate(prompt, delta, request_id, *args, **kwargs):
            for completion in output.outputs:
                self._add(output, completion, kind, so_far)
            first = output.outputs[0]
            for name in ("hidden_states", "hidden", "prefill_hidden_states", "prefill_hidden"):
                setattr(output, name, getattr(first, name))
            yield output

    def _add(self, output: Any, completion: Any, kind: Any, so_far: dict[int, _Sample]) -> None:
        from vllm_steer.compat.internals import RequestOutputKind

        prompt = len(output.prompt_token_ids)
        if kind is RequestOutputKind.FINAL_ONLY:
            self._options.attach(completion, complete_rows(completion), prompt)
            return
        new = (getattr(completion, "capture_rows", None) or {}).get("memory", {})
        if kind is RequestOutputKind.DELTA:
            self._options.attach(completion, new, prompt)
        else:
            sample = so_far.setdefault(completion.index, _Sample())
            sample.add(completion, new)
            self._options.attach(completion, sample.sites, prompt)
        if completion.finish_reason is not None:
            sites = complete_rows(completion)
            if kind is RequestOutputKind.CUMULATIVE:
                self._options.attach(completion, sites, prompt)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":
            raise AttributeError(name)
        return getattr(self._engine, name)


class _Sample:
    """Text, tokens and rows of one sample so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[Any] | None = None
        self.sites: dict[Any, SiteRows] = {}

    def add(self, completion: Any, rows: Any) -> None:
        """Add a delta, and give it all text, tokens and log-probabilities so far."""
        self.text += completion.text
        self.tokens += completion.token_ids
        if completion.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *completion.logprobs]
        completion.text, completion.token_ids, completion.logprobs = self.text, list(self.tokens), self.logprobs
        for site, new in rows.items():
            old = self.sites.get(site)
            self.sites[site] = SiteRows(
                np.asarray(new.positions) if old is None else np.concatenate([old.positions, new.positions]),
                new.rows if old is None else torch.cat([old.rows, new.rows]),
            )
