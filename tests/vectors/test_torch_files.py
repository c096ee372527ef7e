# SPDX-License-Identifier: Apache-2.0
"""Files of ``torch.save``: tensors are read as torch has them, and all other pickles are refused."""

from __future__ import annotations

import io
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vectors.files import V, pt, zip_entry, zipped
from vllm_steer.errors import SteeringError
from vllm_steer.vectors import Choice, read_vectors, torch_file
from vllm_steer.vectors.containers import MAX_TENSORS, open_container

T = torch.from_numpy(V.copy())
ROWS = torch.stack([T + row for row in range(5)])
TENSORS: dict[str, Any] = {
    "float32": T,
    "float16": T.half(),
    "bfloat16": T.bfloat16(),
    "float64": T.double(),
    "a row of a larger tensor": ROWS[3],
    "a column": ROWS[:, 2],
    "every second number": T[::2],
    "a transposed matrix": ROWS.T,
    "one number in memory": T[:1].expand(8).clone()[:1],
    "a parameter": torch.nn.Parameter(T),
    "with a gradient": T.clone().requires_grad_(),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_read_as_they_were_saved(case: str) -> None:
    """Catches numbers of another place, type or order than torch's."""
    tensor = TENSORS[case]
    expected = tensor.detach().float().numpy()
    np.testing.assert_array_equal(np.float32(open_container(pt(tensor)).content), expected)
    for content in ({"a": tensor, 7: tensor.clone()}, OrderedDict(a=tensor), {"a": tensor.clone(), "b": tensor}):
        found = open_container(pt(content)).content
        assert found.keys() == {str(key) for key in content}
        for array in found.values():
            np.testing.assert_array_equal(np.float32(array), expected)


@pytest.mark.parametrize(
    ("content", "choice", "expected"),
    [
        (T, Choice(layers=(13,), point="post_block"), {("post_block", 13): T}),
        (ROWS, Choice("hidden-states", (0, 2)), {("post_block", 0): ROWS[1], ("post_block", 2): ROWS[3]}),
        ({4: T, 9: -T}, Choice(point="post_block"), {("post_block", 4): T, ("post_block", 9): -T}),
        ({"layers.4": T}, Choice(), {("post_block", 4): T}),
        ({"direction": T[None]}, Choice(layers=(2,), point="pre_attn"), {("pre_attn", 2): T}),
    ],
    ids=["CAA", "persona_vectors", "steering-vectors", "names", "a named vector"],
)
def test_vectors_of_other_libraries(content: Any, choice: Choice, expected: dict[Any, torch.Tensor]) -> None:
    """Catches a vector of another layer than the library's."""
    found = read_vectors(pt(content), choice).vectors
    assert {site: vector.tolist() for site, vector in found.items()} == {s: v.tolist() for s, v in expected.items()}


class Saved:
    """An object with a tensor."""

    def __init__(self) -> None:
        self.tensor = T


def archive(*pickles: bytes, numbers: bytes = V.tobytes(), **members: bytes) -> bytes:
    """Return a file of torch with any pickle, and numbers for its tensors."""
    entries = [zip_entry(f"a{n or ''}/data.pkl", each) for n, each in enumerate(pickles)]
    return zipped(*entries, zip_entry("a/data/0", numbers), *(zip_entry(f"a/{n}", d) for n, d in members.items()))


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def view(offset: int = 0, size: int = 8, step: int = 1, key: str = "0", kind: str = "Float", stored: int = 8) -> bytes:
    """Return the instructions of a vector."""
    name = f"ctorch\n{kind}Storage\n".encode()
    storage = b"(" + text("storage") + name + text(key) + text("cpu") + number(stored) + b"tQ"
    shape = number(size) + b"\x85" + number(step) + b"\x85"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + b"\x89N" + b"tR"


def items(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\x80\x02}(" + b"".join(map(b"".join, pairs)) + b"u."


NEGATED = torch.complex(torch.zeros(8), torch.arange(8.0)).conj().imag
"""A tensor whose numbers are stored with the other sign."""
REFUSED: dict[str, tuple[bytes, str]] = {
    "a call": (archive(b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R."), "would call 'os system'"),
    "a call of torch": (archive(b"\x80\x02ctorch.hub\nload\n)R."), "would call 'torch.hub load'"),
    "a call of a value": (archive(b"\x80\x02" + text("x") + b")R."), "would call"),
    "a module": (archive(b"\x80\x02cantigravity\nfly\n)R."), "would call"),
    "an object": (pt(Saved()), "the pickle instruction NEWOBJ"),
    "a state of an object": (archive(b"\x80\x02ccollections\nOrderedDict\n)R}b."), "the pickle instruction BUILD"),
    "a name that a text makes": (archive(b"\x80\x04" + text("os") + text("system") + b"\x93."), "STACK_GLOBAL"),
    "an instance": (archive(b"\x80\x02(ios\nsystem\n."), "the pickle instruction INST"),
    "a list": (pt([T]), "the pickle instruction EMPTY_LIST"),
    "dictionaries in dictionaries": (pt({"a": {"b": T}}), "file.'a': is not a tensor"),
    "a number": (pt({"a": T, "b": 3}), "file.'b': is not a tensor but 3"),
    "integers": (pt(torch.arange(8)), "has numbers of the type 'torch LongStorage'"),
    "a number without dimensions": (pt(T[0]), "has shape []"),
    "three dimensions": (pt(ROWS[None]), "has a tensor of shape (1, 5, 8)"),
    "no numbers": (pt(T[:0]), "beyond its data"),
    "a name in two types": (pt({1: T, "1": T}), "the name of two tensors"),
    "a name twice": (archive(items((text("a"), view()), (text("a"), view()))), "two tensors with one name"),
    "a name of nested tuples": (archive(items((b")" + b"\x85" * 900, view()))), "not texts or integers"),
    "items of a tensor": (archive(b"\x80\x02" + view() + text("a") + number(1) + b"s."), "not texts or integers"),
    "a negated view": (pt(NEGATED), "metadata, such as a negated view"),
    "a negated view in a dictionary": (pt({"layers.1": NEGATED}), "metadata, such as a negated view"),
    "more numbers than stated": (archive(b"\x80\x02" + view() + b".", numbers=bytes(40)), "another size"),
    "numbers of another type": (archive(b"\x80\x02" + view(kind="Half") + b"."), "another size"),
    "numbers of two types": (
        archive(items((text("a"), view()), (text("b"), view(kind="Half", stored=16)))), "two types",
    ),
    "a short call": (archive(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + text("x") + b"\x85R."), "would call"),
    "many instructions": (archive(b"\x80\x02)" + b"\x85" * (1 << 16) + b"."), "over 65536 pickle instructions"),
    "values below a mark": (archive(b"\x80\x02" + text("a") + b"(" + view() + b"\x860."), "damaged"),
    "a value too many": (archive(b"\x80\x02N" + view() + b"."), "damaged"),
    "numbers beyond the data": (archive(b"\x80\x02" + view(offset=1) + b"."), "beyond its data"),
    "steps beyond the data": (archive(b"\x80\x02" + view(size=4, step=3) + b"."), "beyond its data"),
    "a negative offset": (archive(b"\x80\x02" + view(offset=-1) + b"."), "has a tensor of shape"),
    "a negative step": (archive(b"\x80\x02" + view(offset=7, step=-1) + b"."), "has a tensor of shape"),
    "a number that is repeated": (archive(b"\x80\x02" + view(size=1 << 30, step=0) + b"."), "fewer numbers"),
    "numbers that are shared": (
        archive(items(*((number(n), view(size=8000, stored=8000)) for n in range(9))), numbers=bytes(32000)),
        "fewer numbers",
    ),
    "numbers of another member": (archive(b"\x80\x02" + view(key="../a/data.pkl") + b"."), "damaged"),
    "numbers that are missing": (archive(b"\x80\x02" + view(key="1") + b"."), "damaged"),
    "numbers as a call": (archive(b"\x80\x02cos\nsystem\nQ."), "damaged"),
    "an empty stack": (archive(b"\x80\x02R."), "damaged"),
    "nothing": (archive(b"\x80\x02."), "damaged"),
    "no mark": (archive(b"\x80\x02t."), "damaged"),
    "a place without a value": (archive(b"\x80\x02h\x07."), "damaged"),
    "no end": (archive(b"\x80\x02" + view()), "damaged"),
    "two pickles": (archive(b"\x80\x02N.", b"\x80\x02N."), "damaged"),
    "a long pickle": (archive(b"\x80\x02" + b"N" * (1 << 20) + b"."), "at most 1048576 are read"),
    "many tensors": (archive(items(*((number(n), b"N") for n in range(MAX_TENSORS + 1)))), "8193 tensors; at most"),
    "big-endian numbers": (archive(b"\x80\x02" + view() + b".", byteorder=b"big"), "big-endian"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    """Catches code that runs, memory beyond the size of a file, and other errors than `SteeringError`."""
    data, words = REFUSED[case]
    before = set(sys.modules)
    with pytest.raises(SteeringError) as refused:
        open_container(data)
    assert words in str(refused.value)
    assert "antigravity" not in set(sys.modules) - before


def test_older_files_are_refused() -> None:
    """Catches a file without an archive, whose pickles name their numbers by place, that is read in part."""
    file = io.BytesIO()
    torch.save(T, file, _use_new_zipfile_serialization=False)
    with pytest.raises(SteeringError, match="is a pickle, and nothing is unpickled; save a tensor"):
        open_container(file.getvalue())


def test_stored_numbers_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches many views of one large storage, each of which converts all of it."""
    converted: list[int] = []
    real = torch_file.from_bytes
    monkeypatch.setattr(torch_file, "from_bytes", lambda raw, dtype: converted.append(len(raw)) or real(raw, dtype))
    many = torch.ones(1000, 8, dtype=torch.bfloat16)
    found = open_container(pt({str(n): many[n] for n in range(1000)})).content
    assert (len(found), sum(converted)) == (1000, 16000)


def test_a_view_does_not_widen_its_storage() -> None:
    """Catches a small vector in a large storage of a narrow type that takes several times the memory of the file."""
    data = pt(torch.ones(1 << 23, dtype=torch.bfloat16)[:8])
    tracemalloc.start()
    found = open_container(data).content
    assert tracemalloc.get_traced_memory()[1] < 1.5 * len(data)
    tracemalloc.stop()
    assert found.tolist() == [1.0] * 8


def test_long_names_of_files() -> None:
    """Catches a file whose archive has a long name inside, which is taken for one of NumPy."""
    data = pt(T)
    stem = data[30 : data.index(b"/data.pkl")]
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.namelist():
            new.writestr(member.replace(stem.decode(), "v" * 240), old.read(member))
    assert open_container(file.getvalue()).content.tolist() == T.tolist()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_pickles_raise_only_steering_errors(data: st.DataObject) -> None:
    """Catches a changed, removed or added instruction that raises anything else."""
    pickled = bytearray(items((text("layers.1"), view()), (text("layers.2"), view(size=2, step=3))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(pickled) - 1))
        pickled[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        found = read_vectors(archive(bytes(pickled)))
    except SteeringError:
        return
    assert all(vector.size for vector in found.vectors.values())
