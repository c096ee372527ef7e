# SPDX-License-Identifier: Apache-2.0
"""Definition of what happens to the records of a step before and after the forward pass.

Before it, :func:`begin_records` initializes the record of every token and multiplies the factors of gates that depend
on earlier tokens, or on the part of the output that the token itself belongs to. After it, :func:`fold_records` folds
the readouts and the ids of the step's tokens into the state of each condition and marks the tokens with which
generation stops.

The last tokens of a step may be drafts that are rejected. The state is therefore kept as it is after the step without
its last 0, 1, ... tokens. The next step starts at the first position that was not accepted, which selects the state.

On CUDA, :mod:`vllm_steer.taps.records_kernel` replaces these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_steer.program.records import (
    BOUND_FIELDS,
    CONDITION_FIELDS,
    EMA,
    HELD,
    LATCH,
    MAX,
    MEAN,
    PART,
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
        if (field[:, 0] == PART).any():
            inside = _inside_span(layout, field, state[:, c], request)[index]
            in_part = torch.where(field[of, 7] != 0, ~inside, inside)
            factor = torch.where(field[of, 0] == PART, in_part.float(), factor)
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
            # A part has a token id there.
            column = torch.where(field[:, 0] == PART, 0, field[:, 1])
            score = tables.record[token, column[request].long()].double()
            inside = kept & (layout.position >= field[request, 3]) & (layout.position < field[request, 4])
            mask = field[request, 8].long()
            inside &= (mask == 0) | (tables.record[token, mask] != 0)
            state = _fold(field, bound, before[:, c], score, inside, request, token, requests, layout.token)
            tables.carry[slot, dropped, c] = state
            holds = exists & (field[:, 0] == STOP) & inside[marked.clamp(min=0)] & (state >= field[:, 5])
            at = marked[holds]
            number = field[holds, 7].float()
            stopped[at] = torch.where((stopped[at] == 0) | (number < stopped[at]), number, stopped[at])
    tables.record[:tokens, STOP_COLUMN] = torch.where(computed, stopped, tables.record[:tokens, STOP_COLUMN])
    tables.next_position[slot] = layout.position[last] + 1


def _inside_span(layout: BatchLayout, field: torch.Tensor, state: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """Return whether each token is in the span of its request's condition, ``[tokens]``.

    Both ends of the span are inside, and a break is outside.

    Args:
        layout: The step's batch.
        field: ``[requests, fields]`` of the condition.
        state: ``[requests]``, whether the span was open before the step.
        request: ``[tokens]`` index of the request.
    """
    token = torch.arange(len(request), device=request.device)
    counts = layout.position >= field[request, 3]
    starts, ends, breaks = (counts & marks for marks in _markers(layout.token, field, request))
    latest = torch.cummax(torch.where(starts | ends | breaks, token, -1), 0).values
    before = torch.cat((latest.new_full((1,), -1), latest[:-1]))
    in_step = before >= layout.start[request]
    opened = torch.where(in_step, starts[before.clamp(min=0)], state[request] != 0)
    return (opened & ~breaks) | starts


def _markers(token: torch.Tensor, field: torch.Tensor, request: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return whether each token is the start, the end, and a break of the span of its request's condition."""
    breaks = (token == field[request, 9]) | (token == field[request, 10])
    return token == field[request, 1], token == field[request, 5], breaks


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
    # The part of a token is known in its own step.
    applies = (kind >= PREVIOUS) & (kind < PART) & (position >= field[..., 6])
    applies &= (token >= layout.start[:-1].unsqueeze(1)).unsqueeze(2)
    flat = field.reshape(-1, CONDITION_FIELDS), bound.reshape(-1, BOUND_FIELDS)
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
    # A part of the output may not have had a token yet.
    factor = torch.where((field[:, 8] != 0) & (state.isnan() | (state == -torch.inf)), 0.0, factor)
    return torch.where(kind == LATCH, state.float(), factor)


def _fold(
    field: torch.Tensor,
    bound: torch.Tensor,
    before: torch.Tensor,
    score: torch.Tensor,
    inside: torch.Tensor,
    request: torch.Tensor,
    token: torch.Tensor,
    requests: int,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the state of one condition of each request after the tokens ``inside``.

    Args:
        field: ``[requests, fields]`` of the condition.
        bound: ``[requests, 6]``.
        before: ``[requests]`` float64, the state before.
        score: ``[tokens]`` float64, value of the readout.
        inside: ``[tokens]`` whether the token is folded.
        request: ``[tokens]`` index of the request.
        token: ``[tokens]`` index of the token.
        requests: Number of requests.
        ids: ``[tokens]`` token ids.
    """
    kind = field[:, 0]
    none = torch.full((requests,), -1, device=score.device)

    def last_of(mask: torch.Tensor) -> torch.Tensor:
        return none.scatter_reduce(0, request, torch.where(mask, token, -1), "amax")

    threshold, sign = bound[:, 0].double(), bound[:, 1].double()
    release, release_sign = bound[:, 3].double(), bound[:, 4].double()
    holds = inside & (sign[request] * (score - threshold[request]) > 0)
    releases = inside & (release_sign[request] * (score - release[request]) > 0)
    starts, ends, breaks = _markers(ids, field, request)
    of_part = (kind == PART)[request]
    holds = torch.where(of_part, inside & starts, holds)
    releases = torch.where(of_part, inside & (ends | breaks), releases)
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
        (PART, latched),
        (STOP, run),
    ):
        state = torch.where(kind == code, value, state)
    return state


def state_after(
    conditions: Sequence[DeviceCondition],
    records: npt.NDArray[np.float32],
    start: int,
    generated: npt.NDArray[np.int64],
    prompt_len: int,
) -> npt.NDArray[np.float64]:
    """Return the state of the conditions of one request after recorded tokens, ``[conditions]``, on the host.

    Args:
        conditions: The conditions.
        records: ``[tokens, columns]`` of the tokens from position ``start`` on.
        start: Position of the first recorded token.
        generated: The generated tokens up to the last recorded one.
        prompt_len: Number of prompt tokens.
    """
    state = np.zeros(len(conditions), dtype=np.float64)
    for c, each in enumerate(conditions):
        if each.kind == PART:
            # Tokens from the prefix cache have no record, but their ids are known.
            first, scores = prompt_len, np.zeros(len(generated))
            ids, mask = torch.from_numpy(generated), np.ones(len(generated), dtype=bool)
        else:
            first, scores = start, records[:, each.score].astype(np.float64)
            ids = torch.zeros(len(records), dtype=torch.int64)
            mask = records[:, each.mask] != 0 if each.mask else np.ones(len(records), dtype=bool)
        positions = np.arange(first, first + len(scores))
        state[c] = each.initial_state
        if not len(scores):
            continue
        folded = _fold(
            torch.tensor([each.fields]),
            torch.tensor([each.numbers]),
            torch.tensor([each.initial_state], dtype=torch.float64),
            torch.from_numpy(scores),
            torch.from_numpy((positions >= each.first) & (positions < each.stop) & mask),
            torch.zeros(len(scores), dtype=torch.int64),
            torch.arange(len(scores)),
            1,
            ids,
        )
        state[c] = folded.item()
    return state
