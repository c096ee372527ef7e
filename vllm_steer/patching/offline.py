# SPDX-License-Identifier: Apache-2.0
"""Running a study with an engine of this process, and with ``LLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from vllm_steer.capture.hidden_states import none_left_running
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import NOT_ENABLED, EngineContext, engine_context
from vllm_steer.frontend.logprobs import check_logprobs_mode
from vllm_steer.params import SamplingParams
from vllm_steer.patching.runner import MAX_SCORED, ModelFacts, Runner, Score, ScoreRequest, SiteRows, join_characters
from vllm_steer.points import points_on
from vllm_steer.request import Edit


class LocalRunner(Runner):
    """Requests of a study to an engine of this process: what offline engines and servers have in common.

    Subclasses run a request in `complete`.
    """

    shared = False
    """Whether requests of other clients may be in the same batch."""
    reference_limit = ModelFacts.reference_limit
    no_tokenizer = "is a text, but the engine was started without a tokenizer; give token ids"

    def __init__(self, vllm_config: Any, context: EngineContext, get_tokenizer: Callable[[], Any]) -> None:
        self._vllm_config, self.context, self._get_tokenizer = vllm_config, context, get_tokenizer

    def complete(self, tokens: Sequence[int], params: Any) -> Any:
        """Run one request and return its output."""
        raise NotImplementedError

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model and the engine.

        Raises:
            SteeringError: The engine returns other scores than log-probabilities of the model.
        """
        config, known = self._vllm_config.model_config, self.context.capabilities
        check_logprobs_mode(config.logprobs_mode, config.logits_processors, shared=self.shared)
        vocab = int(config.get_vocab_size())
        return ModelFacts(
            self.context.model_name,
            known.num_layers,
            known.hidden_size,
            points_on(known.config.points),
            most_reference(vocab, int(config.max_logprobs)),
            vocab,
            known.max_model_len,
            self.reference_limit,
        )

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text."""
        if self.tokenizer is None:
            raise SteeringError("study", self.no_tokenizer)
        self.check()
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; its number if the engine has no tokenizer."""
        self.check()
        if self.tokenizer is None:
            return [f"<{token}>" for token in tokens]
        decode = self.tokenizer.decode
        return join_characters(tokens, [decode([token]) for token in tokens], lambda part: decode(list(part)))

    def capture(
        self, tokens: Sequence[int], sites: Mapping[str, Sequence[int]], edits: Sequence[Edit] = ()
    ) -> SiteRows:
        """Return the rows of all tokens of a prompt."""
        params = _one_token(steering=list(edits) or None, capture=self.spec_of_rows(sites))
        result = self.complete(tokens, params).capture_results["memory"]
        if result.status != "ok":
            raise RuntimeError(f"rows of the prompt are missing: {result.error}")
        return {site: np.ascontiguousarray(result.numpy(*site), np.float32) for site in result.sites}

    def top(self, tokens: Sequence[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the most probable next tokens."""
        output = self.complete(tokens, _one_token(logprobs=count))
        return {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}

    @cached_property
    def tokenizer(self) -> Any:
        return None if self._vllm_config.model_config.skip_tokenizer_init else self._get_tokenizer()


class OfflineRunner(LocalRunner):
    """Requests of a study through ``LLM.generate``."""

    def __init__(self, llm: Any) -> None:
        """Raise ``SteeringError`` unless ``llm`` is an ``LLM`` with steering that returns log-probabilities."""
        if not hasattr(llm, "llm_engine") or not hasattr(llm, "generate"):
            raise SteeringError("llm", f"must be a vllm_steer.LLM or a vllm_steer.Client, not {type(llm).__name__}")
        context = engine_context(llm.llm_engine)
        if context is None:
            raise SteeringError("llm", NOT_ENABLED)
        super().__init__(llm.llm_engine.vllm_config, context, lambda: llm.get_tokenizer())
        self._llm = llm
        config = self._vllm_config.model_config
        check_logprobs_mode(config.logprobs_mode, config.logits_processors)

    def complete(self, tokens: Sequence[int], params: Any) -> Any:
        """Run one request and return its output."""
        (output,) = self._generate([tokens], [params])
        return output

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Run requests together; if one of them is refused, find it by halves, so that the others are served."""
        try:
            params = [score_params(request) for request in requests]
            outputs = self._generate([request.tokens for request in requests], params)
        except (ValueError, TypeError, RuntimeError) as error:
            if len(requests) > 1:
                middle = len(requests) // 2
                return self.score(requests[:middle]) + self.score(requests[middle:])
            return [request.failed(error) for request in requests]
        return [read_score(output, request) for output, request in zip(outputs, requests, strict=True)]

    def _generate(self, prompts: Sequence[Sequence[int]], params: list[Any]) -> list[Any]:
        wrapped = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        with none_left_running(self._llm):
            outputs: list[Any] = self._llm.generate(wrapped, params, use_tqdm=False)
        return outputs


def most_reference(vocab: int, max_logprobs: int) -> int:
    """Return the number of tokens that the divergence can distinguish; -1 for ``max_logprobs`` removes vLLM's limit."""
    most = min(vocab, MAX_SCORED)
    return most if max_logprobs < 0 else min(most, max_logprobs)


def score_params(request: ScoreRequest) -> Any:
    """Return the sampling parameters of a run that is scored."""
    # The sampler returns the log-probabilities of exactly these tokens, which is cheaper than a sorted list.
    return _one_token(logprob_token_ids=request.scored, steering=list(request.edits) or None)


def _one_token(**fields: Any) -> Any:
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **fields)


def read_score(output: Any, request: ScoreRequest) -> Score:
    """Return the score in a request's output."""
    (sample,) = output.outputs
    if sample.finish_reason == "error" or not sample.logprobs:
        return request.failed(sample.stop_reason or "the engine returned no token")
    logprobs = {token: float(each.logprob) for token, each in sample.logprobs[0].items()}
    return request.score(logprobs, output.num_cached_tokens or 0, "engine")
