# SPDX-License-Identifier: Apache-2.0
"""Traces: reads and writes of sites, recorded in a context and compiled to captures and edits of requests.

Nothing of the caller's code runs in the engine. Code that cannot be compiled raises a SteeringError with its line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vllm_steer import Edit
from vllm_steer.adapters import is_integer
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import hooks_of, rows_of
from vllm_steer.peers.nnterp.values import Probabilities, Result, Value, refuse, tensor_of

if TYPE_CHECKING:
    from vllm_steer.peers.nnterp.model import StandardizedTransformer

EVERYTHING = slice(None)
_ROW_FIELDS = frozenset(("invoke", "point", "layer", "step", "index"))


@dataclass(eq=False)
class Invoke:
    """One prompt of a trace, with what is read and written."""

    tokens: list[int]
    num_steps: int = 1
    """Most forward passes: one of the prompt, and one of each generated token but the last."""
    reads: list[Rows] = field(default_factory=list)
    writes: list[tuple[str, Rows, Any]] = field(default_factory=list)
    """Kind, the rows that are written, and the value."""
    probs: list[Probabilities] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    closed: bool = False
    """Whether the trace has ended, so that writes have no effect."""

    @property
    def sources(self) -> set[int]:
        """Identities of the invokes whose rows are written here."""
        rows = [value for _, _, value in self.writes if isinstance(value, Rows)]
        return {id(value.invoke) for value in rows if value._value is None}


class Rows(Value):
    """Rows of one site in one step of an invoke, as a tensor ``[1, tokens, hidden]`` or a part of it."""

    def __init__(self, invoke: Invoke, point: Any, layer: int, step: int, index: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.invoke, self.point, self.layer, self.step, self.index = invoke, point, layer, step, index

    @property
    def span(self) -> range:
        """Positions of the step's tokens."""
        count = len(self.invoke.tokens)
        return range(count) if self.step == 0 else range(count + self.step - 1, count + self.step)

    def save(self) -> Rows:
        """Keep the rows, as they are after all writes."""
        self.invoke.reads.append(self)
        return self

    def __getitem__(self, index: Any) -> Any:
        if self._value is not None:
            return self._value[index]
        if self.index:
            refuse("rows are indexed once, as in [:, -1]")
        index = index if isinstance(index, tuple) else (index,)
        positions_of(index, len(self.span))
        return Rows(self.invoke, self.point, self.layer, self.step, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._value is not None:
            self._value[index] = tensor_of(value)
        else:
            self[index].assign(value)

    def __iadd__(self, value: Any) -> Rows:
        return self._change(operator.iadd, "add", value)

    def __isub__(self, value: Any) -> Rows:
        return self._change(operator.isub, "subtract", value)

    def __imul__(self, value: Any) -> Rows:
        return self._change(operator.imul, "scale", value)

    def _change(self, change: Callable[[Any, Any], Any], kind: str, value: Any) -> Rows:
        """Change saved rows in place, or record the write."""
        if self._value is not None:
            self._value = change(self._value, tensor_of(value))
            return self
        if kind == "scale" and not isinstance(value, (int, float)):
            refuse("rows are multiplied by a number")
        self._write(kind, float(value) if kind == "scale" else value)
        return self

    def assign(self, value: Any) -> None:
        """Write rows within the trace; ``rows += vector`` ends with the assignment of the rows to themselves."""
        if not self._is_same(value):
            self._write("replace", value)

    def _is_same(self, value: Any) -> bool:
        return (
            isinstance(value, Rows)
            and value.invoke is self.invoke
            and (value.point, value.layer, value.step) == (self.point, self.layer, self.step)
            and positions_of(value.index, len(value.span)) == positions_of(self.index, len(self.span))
        )

    def _write(self, kind: str, value: Any) -> None:
        if self.invoke.closed:
            refuse("the trace has ended, and these rows have no value: they were not saved, or their step has not run")
        if isinstance(value, Rows):
            if value.invoke is self.invoke:
                refuse("rows of the same invoke cannot be written to other tokens or sites in it; use another invoke")
            value.save()
        elif kind != "scale" and not isinstance(value, torch.Tensor):
            refuse("the value must be a tensor, or rows of an earlier invoke")
        # A copy, since later lines may change the tensor in place.
        self.invoke.writes.append((kind, self, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _ROW_FIELDS:
            refuse(f"{name} of rows cannot be assigned; write rows[:, tokens] = value")
        super().__setattr__(name, value)

    def _compute(self, name: str, *args: Any) -> Any:
        if self._value is None:
            refuse(
                "rows have no values within the trace; add a vector with += or -=, multiply by a number with *=, or "
                "compute with saved rows after it"
            )
        return super()._compute(name, *args)


class Sites:
    """Accessor of one point, such as ``model.layers_output``; indexed by layer."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer, self._name = tracer, name

    def __getitem__(self, layer: Any) -> Rows:
        (number,) = self._tracer.model.read_layers(layer, self._name)
        point = self._tracer.model.point_of(self._name, [number])
        return Rows(self._tracer.current(), point, number, self._tracer.step)

    def __setitem__(self, layer: Any, value: Any) -> None:
        self[layer].assign(value)


class Steps:
    """Steps of the open invoke, chosen by ``tracer.iter[...]``: iterable, and a context if there is only one."""

    def __init__(self, tracer: Tracer, chosen: range) -> None:
        self._tracer, self._chosen = tracer, chosen

    def __iter__(self) -> Iterator[int]:
        try:
            for step in self._chosen:
                self._tracer.step = step
                yield step
        finally:
            self._tracer.step = 0

    def __enter__(self) -> int:
        if len(self._chosen) != 1:
            refuse("a context has one step; write: for step in tracer.iter[...]")
        self._tracer.step = self._chosen[0]
        return self._tracer.step

    def __exit__(self, *error: object) -> None:
        self._tracer.step = 0


class StepChoice:
    """``tracer.iter``: chooses steps by a number or a slice."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def __getitem__(self, index: Any) -> Steps:
        steps = range(self._tracer.current().num_steps)
        if isinstance(index, slice):
            return Steps(self._tracer, steps[index])
        if not is_integer(index):
            refuse("steps are chosen by a number or a slice")
        if index not in steps:
            refuse(f"the invoke has {len(steps)} steps; set max_new_tokens")
        return Steps(self._tracer, steps[index : index + 1])


def positions_of(index: tuple[Any, ...], count: int) -> range:
    """Return the positions that an index ``[batch, tokens]`` selects."""
    batch, tokens, *rest = (*index, EVERYTHING, EVERYTHING)[: max(2, len(index))]
    if rest or not (batch == EVERYTHING or (is_integer(batch) and batch in (0, -1))):
        refuse("rows are indexed by [:, tokens]; an invoke has one prompt, and parts of a row cannot be chosen")
    if is_integer(tokens):
        if not -count <= tokens < count:
            refuse(f"the prompt has {count} tokens")
        return range(tokens % count, tokens % count + 1)
    if not isinstance(tokens, slice):
        refuse("tokens are chosen by a number or a slice")
    chosen = range(count)[tokens]
    if not chosen or chosen.step < 0:
        refuse("the slice selects no tokens, or in descending order")
    return chosen


def edit_of(kind: str, rows: Rows, value: Any, width: int) -> Edit:
    """Return the edit of a write to rows of ``width`` components."""
    positions = [rows.span[i] for i in positions_of(rows.index, len(rows.span))]
    site_fields: dict[str, Any] = {"point": rows.point, "layers": rows.layer, "tokens": positions}
    if kind == "scale":
        return Edit(kind="replace", vector=torch.zeros(width), strength=1.0 - value, **site_fields)
    tensor = tensor_of(value).detach().float().cpu()
    if tensor.shape[-1:] != (width,):
        raise SteeringError("trace", f"a value of shape {list(tensor.shape)} was written to rows of width {width}")
    matrix = tensor.reshape(-1, tensor.shape[-1])
    if len(matrix) not in (1, len(positions)):
        raise SteeringError("trace", f"{len(matrix)} rows were written to {len(positions)} tokens")
    if kind == "replace":
        return Edit(kind="replace", vector=matrix if len(matrix) > 1 else matrix[0], **site_fields)
    if len(matrix) != 1:
        raise SteeringError("trace", "different rows are added; add one vector to a token at a time")
    return Edit(kind="add", vector=matrix[0], strength=-1.0 if kind == "subtract" else 1.0, **site_fields)


class Tracer:
    """A running trace."""

    def __init__(self, model: StandardizedTransformer, num_steps: int = 1) -> None:
        self.model = model
        self.num_steps = num_steps
        self.step = 0
        """Step of the reads and writes that follow."""
        self.invokes: list[Invoke] = []
        self._current: Invoke | None = None

    def current(self) -> Invoke:
        """Return the invoke whose context is open."""
        if self._current is None:
            refuse("sites are read and written within an invoke, or in a trace with a prompt")
        return self._current

    @contextmanager
    def invoke(self, prompt: Any) -> Iterator[None]:
        """Add a prompt; reads and writes in the context belong to it."""
        if self._current is not None:
            refuse("an invoke within an invoke, or in a trace with a prompt")
        if isinstance(prompt, (list, tuple)) and len(prompt) == 1 and not is_integer(prompt[0]):
            prompt = prompt[0]
        if isinstance(prompt, (list, tuple)) and not (prompt and is_integer(prompt[0])):
            refuse("an invoke has one prompt; use an invoke for each")
        self._current = Invoke(self.model.encode(prompt), self.num_steps)
        self.invokes.append(self._current)
        try:
            yield
        finally:
            self._current, self.step = None, 0

    @property
    def iter(self) -> StepChoice:
        """Steps of the open invoke: 0 forwards the prompt, and each other one the token that was sampled before."""
        return StepChoice(self)

    @property
    def result(self) -> Result:
        """Tokens of the open invoke, with the generated ones."""
        return Result(self.current())

    def stop(self) -> None:
        """Do nothing: the prompt is forwarded once in any case."""

    def close(self) -> None:
        """Refuse further writes."""
        for invoke in self.invokes:
            invoke.closed = True

    def run(self) -> None:
        """Run the prompts: those whose values are known in one batch, then those that depend on them."""
        waiting, done = list(self.invokes), set[int]()
        while waiting:
            ready = [invoke for invoke in waiting if invoke.sources <= done]
            if not ready:
                raise SteeringError("trace", "rows of another trace, which did not run, are written")
            self._run(ready)
            done |= {id(invoke) for invoke in ready}
            waiting = [invoke for invoke in waiting if id(invoke) not in done]

    def _run(self, invokes: list[Invoke]) -> None:
        params = []
        for invoke in invokes:
            hooks = hooks_of((rows.point, rows.layer) for rows in invoke.reads)
            edits = [edit_of(kind, rows, value, self.model.hidden_size) for kind, rows, value in invoke.writes]
            fields = self.model.all_logprobs() if invoke.probs else {}
            positions = "all" if any(rows.step for rows in invoke.reads) else "all_prompt"
            capture = {"hooks": hooks, "positions": positions} if hooks else None
            params.append(self.model.params(edits=edits, capture=capture, max_tokens=invoke.num_steps, **fields))
        for invoke, output in zip(invokes, self.model.run([each.tokens for each in invokes], params), strict=True):
            if invoke.reads:
                found = rows_of(output, "trace")
                for rows in invoke.reads:
                    tensor = found.tensor(rows.point, rows.layer)
                    if rows.span.stop <= len(tensor):  # generation may have ended before
                        # A copy, which later code may change in place.
                        rows._value = tensor[rows.span.start : rows.span.stop][None][rows.index].clone()
            tokens = output.outputs[0].token_ids
            for probs in invoke.probs:
                if probs.step < len(tokens):
                    probs.take(self.model.log_probabilities(output.outputs[0].logprobs, probs.step))
            for result in invoke.results:
                result._value = torch.tensor([[*invoke.tokens, *tokens]])
