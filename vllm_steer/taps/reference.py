# SPDX-License-Identifier: Apache-2.0
"""Definition of every instruction in plain torch.

This is what runs on CPU, and the Triton kernel is tested against it. Arithmetic is float32, and the edited stream is
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_steer.program import instructions as ops
from vllm_steer.program.position_runs import NO_OPERAND
from vllm_steer.taps.tables import Tables

# Arguments, all float32: the stream [n, hidden], one vector per token [n, hidden] (unit length except for ADD), and
# strength, low, high [n, 1]. Returns the new stream.
Definition = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def add(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x + s v``."""
    return x + s * v


def add_normed(
    x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Return ``x + s ||x|| u``, a change of ``s`` times the stream's norm."""
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x + s * length * u


def ablate(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x - s (x.u) u``; with ``s = 1`` the component along ``u`` is zero."""
    return x - s * (x * u).sum(-1, keepdim=True) * u


def clamp(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x + s (clip(c, low, high) - c) u`` with ``c = x.u``; with ``s = 1`` the component is within bounds."""
    c = (x * u).sum(-1, keepdim=True)
    return x + s * (torch.minimum(torch.maximum(c, low), high) - c) * u


def replace(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return ``x + s (v - x)``; exactly ``v`` with ``s = 1``."""
    return torch.where(s < 0.5, x + s * (v - x), v - (1.0 - s) * (v - x))


def set_feature(
    x: torch.Tensor, d: torch.Tensor, s: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Return ``x + s (low - high) d``: a change of a feature's activation from ``high`` to ``low``."""
    return x + s * (low - high) * d


def activation(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return the activation of a feature ``[n, 1]``: ``x.w + bias`` if that is above ``threshold``, otherwise 0."""
    before = (x * w).sum(-1, keepdim=True) + bias
    return torch.where(before > threshold, before, 0.0)


def condition_factor(
    score: torch.Tensor, threshold: torch.Tensor, sign: torch.Tensor, sharpness: torch.Tensor
) -> torch.Tensor:
    """Return the factor of a condition, float32: 0 or 1, or a sigmoid of the distance if ``sharpness`` is not 0."""
    distance = sign * (score - threshold)
    return torch.where(sharpness == 0, (distance > 0).float(), torch.sigmoid(sharpness * distance))


DEFINITIONS: dict[int, Definition] = {
    ops.ADD: add,
    ops.ADD_NORMED: add_normed,
    ops.ABLATE: ablate,
    ops.CLAMP: clamp,
    ops.REPLACE: replace,
    ops.REPLACE_AT: replace,
    ops.SET_AT: clamp,
    ops.FEATURE: set_feature,
}


def apply_tap(target: torch.Tensor, other: torch.Tensor | None, head: torch.Tensor, tables: Tables) -> None:
    """Run one site's instructions on the stream in place.

    The instructions of a token run in the order of its request. REPLACE_AT takes its vector from the operand of the
    token's position, and SET_AT the number that both bounds of a clamp have; they do nothing where the edit does not
    cover the position. MEASURE computes the activation that the next FEATURE changes.

    The stream of an edited token is written as a whole: ``target`` becomes the stream, rounded to the model's dtype,
    and ``other`` becomes zero. A change of ``target`` alone would be rounded again when the model adds the summands, by
    far more than the edit where ``other`` is large. A token that no edit changes is not written.

    CAPTURE stores the current stream in the arena, at ``token_base`` plus the instruction's index. READ records a
    product of the stream with a vector and GATE multiplies a recorded factor by a condition on a recorded value; both
    leave the records of replayed tokens unchanged. CAPTURE and READ use the stream rounded to the model's dtype, which
    is what the model goes on with. The strength of an edit is multiplied by the recorded factors that it names.

    Args:
        target: ``[tokens, hidden]`` in the model's dtype.
        other: The stream's second summand of the same shape, None if ``target`` is the whole stream.
        head: ``[rows + 1]`` int32, the first instruction of each row at this site, 0 for none. Item 0 is ignored, since
            row 0 has no instructions.
        tables: The rank's device tables.
    """
    row = tables.token_row[: target.shape[0]].long()
    current = torch.where(row != 0, head[row].long(), 0)
    touched = current.nonzero().squeeze(1)
    if touched.numel() == 0:
        return
    stream = target[touched].float()
    if other is not None:
        stream = stream + other[touched].float()
    edited = torch.zeros_like(touched, dtype=torch.bool)
    measured = torch.zeros(touched.numel(), 1, device=target.device)
    current = current[touched]
    base = tables.token_base[touched]
    while True:
        active = current.nonzero().squeeze(1)
        if active.numel() == 0:
            break
        record = tables.instruction[current[active]]
        numbers = tables.parameter[current[active]]
        x = stream[active]
        new = x.clone()
        measures = (record[:, 0] == ops.MEASURE).nonzero().squeeze(1)
        if measures.numel():
            w = tables.vector[record[measures, 1].long()]
            measured[active[measures]] = activation(x[measures], w, numbers[measures, 1:2], numbers[measures, 2:3])
        for code, definition in DEFINITIONS.items():
            of_kind = (record[:, 0] == code).nonzero().squeeze(1)
            if of_kind.numel():
                if code in (ops.REPLACE_AT, ops.SET_AT):
                    operand = _operands(tables, touched[active[of_kind]], numbers[of_kind, 3])
                    covered = operand != NO_OPERAND
                    of_kind, operand = of_kind[covered], operand[covered]
                which = operand if code == ops.REPLACE_AT else record[of_kind, 1]
                v = tables.vector[which.long()]
                s, low, high = (numbers[of_kind, i : i + 1] for i in range(3))
                if code == ops.SET_AT:
                    low = high = operand.view(torch.float32).unsqueeze(1)
                if code == ops.FEATURE:
                    high = measured[active[of_kind]]
                if tables.num_recorded:
                    s = s * _factors(tables, touched[active[of_kind]], record[of_kind, 3])
                new[of_kind] = definition(x[of_kind], v, s, low, high)
        edited[active] |= ((new != x) & ~(new.isnan() & x.isnan())).any(-1)
        rounded = x.to(target.dtype).float()
        stored = (record[:, 0] == ops.CAPTURE).nonzero().squeeze(1)
        if stored.numel():
            place = base[active[stored]] + record[stored, 1]
            inside = place < tables.arena.shape[0]
            tables.arena[place[inside]] = rounded[stored[inside]].to(tables.arena.dtype)
        if tables.num_recorded:
            _read_and_gate(tables, rounded, touched[active], record, numbers)
        stream = stream.index_copy(0, active, new)
        current = current.index_copy(0, active, record[:, 2].long())
    written = touched[edited]
    target[written] = stream[edited].to(target.dtype)
    if other is not None:
        other[written] = 0


def _operands(tables: Tables, token: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return the operand of each token in the run that starts at ``first``, int32 ``[n]``."""
    return tables.operand[first.long() + tables.token_offset[token].long()]


def _factors(tables: Tables, token: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the product of the recorded factors of edits, ``[n, 1]``; 1 for edits without any."""
    factor = torch.ones(token.shape[0], device=columns.device)
    for column in (columns & 0xFFFF, columns >> 16):
        factor = factor * torch.where(column != 0, tables.record[token, column.long()], 1.0)
    return factor.unsqueeze(1)


def _read_and_gate(
    tables: Tables, x: torch.Tensor, token: torch.Tensor, record: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Run the READ and GATE instructions among those of some tokens.

    READ records ``x.w + bias``; with 2 in its form, ``x.w / (||x|| ||w||) + bias``; with 1, the sigmoid of that.

    Args:
        tables: The rank's device tables.
        x: ``[n, hidden]`` float32, the rounded stream.
        token: ``[n]`` indices of the tokens.
        record: ``[n, 4]``, the instructions.
        numbers: ``[n, 4]``, their parameters.
    """
    computed = tables.replayed[token] == 0
    reads = ((record[:, 0] == ops.READ) & computed).nonzero().squeeze(1)
    if reads.numel():
        w, form = tables.vector[record[reads, 1].long()], numbers[reads, 1]
        score = (x[reads] * w).sum(-1)
        length = torch.linalg.vector_norm(x[reads], dim=-1) * torch.linalg.vector_norm(w, dim=-1)
        score = torch.where(form >= 2, torch.where(length == 0, 0.0, score / length), score) + numbers[reads, 0]
        score = torch.where(form % 2 != 0, torch.sigmoid(score), score)
        tables.record[token[reads], record[reads, 3].long()] = score
    gates = ((record[:, 0] == ops.GATE) & computed).nonzero().squeeze(1)
    if gates.numel():
        rows, columns = token[gates], record[gates, 3].long()
        factor = condition_factor(tables.record[rows, columns & 0xFFFF], *numbers[gates, :3].unbind(1))
        tables.record[rows, columns >> 16] *= factor
