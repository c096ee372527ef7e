# SPDX-License-Identifier: Apache-2.0
"""Offline engines of the interfaces that wrap one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_steer import LLM, Edit, SamplingParams
from vllm_steer.adapters import RAW, check_logprobs_mode, is_integer, shown
from vllm_steer.errors import SteeringError


def open_engine(model: Any, arguments: Mapping[str, Any], **defaults: Any) -> LLM:
    """Return an engine with steering.

    Args:
        model: An engine, or the name or folder of a model to start one with.
        arguments: Arguments of a new engine.
        **defaults: Arguments of a new engine that ``arguments`` may replace.

    Raises:
        SteeringError: Arguments are given with an engine.
    """
    if not isinstance(model, LLM):
        return LLM(str(model), **{"enable_steering": True, **defaults, **arguments})
    refuse_settings(arguments)
    return model


def refuse_settings(arguments: Mapping[str, Any]) -> None:
    """Raise SteeringError if arguments of a new engine are given with one that already runs."""
    for name in arguments:
        raise SteeringError(name, "has no effect on an engine that already runs; omit it")


class Engine:
    """An engine that returns all log-probabilities of the model, and its facts.

    Args:
        model: Name or folder of a model, or a ``vllm_steer.LLM`` with steering enabled. Methods that return the
            probabilities of all tokens need ``max_logprobs=-1``, the default of engines that are started here.
        **arguments: Arguments of ``vllm_steer.LLM``.

    Raises:
        SteeringError: The engine has no steering or returns other scores, or arguments are given with an engine.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        if not isinstance(model, LLM):  # before the model is loaded, which takes long
            check_logprobs_mode(arguments.get("logprobs_mode", RAW), arguments.get("logits_processors"))
        self.llm = open_engine(model, arguments, max_logprobs=-1)
        config = self.llm.llm_engine.vllm_config.model_config
        check_logprobs_mode(config.logprobs_mode, config.logits_processors)
        try:
            facts = self.llm.capabilities()
        except SteeringError as error:
            raise SteeringError("model", error.problem) from None
        self.num_layers: int = facts["num_layers"]
        self.hidden_size: int = facts["hidden_size"]
        self.vocab_size: int = config.get_vocab_size()
        self.points: dict[str, Any] = {point["name"]: point for point in facts["points"]}
        """Facts about each hook point by name, see ``LLM.capabilities``."""
        self.mixed_head: str | None = facts["mixed_head"]
        """Reason why the final norm does not read the stream of the points alone, or None."""
        self._max_logprobs: int = config.max_logprobs

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.llm.get_tokenizer()

    def encode(self, prompt: Any, field: str = "prompts") -> list[int]:
        """Return the tokens of a prompt, given as a text or as tokens.

        Raises:
            SteeringError: The prompt has another form.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        tokens = prompt.tolist() if isinstance(prompt, (torch.Tensor, np.ndarray)) else prompt
        if not isinstance(tokens, (list, tuple)) or not tokens or not all(map(is_integer, tokens)):
            raise SteeringError(field, f"must be a text or a list of token numbers, not {shown(prompt)}")
        # Python's integers: a tensor in a request ends the thread of an engine process that reads requests.
        return [int(token) for token in tokens]

    def encode_all(self, prompts: Any) -> list[list[int]]:
        """Return the tokens of prompts in any form that :func:`read_prompts` accepts."""
        return [self.encode(each, f"prompts[{i}]") for i, each in enumerate(read_prompts(prompts))]

    def params(self, *, edits: Iterable[Edit] = (), capture: Any = None, **fields: Any) -> SamplingParams:
        """Return sampling parameters, by default greedy and for one token.

        Args:
            edits: Edits that apply before those in ``fields``.
            capture: Spec of the consumer ``memory``.
            **fields: Arguments of ``SamplingParams``.
        """
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, **fields}
        if is_integer(given["max_tokens"]):  # Python's integer, without which no request reaches the engine
            given["max_tokens"] = int(given["max_tokens"])
        if joined := [*edits, *(given.get("steering") or ())]:
            given["steering"] = joined
        if capture is not None:
            given["capture"] = {"memory": capture}
        return SamplingParams(**given)

    def submit(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """Return the outputs of prompts, with the same parameters or a list of them, also of requests that failed."""
        requests = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        return list(self.llm.generate(requests, params, use_tqdm=False)) if requests else []

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """Return the outputs of prompts; raise RuntimeError if a request failed."""
        outputs = self.submit(prompts, params)
        require_answers(outputs)
        return outputs

    def all_logprobs(self) -> dict[str, Any]:
        """Return the arguments of sampling parameters that request all log-probabilities.

        Raises:
            SteeringError: The engine does not return so many.
        """
        if 0 <= self._max_logprobs < self.vocab_size:
            raise SteeringError(
                "max_logprobs",
                f"is {self._max_logprobs}, but the vocabulary has {self.vocab_size} tokens; start the engine with "
                "max_logprobs=-1",
            )
        return {"logprobs": -1, "flat_logprobs": True, "detokenize": False}

    def log_probabilities(self, flat: Any, step: int = 0) -> torch.Tensor:
        """Return the log-probabilities ``[vocab]`` of one token of an output's ``logprobs`` or ``prompt_logprobs``."""
        part = slice(flat.start_indices[step], flat.end_indices[step])
        found = torch.full((self.vocab_size,), -torch.inf)
        found[torch.tensor(flat.token_ids[part])] = torch.tensor(flat.logprobs[part])
        return found


def read_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts; a text, or a list of tokens, is one prompt.

    Raises:
        SteeringError: There are none.
    """
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and is_integer(prompts[0])):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise SteeringError("prompts", f"must be a text, texts or tokens, not {shown(prompts)}")
    return list(prompts)


def rows_of(output: Any, field: str) -> Any:
    """Return the captured rows of an output or of a sample; raise RuntimeError if some are missing."""
    result = output.capture_results["memory"]
    if result.status != "ok":
        raise RuntimeError(f"{field}: {result.error}")
    return result


def require_answers(outputs: Iterable[Any]) -> None:
    """Raise RuntimeError if a request ended with an error, for example because a user hook failed."""
    for i, output in enumerate(outputs):
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise RuntimeError(f"prompts[{i}]: {sample.stop_reason or 'the request ended with an error'}")


def hooks_of(sites: Iterable[tuple[Any, int]]) -> dict[str, list[int]]:
    """Return the layers of sites by point, each once and in order."""
    hooks: dict[str, list[int]] = {}
    for point, layer in dict.fromkeys(sites):
        hooks.setdefault(point, []).append(layer)
    return hooks
