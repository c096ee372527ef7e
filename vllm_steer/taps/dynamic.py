# SPDX-License-Identifier: Apache-2.0
"""Definition of what happens to the records of a step before and after the forward pass.

Before it, :func:`begin_records` initializes the record of every token and multiplies the factors of gates that depend
on earlier tokens. After it, :func:`fold_records` folds the readouts of the step's tokens into the state of each
condition and marks the tokens with which generation stops.

The last tokens of a step may be drafts that are rejected. The state is therefore kept as it is after the step without
its last 0, 1, ... tokens. The next step starts at the first position that was not accepted, which selects the state.

On CUDA, :mod:`vllm_steer.taps.dynamic_kernel` replaces these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.program.dynamic import (
    EMA,
    HELD,
    LATCH,
    MAX,
    MEAN,
    PREVIOUS,
    PROMPT_LAST,
    PROMPT_MAX,
    PROMPT_MEAN,
    STOP,
    STOP_COLUMN,
    DeviceCondition,
)
from vllm_steer.taps.assignment import BatchLayout
from vllm_steer.taps.reference import condition_factor
from vllm_steer.taps.tables import Tables


def begin_records(tables: Tables, layout: BatchLayout, num_conditions: int) -> None:
    """Write the records of the step's tokens, except those of replayed tokens.

    Args:
        tables: The rank's device tables.
        layout: The step's batch.
        num_conditions: Most conditions of a running request.
    """
    tokens = layout.position.shape[0]
    request = _request_of(layout)
    slot = layout.request_slot.long()
    computed = tables.replayed[:tokens] == 0
    new = tables.initial[slot[request]]
    state = committed_state(tables, layout)
    for c in range(num_conditions):
        field, bound = tables.condition[slot, c], tables.bound[slot, c]
        applies = ((field[:, 0] >= PREVIOUS) & (field[:, 0] < STOP))[request] & (layout.position >= field[request, 6])
        index = applies.nonzero().squeeze(1)
        of = request[index]
        factor = _state_factor(field[of], bound[of], state[of, c], layout.position[index])
        new[index, field[of, 2].long()] *= factor
    tables.record[:tokens] = torch.where(computed.unsqueeze(1), new, tables.record[:tokens])


def committed_state(tables: Tables, layout: BatchLayout) -> torch.Tensor:
    """Return the state of the requests before this step, ``[requests, conditions]`` float64."""
    slot = layout.request_slot.long()
    rejected = tables.next_position[slot] - layout.position[layout.start[:-1].long()]
    return tables.carry[slot, rejected.clamp(0, tables.carry.shape[1] - 1)]


def fold_records(tables: Tables, layout: BatchLayout, num_conditions: int) -> None:
    """Fold the records of the step's tokens into the state, and write the column of stops.

    Args:
        tables: The rank's device tables.
        layout: The step's batch.
        num_conditions: Most conditions of a running request.
    """
    tokens, requests = layout.position.shape[0], layout.request_slot.shape[0]
    request, slot = _request_of(layout), layout.request_slot.long()
    token = torch.arange(tokens, device=tables.device)
    last = layout.start[1:].long() - 1
    before = committed_state(tables, layout)
    computed = tables.replayed[:tokens] == 0
    stopped = torch.zeros(tokens, device=tables.device)
    for dropped in range(tables.carry.shape[1]):
        kept = computed & (token <= last[request] - dropped)
        # Where a request has fewer tokens than are dropped, the state stays as it was.
        marked = last - dropped
        exists = marked >= layout.start[:-1].long()
        for c in range(num_conditions):
            field, bound = tables.condition[slot, c], tables.bound[slot, c]
            score = tables.record[token, field[request, 1].long()].double()
            inside = kept & (layout.position >= field[request, 3]) & (layout.position < field[request, 4])
            state = _fold(field[:, 0], bound, before[:, c], score, inside, request, token, requests)
            tables.carry[slot, dropped, c] = state
            holds = exists & (field[:, 0] == STOP) & inside[marked.clamp(min=0)] & (state >= field[:, 5])
            at = marked[holds]
            number = field[holds, 7].float()
            stopped[at] = torch.where((stopped[at] == 0) | (number < stopped[at]), number, stopped[at])
    tables.record[:tokens, STOP_COLUMN] = torch.where(computed, stopped, tables.record[:tokens, STOP_COLUMN])
    tables.next_position[slot] = layout.position[last] + 1


def wrong_drafts(tables: Tables, layout: BatchLayout, before: torch.Tensor, num_conditions: int) -> torch.Tensor:
    """Return which tokens at the end of each request's step had other factors than the tokens before them decide.

    The factors of a step follow from the state before it, but the second token of a step may be edited differently
    because of the first. Such a token must count as a rejected draft, so that it is computed again.

    Args:
        tables: The rank's device tables, after :func:`fold_records`.
        layout: The step's batch.
        before: ``[requests, conditions]``, :func:`committed_state` before :func:`fold_records`.
        num_conditions: Most conditions of a running request.

    Returns:
        ``[requests, d]`` bool. Item d stands for the last token but d.
    """
    slot, last = layout.request_slot.long(), layout.start[1:].long() - 1
    drafts = tables.carry.shape[1] - 1
    token = last.unsqueeze(1) - torch.arange(drafts, device=tables.device)
    position = layout.position[token.clamp(min=0)].unsqueeze(2).expand(-1, -1, num_conditions)
    field = tables.condition[slot, :num_conditions].unsqueeze(1).expand(-1, drafts, -1, -1)
    bound = tables.bound[slot, :num_conditions].unsqueeze(1).expand(-1, drafts, -1, -1)
    kind = field[..., 0]
    applies = (kind >= PREVIOUS) & (kind < STOP) & (position >= field[..., 6])
    applies &= (token >= layout.start[:-1].unsqueeze(1)).unsqueeze(2)
    flat = field.reshape(-1, 8), bound.reshape(-1, 6)
    used = before[:, :num_conditions].unsqueeze(1).expand(-1, drafts, -1)
    right = tables.carry[slot, 1:, :num_conditions]
    factors = (_state_factor(*flat, state.reshape(-1), position.reshape(-1)) for state in (used, right))
    return (applies & torch.ne(*factors).view(kind.shape)).any(2)


def accepted_tokens(wrong: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """Return how many sampled tokens of each request can be kept, ``[requests]``.

    Args:
        wrong: ``[requests, d]``, the result of :func:`wrong_drafts`.
        num_drafts: ``[requests]`` number of draft tokens, which are the last tokens of a request's step.
    """
    number = torch.arange(wrong.shape[1], device=wrong.device)
    # The draft in front of d others is the draft with the index n - 1 - d; the tokens sampled before it are kept.
    dropped = torch.where(wrong & (number < num_drafts.unsqueeze(1)), number + 1, 0).amax(1)
    return num_drafts + 1 - dropped


def _request_of(layout: BatchLayout) -> torch.Tensor:
    """Return the index in the batch of the request of each token."""
    counts = (layout.start[1:] - layout.start[:-1]).long()
    return torch.repeat_interleave(
        torch.arange(counts.shape[0], device=counts.device), counts, output_size=layout.position.shape[0]
    )


def _state_factor(
    field: torch.Tensor, bound: torch.Tensor, state: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Return the factor that a condition gives to tokens at ``position``, from the state before them, float32."""
    kind = field[:, 0]
    count = torch.where(kind == MEAN, position - field[:, 3], field[:, 5]).clamp(min=1)
    score = torch.where((kind == PROMPT_MEAN) | (kind == MEAN), state / count, state).float()
    factor = condition_factor(score, *bound[:, :3].unbind(1))
    factor = torch.where(kind == HELD, (state >= field[:, 5]).float(), factor)
    return torch.where(kind == LATCH, state.float(), factor)


def _fold(
    kind: torch.Tensor,
    bound: torch.Tensor,
    before: torch.Tensor,
    score: torch.Tensor,
    inside: torch.Tensor,
    request: torch.Tensor,
    token: torch.Tensor,
    requests: int,
) -> torch.Tensor:
    """Return the state of one condition of each request after the tokens ``inside``.

    Args:
        kind: ``[requests]``, kind of the condition.
        bound: ``[requests, 6]``.
        before: ``[requests]`` float64, the state before.
        score: ``[tokens]`` float64, value of the readout.
        inside: ``[tokens]`` whether the token is folded.
        request: ``[tokens]`` index of the request.
        token: ``[tokens]`` index of the token.
        requests: Number of requests.
    """
    none = torch.full((requests,), -1, device=score.device)

    def last_of(mask: torch.Tensor) -> torch.Tensor:
        return none.scatter_reduce(0, request, torch.where(mask, token, -1), "amax")

    threshold, sign = bound[:, 0].double(), bound[:, 1].double()
    release, release_sign = bound[:, 3].double(), bound[:, 4].double()
    holds = inside & (sign[request] * (score - threshold[request]) > 0)
    releases = inside & (release_sign[request] * (score - release[request]) > 0)
    latest = last_of(inside)
    latest_score = torch.where(latest >= 0, score[latest.clamp(min=0)], before)
    total = before + torch.zeros_like(before).index_add_(0, request, torch.where(inside, score, 0.0))
    first = inside.new_zeros(requests)
    first[request[inside]] = True
    low = torch.full_like(before, -torch.inf)
    highest = low.scatter_reduce(0, request, torch.where(inside, score, -torch.inf), "amax")
    set_at, reset_at = last_of(holds), last_of(releases)
    latched = torch.where(set_at >= reset_at, torch.where(set_at >= 0, 1.0, before), 0.0)
    broken = last_of(inside & ~holds)
    after_break = inside & (token > broken[request])
    run = torch.zeros_like(before).index_add_(0, request, after_break.double())
    run = torch.where(broken >= 0, run, before + run)
    # Tokens of the request that are folded, from each token on, without it.
    counted = torch.cumsum(inside, 0)
    earlier = torch.zeros_like(none).scatter_reduce(0, request, torch.where(inside, counted, 0), "amax")
    after = earlier[request] - counted
    folded = torch.zeros_like(before).index_add_(0, request, inside.double())
    earliest = torch.full_like(none, len(token)).scatter_reduce(
        0, request, torch.where(inside, token, len(token)), "amin"
    )
    first_score = torch.where(folded > 0, score[earliest.clamp(max=len(token) - 1)], before)
    alpha = bound[:, 5].double()
    weight = torch.where(inside, alpha[request] * (1 - alpha[request]) ** after, 0.0)
    average = torch.where(before.isnan(), first_score, before) * (1 - alpha) ** folded
    average = average.index_add(0, request, weight * torch.where(inside, score, 0.0))
    state = before
    for code, value in (
        (PREVIOUS, latest_score),
        (PROMPT_LAST, latest_score),
        (PROMPT_MEAN, total),
        (MEAN, total),
        (PROMPT_MAX, torch.where(first, torch.maximum(before, highest), before)),
        (MAX, torch.where(first, torch.maximum(before, highest), before)),
        (EMA, average),
        (HELD, run),
        (LATCH, latched),
        (STOP, run),
    ):
        state = torch.where(kind == code, value, state)
    return state


def initial_state(kind: int) -> float:
    """Return the state of a condition of a new request."""
    if kind == EMA:
        return torch.nan
    return -torch.inf if kind in (PROMPT_MAX, MAX) else 0.0


def state_after(
    conditions: Sequence[DeviceCondition], records: npt.NDArray[np.float32], start: int
) -> npt.NDArray[np.float64]:
    """Return the state of the conditions of one request after recorded tokens, ``[conditions]``, on the host.

    Args:
        conditions: The conditions.
        records: ``[tokens, columns]`` of the tokens from position ``start`` on.
        start: Position of the first token.
    """
    tokens = len(records)
    positions = np.arange(start, start + tokens)
    state = np.zeros(len(conditions), dtype=np.float64)
    for c, each in enumerate(conditions):
        bound = torch.tensor([[each.threshold, each.sign, each.sharpness, each.release, each.release_sign, each.alpha]])
        folded = _fold(
            torch.tensor([each.kind]),
            bound,
            torch.tensor([initial_state(each.kind)], dtype=torch.float64),
            torch.from_numpy(records[:, each.score].astype(np.float64)),
            torch.from_numpy((positions >= each.first) & (positions < each.stop)),
            torch.zeros(tokens, dtype=torch.int64),
            torch.arange(tokens),
            1,
        )
        state[c] = folded.item()
    return state
