# SPDX-License-Identifier: Apache-2.0
"""Hidden states of many prompts in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from vllm_steer.capture.results import CapturedRequest, Site
from vllm_steer.errors import SteeringError


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Rows of several prompts, in prompt order; positions ascend within each prompt.

    ``states[i]`` holds the rows of prompt ``i``, and ``len(states)`` is the number of prompts.

    Examples:
        >>> prompts = ["one", "two"]
        >>> states = capture_hidden_states(llm, prompts, hooks={"post_block": [3]})  # doctest: +SKIP
        >>> states.tensor("post_block", 3).shape  # doctest: +SKIP
        >>> states = capture_hidden_states(  # doctest: +SKIP
        ...     llm, prompts, hooks={"post_block": [3]}, positions="all_prompt"
        ... )
        >>> [rows.shape for rows in states.tensors("post_block", 3)]  # doctest: +SKIP
    """

    captured: tuple[CapturedRequest, ...]
    """Captured rows of each prompt."""

    def __len__(self) -> int:
        return len(self.captured)

    def __iter__(self) -> Iterator[CapturedRequest]:
        return iter(self.captured)

    def __getitem__(self, prompt: int) -> CapturedRequest:
        return self.captured[prompt]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites."""
        return tuple(self.captured[0].sites)

    def tensors(self, point: str, layer: int) -> list[torch.Tensor]:
        """Return the rows of a site on the CPU, one tensor ``[rows, hidden]`` per prompt."""
        return [request.tensor(point, layer) for request in self.captured]

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """Return the rows of all prompts at a site on the CPU, concatenated: ``[rows, hidden]``.

        There is one row per prompt for ``"last_prompt"``. Otherwise the rows of prompt ``i`` are
        ``tensor[bounds[i] : bounds[i + 1]]``, see `bounds`.
        """
        return torch.cat(self.tensors(point, layer))

    def bounds(self, point: str, layer: int) -> torch.Tensor:
        """Return where each prompt begins in `tensor`, and the number of all rows: int64 ``[prompts + 1]``."""
        counts = (len(rows) for rows in self.tensors(point, layer))
        return torch.tensor(list(accumulate(counts, initial=0)))

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """Return the position of each row in its prompt, int64 ``[rows]``."""
        return torch.cat([request.positions(point, layer) for request in self.captured])

    def prompt_index(self, point: str, layer: int) -> torch.Tensor:
        """Return the prompt number of each row, int64 ``[rows]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.bounds(point, layer).diff())


def capture_hidden_states(
    llm: Any,
    prompts: Any,
    *,
    hooks: Mapping[str, Any] | Sequence[str],
    positions: Any = "last_prompt",
    dtype: str | None = None,
    steering: Any = None,
    chat_kwargs: Mapping[str, Any] | None = None,
    use_tqdm: bool = True,
) -> HiddenStates:
    """Run prompts through a model and return their hidden states, separately for each prompt.

    One token per prompt is sampled and discarded.

    Args:
        llm: An `LLM` with steering enabled.
        prompts: Prompts in any form that ``llm.generate`` accepts, or conversations as in ``llm.chat``: one or several.
        hooks: Layers by hook point, or names of sites, as in a capture spec.
        positions: Positions to capture, as in a capture spec.
        dtype: Dtype of the rows; the model's by default.
        steering: Edits to apply during the run.
        chat_kwargs: Arguments of ``llm.chat`` for conversations, such as ``{"add_generation_prompt": False}``.
        use_tqdm: Whether to show a progress bar.

    Raises:
        SteeringError: The capture or the edits cannot be served.
        RuntimeError: Rows are missing.

    Examples:
        >>> from vllm_steer import capture_hidden_states  # doctest: +SKIP
        >>> states = capture_hidden_states(llm, ["one", "two"], hooks={"post_block": "all"})  # doctest: +SKIP
    """
    from vllm_steer.params import SamplingParams

    spec: dict[str, Any] = {"hooks": hooks, "positions": positions}
    if dtype is not None:
        spec["dtype"] = dtype
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, capture={"memory": spec}, steering=steering)
    several, chats = as_prompts(prompts)
    if chat_kwargs and not chats:
        raise SteeringError("chat_kwargs", "is for conversations, lists of messages with a role; leave it out")
    run = partial(llm.chat, **(chat_kwargs or {})) if chats else llm.generate
    with none_left_running(llm):
        outputs = run(several, params, use_tqdm=use_tqdm)
    return HiddenStates(tuple(rows_of_prompt(output, f"prompts[{i}]: ") for i, output in enumerate(outputs)))


def rows_of_prompt(output: Any, place: str = "") -> CapturedRequest:
    """Return the captured rows of an output; raise RuntimeError, which begins with ``place``, if some are missing."""
    result = output.capture_results["memory"]
    if result.status != "ok":
        raise RuntimeError(f"{place}{result.error}")
    if result.unreached:
        positions = ", ".join(map(str, result.unreached))
        length = len(output.prompt_token_ids)
        raise RuntimeError(f"{place}no rows at positions {positions}; the prompt has {length} tokens")
    captured: CapturedRequest = result.data
    return captured


@contextmanager
def none_left_running(llm: Any) -> Iterator[None]:
    """End the requests of a call that fails, such as by Ctrl-C: vLLM would return their outputs from the next call.

    Raises:
        SteeringError: Requests of ``llm.enqueue`` are left, whose outputs the call would take.
    """
    engine = llm.llm_engine
    if states := engine.output_processor.request_states:
        problem = f"has {len(states)} requests of enqueue; call wait_for_completion before this call"
        raise SteeringError("llm", problem)
    try:
        yield
    except BaseException:
        with suppress(Exception):  # the engine has ended
            engine.abort_request(list(states), internal=True)
        raise


def as_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Return a list of prompts, each a text, a mapping, token ids or messages, and whether they are conversations.

    Raises:
        SteeringError: Only some are conversations.
    """
    several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if several and (_is_conversation(several) or all(isinstance(token, int) for token in several)):
        several = [several]
    chats = sum(map(_is_conversation, several))
    if chats not in (0, len(several)):
        raise SteeringError("prompts", "mixes conversations and other prompts; capture them in two calls")
    return several, chats > 0


def _is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(each, Mapping) and "role" in each for each in prompt)
