# SPDX-License-Identifier: Apache-2.0
"""Hidden states of many prompts in one call, stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_steer.capture.results import CapturedRequest, Site


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The rows of all prompts, one after another in the order of the prompts, positions ascending within each."""

    captured: tuple[CapturedRequest, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self.captured[0].sites)

    def tensor(self, point: str, layer: int) -> torch.Tensor:
        """``[rows, hidden]`` (``[prompts, hidden]`` for ``positions="last_prompt"``), on the CPU."""
        return torch.cat([request.tensor(point, layer) for request in self.captured])

    def positions(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[rows]``: each row's position in its prompt."""
        return torch.cat([request.positions(point, layer) for request in self.captured])

    def prompt_index(self, point: str, layer: int) -> torch.Tensor:
        """int64 ``[rows]``: which prompt each row is of."""
        counts = torch.tensor([len(request.positions(point, layer)) for request in self.captured])
        return torch.repeat_interleave(torch.arange(len(self.captured)), counts)


def capture_hidden_states(
    llm: Any,
    prompts: Sequence[Any],
    *,
    hooks: Mapping[str, Any],
    positions: Any = "last_prompt",
    dtype: str | None = None,
    steering: Any = None,
    use_tqdm: bool = True,
) -> HiddenStates:
    """Run ``prompts`` through ``llm`` (one token each is sampled and thrown away) and return their hidden states.

    ``hooks``, ``positions`` and ``dtype`` are those of a capture spec; ``steering`` are edits under which to read.
    Raises :class:`~vllm_steer.SteeringError` for what cannot be served, ``RuntimeError`` where rows are missing.
    """
    from vllm_steer.params import SamplingParams

    spec: dict[str, Any] = {"hooks": dict(hooks), "positions": positions}
    if dtype is not None:
        spec["dtype"] = dtype
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, capture={"memory": spec}, steering=steering)
    captured = []
    for output in llm.generate(list(prompts), params, use_tqdm=use_tqdm):
        result = output.capture_results["memory"]
        if result.status != "ok":
            raise RuntimeError(f"request {output.request_id}: {result.error}")
        captured.append(result.data)
    return HiddenStates(tuple(captured))
