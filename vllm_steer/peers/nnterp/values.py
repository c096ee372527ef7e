# SPDX-License-Identifier: Apache-2.0
"""Values of a trace: tensors that exist once it has run. Saved values then take part in torch's functions."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.peers.nnterp.trace import Invoke

MAX_LINE = 120
"""Most characters of a line of code in an error message."""


def refuse(problem: str) -> NoReturn:
    """Raise SteeringError with the line of the caller's code."""
    package = __name__.rpartition(".")[0]
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith((package, "torch", "contextlib")):
        frame = frame.f_back
    if frame is None:
        raise SteeringError("trace", problem)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    where = ": ".join(filter(None, (f"line {frame.f_lineno}", line[:MAX_LINE])))  # a typed line may have no source
    raise SteeringError("trace", f"{where}: {problem}")


class Value:
    """A tensor that exists once the trace has run."""

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        """The tensor.

        Raises:
            SteeringError: The trace has not run, or the value was not saved.
        """
        if self._value is None:
            refuse("the value exists after the trace, if it was saved with save() and its step has run")
        return self._value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*tensor_of(args), **tensor_of(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._value is None:
            refuse(f"{name} is not an operation of a trace; save the value with save(), and use {name} after the trace")
        return getattr(self.value, name)

    def _compute(self, name: str, *args: Any) -> Any:
        return getattr(self.value, name)(*tensor_of(args))

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self._compute("__eq__", other)

    def __getitem__(self, index: Any) -> Any:
        return self._compute("__getitem__", index)

    def __len__(self) -> int:
        return int(self._compute("__len__"))

    def __bool__(self) -> bool:
        return bool(self._compute("__bool__"))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value.__array__(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: Value, *args: Any) -> Any:
        return self._compute(name, *args)

    return operate


# Python finds operators on the class, not through `__getattr__`.
for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "ne", "lt", "le", "gt", "ge",
    "neg", "abs",
):  # fmt: skip
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


def tensor_of(value: Any) -> Any:
    """Return the tensor of a saved value, containers with the tensors of saved values, and other objects unchanged."""
    if isinstance(value, Value):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(tensor_of, value))
    if type(value) is dict:
        return {name: tensor_of(each) for name, each in value.items()}
    return value


class Result(Value):
    """Tokens of the prompt and generated tokens, ``[1, tokens]``."""

    def __init__(self, invoke: Invoke) -> None:
        super().__init__()
        self._invoke = invoke

    def save(self) -> Result:
        """Keep the tokens."""
        self._invoke.results.append(self)
        return self


class Probabilities(Value):
    """Probabilities of the token that a step samples, ``[1, vocab]``."""

    def __init__(self, invoke: Invoke, step: int = 0) -> None:
        super().__init__()
        self._invoke, self.step = invoke, step

    def save(self) -> Probabilities:
        """Keep the probabilities."""
        self._invoke.probs.append(self)
        return self

    def take(self, log_probabilities: torch.Tensor) -> None:
        """Set the value from the step's log-probabilities ``[vocab]``."""
        self._value = log_probabilities.exp()[None]


class LogProbabilities(Probabilities):
    """Log-probabilities of the token that a step samples, ``[1, 1, vocab]``: logits that differ by a constant."""

    def take(self, log_probabilities: torch.Tensor) -> None:
        """Set the value from the step's log-probabilities ``[vocab]``."""
        self._value = log_probabilities[None, None]
