# SPDX-License-Identifier: Apache-2.0
"""Running a study over a server, with one completion request per run.

The server's own route, ``POST /v1/steering/patch``, needs fewer round trips and sends no rows; see `Client.patch`. This
runner needs no right beyond those of steered completions, and also serves metrics that are callables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from vllm_steer.client.responses import Completion, ServerError
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.logprobs import RAW, check_logprobs_mode
from vllm_steer.patching.runner import MAX_SCORED, ModelFacts, Runner, Score, ScoreRequest, SiteRows, join_characters
from vllm_steer.request import Edit

if TYPE_CHECKING:
    from vllm_steer.client.sync_client import Client

MAX_TOP = 20
"""Most tokens of the clean distribution over HTTP: vLLM's default of ``--max-logprobs``."""
CONCURRENCY = 16
"""Requests of a study in flight."""
_PREFIX = "token_id:"


class HttpRunner(Runner):
    """Requests of a study through ``/v1/completions``; the server checks the size of each."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pieces: dict[int, str] = {}

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model and the engine, from the server's capabilities."""
        known = self._client.capabilities()
        if known.get("problem") or not known.get("num_layers"):
            raise SteeringError("client", f"the server's model is not supported: {known.get('problem')}")
        check_logprobs_mode(known.get("logprobs_mode") or RAW, shared=True)
        points = tuple(point["name"] for point in known["points"] if point["on"])
        # The server does not report the size of the vocabulary; it refuses tokens that the model lacks.
        vocab = 1 << 31
        return ModelFacts(
            self._client.model,
            known["num_layers"],
            known["hidden_size"],
            points,
            MAX_TOP,
            vocab,
            known.get("max_model_len"),
            f"with one request per cell; use client.patch, and start the server with --max-logprobs {MAX_SCORED}",
        )

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text."""
        return self._client.tokenize(text, add_special_tokens=special)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        new = sorted({token for token in tokens if token not in self._pieces})
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            self._pieces.update(zip(new, pool.map(lambda token: self._client.detokenize([token]), new), strict=True))
        return join_characters(tokens, [self._pieces[token] for token in tokens], self._client.detokenize)

    def capture(
        self, tokens: Sequence[int], sites: Mapping[str, Sequence[int]], edits: Sequence[Edit] = ()
    ) -> SiteRows:
        """Return the rows of all tokens of a prompt."""
        report = self._complete(tokens, edits, capture=self.spec_of_rows(sites)).capture_results["memory"]
        if report.status != "ok":
            raise RuntimeError(f"rows of the prompt are missing: {report.error}")
        rows = report.sites or self._client.fetch(report)
        return {site: np.ascontiguousarray(each.rows.float().numpy(), np.float32) for site, each in rows.items()}

    def top(self, tokens: Sequence[int], count: int) -> dict[int, float]:
        """Return the log-probabilities of the most probable next tokens."""
        return _next_token(self._complete(tokens, (), logprobs=count))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Run requests concurrently. A request that fails does not fail the others."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(self._score, requests))

    def _score(self, request: ScoreRequest) -> Score:
        try:
            answer = self._complete(request.tokens, request.edits, logprobs=1, logprob_token_ids=request.scored)
            logprobs = _next_token(answer)
        except (ServerError, httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return request.failed(error)
        usage = answer.document.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return request.score(logprobs, int(cached), "server")

    def _complete(self, tokens: Sequence[int], edits: Sequence[Edit], **fields: Any) -> Completion:
        steering = {"steering": list(edits)} if edits else {}
        plain = {"max_tokens": 1, "temperature": 0.0, "return_tokens_as_token_ids": True}
        return self._client.complete(list(tokens), **plain, **steering, **fields)


def _next_token(answer: Completion) -> dict[int, float]:
    """Return the log-probabilities of the first generated token."""
    (choice,) = answer.document["choices"]
    top = (choice.get("logprobs") or {}).get("top_logprobs")
    if not top:
        raise ValueError(f"the server returned no token: {choice.get('stop_reason') or choice.get('finish_reason')}")
    return {int(token.removeprefix(_PREFIX)): float(value) for token, value in top[0].items()}
