# SPDX-License-Identifier: Apache-2.0
"""Reader of the tensors in ``.pt`` files, which unpickles nothing.

:mod:`pickletools` divides the pickle in such a file into its instructions. Those that describe a tensor, or a
dictionary of tensors, are followed here; all others are refused. Names in the file are only compared with the few names
of torch that such a pickle has: nothing is imported, and nothing is called.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import is_integer, shown, shown_name
from vllm_steer.request.vector import PACKED_DTYPES, from_bytes

_MAX_PICKLE_BYTES, _MAX_INSTRUCTIONS = 1 << 20, 1 << 16
"""A tensor takes 150 bytes and 35 instructions."""
SAVE_HINT = "save a tensor, or a dictionary of tensors, with torch.save or safetensors.torch.save_file"
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "torch FloatStorage": PACKED_DTYPES["float32"],
        "torch HalfStorage": PACKED_DTYPES["float16"],
        "torch BFloat16Storage": PACKED_DTYPES["bfloat16"],
        "torch DoubleStorage": PACKED_DTYPES["float64"],
    }
)
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()})
_VALUES = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"))
_TAKEN: Mapping[str, int | None] = MappingProxyType(
    {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "SETITEM": 2, "SETITEMS": None, "REDUCE": 2, "BINPERSID": 1}
)
"""Values that an instruction takes from the stack; None for those above the last mark."""
_STORAGE_ITEMS, _TENSOR_ITEMS = 5, 6
"""Items of a persistent id, and of the arguments for a tensor; a seventh argument has metadata."""


@dataclass(frozen=True)
class _Name:
    """A name that unpickling would import."""

    text: str


@dataclass(frozen=True)
class _Storage:
    """Numbers that a member of the archive has."""

    key: str
    dtype: np.dtype[Any]
    size: int


@dataclass(frozen=True)
class _View:
    """A tensor: a view of stored numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, member: bytes) -> np.ndarray:
        """Return the tensor, given the member of the archive that has its storage."""
        dtype = self.storage.dtype
        if len(member) != self.storage.size * dtype.itemsize:
            raise ValueError("a storage has another size than it states")
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if not math.prod(self.shape) or last >= self.storage.size:
            raise ValueError("a tensor is beyond its data")
        # The view is copied before its type is changed: a storage can be much larger.
        numbers, steps = np.frombuffer(member, dtype)[self.offset :], [step * dtype.itemsize for step in self.strides]
        view = np.lib.stride_tricks.as_strided(numbers, self.shape, steps, writeable=False)
        return from_bytes(view.tobytes(), dtype).reshape(self.shape)


def read_tensors(members: Mapping[str, bytes], max_tensors: int) -> np.ndarray | dict[str, np.ndarray]:
    """Return the tensor, or the tensors by name, in the members of an archive that ``torch.save`` wrote.

    Raises:
        SteeringError: The file has something else, or more than ``max_tensors``.
        ValueError: It is damaged. Also `LookupError` and `TypeError`.
    """
    (pickled,) = (name for name in members if name.rpartition("/")[2] == "data.pkl")
    folder = pickled.removesuffix("data.pkl")
    if members.get(f"{folder}byteorder", b"little") != b"little":
        raise SteeringError("file", f"has big-endian numbers; {SAVE_HINT} on another machine")
    content = _follow(members[pickled])
    views = content if isinstance(content, dict) else {"vector": content}
    if len(views) > max_tensors:
        raise SteeringError("file", f"has {len(views)} tensors; at most {max_tensors} are read")
    types: dict[str, np.dtype[Any]] = {}
    tensors: dict[str, np.ndarray] = {}
    left = sum(map(len, members.values()))  # a tensor can repeat its numbers, and tensors can share them
    for name, view in views.items():
        if not isinstance(view, _View):
            raise SteeringError(f"file.{shown(name)}", f"is not a tensor but {shown(view)}; {SAVE_HINT}")
        if str(name) in tensors:
            raise SteeringError(f"file.{shown(name)}", "is the name of two tensors; rename one of them")
        left -= math.prod(view.shape) * view.storage.dtype.itemsize
        if left < 0:
            raise SteeringError(shown_name(str(name)), f"has shape {shown(view.shape)}; the file has fewer numbers")
        if types.setdefault(view.storage.key, view.storage.dtype) is not view.storage.dtype:
            raise ValueError("a storage has two types")
        tensors[str(name)] = view.read(members[f"{folder}data/{view.storage.key}"])
    return tensors if isinstance(content, dict) else tensors["vector"]


def _follow(pickled: bytes) -> Any:
    """Return what a pickle describes: views, and dictionaries, tuples, numbers and texts."""
    if len(pickled) > _MAX_PICKLE_BYTES:
        raise SteeringError("file", f"has a pickle of {len(pickled)} bytes; at most {_MAX_PICKLE_BYTES} are read")
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        code, taken = opcode.name, list[Any]()
        if number >= _MAX_INSTRUCTIONS:
            raise SteeringError("file", f"has over {_MAX_INSTRUCTIONS} pickle instructions; save fewer tensors")
        if code in _TAKEN:
            count = _TAKEN[code]
            at = marks.pop() if count is None else len(stack) - count
            if at < (marks[-1] if marks else 0):
                raise ValueError("an instruction takes values that are not there")
            taken, stack[at:] = stack[at:], []
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _VALUES:
            stack.append(argument)
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code.startswith("TUPLE"):
            stack.append(tuple(taken))
        elif code.startswith("SETITEM"):
            _set_items(stack[-1], taken)
        elif code == "MARK":
            marks.append(len(stack))
        elif code == "GLOBAL":
            stack.append(_Name(argument))
        elif code == "BINPERSID":
            stack.append(_storage(*taken[0]))
        elif code == "REDUCE":
            stack.append(_built(*taken))
        elif code in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code == "STOP":
            (content,) = stack
            return content
        elif code != "PROTO":
            raise SteeringError("file", f"has the pickle instruction {code}, and only tensors are read; {SAVE_HINT}")
    raise ValueError("the pickle has no end")


def _set_items(target: Any, items: list[Any]) -> None:
    # Hashing nested tuples has no bound.
    if not isinstance(target, dict) or not all(isinstance(key, str) or is_integer(key) for key in items[::2]):
        raise SteeringError("file", f"has names that are not texts or integers; {SAVE_HINT}")
    before = len(target)
    target.update(zip(items[::2], items[1::2], strict=True))
    if len(target) != before + len(items) // 2:
        raise SteeringError("file", "has two tensors with one name; rename one of them")


def _storage(*items: object) -> _Storage:
    """Return the numbers that a persistent id names."""
    if len(items) != _STORAGE_ITEMS:
        raise ValueError("a persistent id has another number of items")
    kind, storage, key, _, size = items
    name = storage.text if isinstance(storage, _Name) else shown(storage)
    if kind != "storage" or name not in _DTYPES or not isinstance(key, str) or not is_integer(size):
        raise SteeringError("file", f"has numbers of the type {shown(name)}; {SAVE_HINT}, as float32")
    return _Storage(key, _DTYPES[name], size)


def _built(function: object, arguments: Any) -> Any:
    """Return what a call in a pickle stands for."""
    name = function.text if isinstance(function, _Name) else shown(function)
    match name, arguments:
        case "torch._utils _rebuild_tensor_v2", (_Storage() as storage, offset, tuple(shape), tuple(strides), *rest):
            if len(arguments) != _TENSOR_ITEMS or rest[1]:
                problem = "with metadata, such as a negated view; save vector.clone() in its place"
                raise SteeringError("file", f"has a tensor {problem}")
            if len(shape) == len(strides) <= 2 and all(is_integer(n) and n >= 0 for n in (offset, *shape, *strides)):
                return _View(storage, offset, shape, strides)
            raise SteeringError("file", f"has a tensor of shape {shown(shape)}; a vector is [H], vectors are [n, H]")
        case "torch._utils _rebuild_parameter", (_View() as view, _, hooks) if not hooks:
            return view
        case "collections OrderedDict", ():
            return {}
    raise SteeringError("file", f"would call {shown(name)}, and nothing in a file is run; {SAVE_HINT}")
