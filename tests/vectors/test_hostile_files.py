# SPDX-License-Identifier: Apache-2.0
"""Vector files that are built to fill the memory, to take long, to crash the reader or to be read in two ways."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile

import gguf
import numpy as np
import pytest
from safetensors.numpy import save

from tests.vectors.files import (
    V,
    control_vector,
    entry_at,
    moved_tensor,
    npy,
    npz,
    number_tensor,
    overlapping,
    patched,
    renamed,
    zip_entry,
    zipped,
)
from vllm_steer.errors import SteeringError
from vllm_steer.registry.vector_files import read_vector_file
from vllm_steer.vectors import Choice
from vllm_steer.vectors.containers import MAX_TENSORS

VECTOR = {"modelId": "gpt2", "source": "x", "hookName": "blocks.2.hook_resid_post", "values": V.tolist()}
REFUSED: dict[str, tuple[bytes, Choice, str]] = {
    "an endless list in GGUF": (
        b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
        + (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + bytes(4) + (1 << 60).to_bytes(8, "little"),
        Choice(), "cut off",
    ),
    "an unknown version": (npy(V).replace(b"NUMPY\1", b"NUMPY\x09"), Choice(), "damaged"),
    "an array in place of a count": (
        control_vector({"direction.1": V}, count=gguf.GGUFValueType.ARRAY), Choice(), "is of the type ARRAY",
    ),
    "a signed count": (control_vector({"direction.1": V}, count=gguf.GGUFValueType.INT64), Choice(), "--format"),
    "big-endian numbers in GGUF": (
        control_vector({"direction.1": V}, endianess=gguf.GGUFEndian.BIG), Choice(), "gguf-convert-endian",
    ),
    "tensors that share their data in GGUF": (moved_tensor(0), Choice(), "share bytes"),
    "a tensor in the header of GGUF": (moved_tensor((1 << 64) - 64), Choice(), "outside of the data"),
    "an array that is a number": (npy(np.float32(1)), Choice(layers=(1,), point="post_block"), "has shape []"),
    "an array in an archive that is a number": (npz(**{"layers.1": np.float32(1)}), Choice(), "has shape []"),
    "a tensor that is a number": (save({"layers.1": np.array(1, np.float32)}), Choice(), "layers.1: has shape []"),
    "a tensor that is a number in GGUF": (number_tensor(), Choice(), "direction.1: has shape []"),
    "two members with one name": (zipped(*[zip_entry("layers.1.npy")] * 2), Choice(), "two members"),
    "two arrays with one name": (zipped(zip_entry("layers.1"), zip_entry("layers.1.npy")), Choice(), "two arrays"),
    "members that share their data": (overlapping(), Choice(), "share bytes"),
    "a member with two names": (renamed("layers.1.npy", "layers.2.npy"), Choice(), "has two names"),
    "bzip2 in an archive": (zipped(zip_entry("layers.1.npy", method=zipfile.ZIP_BZIP2)), Choice(), "than deflate"),
    "LZMA in an archive": (zipped(zip_entry("layers.1.npy", method=zipfile.ZIP_LZMA)), Choice(), "than deflate"),
    "a header of an array with a key twice": (
        npy(V).replace(b"'shape': (8,), ", b"'shape': (1,), 'shape': (8,), ").replace(b" " * 15 + b"\n", b"\n"),
        Choice(layers=(1,), point="post_block"), "a repeated key",
    ),
    "JSON with another layer in its hook": (
        json.dumps({**VECTOR, "hookType": "hook_resid_post", "layerNumber": 3}).encode(), Choice(), "another site",
    ),
    "JSON with a layer that is no number": (json.dumps({**VECTOR, "layerNumber": True}).encode(), Choice(), "must be"),
    "JSON with another layer": (json.dumps({**VECTOR, "layerNumber": 3}).encode(), Choice(), "another site"),
    "JSON with two vectors": (json.dumps({**VECTOR, "vector": [1.0]}).encode(), Choice(), "values and vector"),
    "JSON with half of a character": (json.dumps(VECTOR).encode()[:-1] + b', "x": "\xed\xa0\x80"}', Choice(), "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    """Catches other errors than `SteeringError`, memory beyond the size of a file, and a silent choice of a reading."""
    data, choice, words = REFUSED[case]
    with pytest.raises(SteeringError) as refused:
        read_vector_file(data, choice)
    assert words in str(refused.value)


def test_an_archive_is_not_decompressed_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a small archive or file that fills the memory."""
    monkeypatch.setattr("vllm_steer.vectors.containers.MAX_FILE_BYTES", 1 << 20)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("layers.1.npy", npy(np.zeros(1 << 20, np.float32)))
    for data in (file.getvalue(), npy(np.zeros(1 << 20, np.float32))):
        with pytest.raises(SteeringError, match="at most"):
            read_vector_file(data)


def test_an_archive_expands_in_proportion_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches uploads that take a thousand times their size, and entries that are counted after they are read."""
    monkeypatch.setattr("vllm_steer.vectors.containers._EXPANDED_BYTES", 1 << 10)
    file, many = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("layers.1.npy", npy(np.zeros(1 << 20, np.float32)))
    with pytest.raises(SteeringError, match="after decompression"):
        read_vector_file(file.getvalue())
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(MAX_TENSORS + 9):
            archive.writestr(f"{number}.npy", b"")
    monkeypatch.setattr("vllm_steer.vectors.archive._read_entry", None)
    with pytest.raises(SteeringError, match="tensors; at most"):
        read_vector_file(many.getvalue())


@pytest.mark.parametrize("stated", [100, 1 << 20])
def test_a_member_yields_no_more_than_it_states(stated: int) -> None:
    """Catches a member that states a small size and fills the memory, before its size is compared."""
    data = zipped(zip_entry("layers.1.npy", bytes(1 << 26), zipfile.ZIP_DEFLATED))
    lying = patched(data, entry_at(data, 0) + 24, stated)
    tracemalloc.start()
    with pytest.raises(SteeringError, match="another size"):
        read_vector_file(lying)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_json_is_parsed_once_and_counted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that is parsed twice, and one of millions of lists, keys or texts that is parsed at all."""
    parsed: list[int] = []
    monkeypatch.setattr(
        "json.loads", lambda text, load=json.loads, **rest: parsed.append(len(text)) or load(text, **rest)
    )
    body = {"base": {"pre_attn": {"1": V.tolist()}}}
    for data in (json.dumps(VECTOR).encode(), json.dumps(body).encode(), save({"layers.5": V})):
        parsed.clear()
        read_vector_file(data)
        assert len(parsed) == 1
    monkeypatch.setattr("vllm_steer.request.scalars.MAX_JSON_VALUES", 11)
    parsed.clear()
    keys = b",".join(b'"%d":0' % n for n in range(11))
    for many in (b'{"a":[' + b"[]," * 8 + b"[]]}", b"{%b}" % keys, b'{"a":["","","","","","","","","",""]}'):
        with pytest.raises(SteeringError, match=r"1[23] objects, lists and texts"):
            read_vector_file(many)
    assert not parsed
