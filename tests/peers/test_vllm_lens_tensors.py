# SPDX-License-Identifier: Apache-2.0
"""The JSON form of tensors in vllm-lens, and what reading many of them may take."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.peers.test_rhizonymph import changes_of
from vllm_steer import SteeringError
from vllm_steer.peers.vllm_lens import SteeringVector, decode_activations, deserialize_tensor, serialize_tensor
from vllm_steer.peers.vllm_lens.keys import read_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tensors_round_trip(dtype: torch.dtype, compression: str | None) -> None:
    """Catches bytes in another dtype or shape; bfloat16 travels as int16."""
    if compression:
        pytest.importorskip("zstandard")
    tensor = torch.randn(2, 3, 4).to(dtype)
    wire = json.loads(json.dumps(serialize_tensor(tensor, compression=compression)))
    assert wire["dtype"] == ("int16" if dtype is torch.bfloat16 else str(dtype)[6:])
    assert torch.equal(deserialize_tensor(wire), tensor)
    assert torch.equal(decode_activations({"residual_stream": wire})["residual_stream"], tensor)
    assert torch.equal(read_by_their_client(wire), tensor)


def read_by_their_client(wire: dict[str, Any], raw: bytes | None = None) -> torch.Tensor:
    """Return a tensor as the client of vllm-lens reads it, which compares the name of the dtype as a text."""
    raw = base64.b64decode(wire["data"]) if raw is None else raw
    if wire["compression"] == "zstd":
        import zstandard

        raw = zstandard.ZstdDecompressor().decompress(raw)
    tensor = torch.from_numpy(np.frombuffer(raw, np.dtype(wire["dtype"])).reshape(wire["shape"]).copy())
    if wire["original_dtype"] == "torch.bfloat16":
        return tensor.view(torch.bfloat16)
    return tensor.to(torch.float16) if wire["original_dtype"] == "torch.float16" else tensor


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.int64, torch.bool, torch.complex64])
def test_dtypes_that_the_form_lacks_are_refused(dtype: torch.dtype) -> None:
    """Catches a tensor that clients read as numbers of another type."""
    with pytest.raises(SteeringError, match=r"use one of torch\.float32"):
        serialize_tensor(torch.ones(2).to(dtype), compression=None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"data": "!"}, "not valid base64"),
        ({"data": "AAAA"}, "has 3 bytes"),
        ({"shape": [2**40, 2**40]}, "the most"),
        ({"shape": [-1]}, "list of sizes"),
        ({"shape": [0, 2**70], "data": ""}, "the most"),
        ({"original_dtype": "object"}, "is not valid; use one of"),
        ({"original_dtype": "float8_e4m3fn"}, "original_dtype: .* is not valid; use one of"),
        ({"original_dtype": None, "dtype": ">f4"}, "dtype: .* is not valid; use one of"),
        ({"dtype": ">f4"}, "is stored as float32"),
        ({"dtype": ["float32"]}, "is stored as float32"),
        ({"order": "F"}, "'order': is not a key of a tensor; use compression"),
        ({"shape": [1] * 9}, "has 9 dimensions"),
        ({"shape": [10**4000, 10**4000]}, "at most|the most"),
        ({"dtype": "float16"}, "is stored as"),
        ({"compression": "gzip"}, "zstd or null"),
    ],
)
def test_invalid_tensors_are_refused(change: dict[str, Any], problem: str) -> None:
    """Catches wrong bytes read as a tensor, and allocation of any size that a client writes."""
    wire = serialize_tensor(torch.ones(2), compression=None) | change
    with pytest.raises(SteeringError, match=problem):
        deserialize_tensor(wire)


def test_a_small_frame_that_grows_is_refused() -> None:
    """Catches decompression without a bound."""
    zstandard = pytest.importorskip("zstandard")
    from base64 import b64encode

    data = b64encode(zstandard.compress(bytes(1 << 24))).decode()
    with pytest.raises(SteeringError, match="has 16777216 bytes"):
        deserialize_tensor({"data": data, "dtype": "float32", "shape": [2], "compression": "zstd"})


def frame(count: int, **options: bool) -> str:
    """Return zstd data of zeros."""
    zstandard = pytest.importorskip("zstandard")
    return base64.b64encode(zstandard.ZstdCompressor(**options).compress(bytes(4 * count))).decode()


@pytest.mark.parametrize("known", [True, False])
def test_frames_take_no_more_memory_than_their_tensor(known: bool) -> None:
    """Catches memory for the size that a frame says or has, and a second frame that is ignored."""
    wire = {"data": frame(1 << 24, write_content_size=known), "dtype": "float32", "shape": [2], "compression": "zstd"}
    with peak_memory() as peak, pytest.raises(SteeringError, match="bytes"):
        deserialize_tensor(wire)
    assert peak[0] < 1 << 20
    assert deserialize_tensor({**wire, "data": frame(2, write_content_size=known)}).tolist() == [0, 0]
    twice = base64.b64encode(2 * base64.b64decode(frame(2, write_content_size=known))).decode()
    with pytest.raises(SteeringError, match="not valid zstd data"):
        deserialize_tensor({**wire, "data": twice})


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that receives the most bytes that Python allocated within this context."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def wires(*shapes: list[int]) -> list[dict[str, Any]]:
    """Return vectors of these shapes, with data that cannot be decompressed."""
    return [
        {"activations": {"data": "!", "dtype": "float32", "shape": shape}, "layer_indices": [*range(shape[0])]}
        for shape in shapes
    ]


@pytest.mark.parametrize(
    ("vectors", "problem"),
    [
        (wires([1, 1 << 20], [1, 1 << 20]), "more than 6291456 bytes"),
        (wires(*[[1, 1]] * 5000), "more than 4096 vectors"),
        (wires([5000, 1]), "more than 4096 vectors"),
        (wires([1, 5000, 1]), "more than 4096 vectors"),
        ([{"activations": [[1.0]] * 5000, "layer_indices": [*range(5000)]}], "more than 4096 vectors"),
    ],
)
def test_sizes_are_summed_before_any_tensor_is_read(vectors: list[Any], problem: str) -> None:
    """Catches tensors that are each within a limit and together fill the memory, and rows that are counted late."""
    with pytest.raises(SteeringError, match=problem):
        read_keys({"apply_steering_vectors": vectors}, "extra_args", 6 << 20)
    with pytest.raises(SteeringError, match="not valid base64"):
        read_keys({"apply_steering_vectors": wires([1, 1])}, "extra_args", 6 << 20)


LENS = {
    "apply_steering_vectors": [
        {
            "activations": serialize_tensor(torch.ones(1, 1, 4), compression=None), "layer_indices": [1], "scale": 2.0,
            "norm_match": True, "position_indices": [3],
        }
    ],
    "output_residual_stream": [1, 2], "activations_transport": "binary", "skip_reading_prefix_cache": True,
}  # fmt: skip


def test_odd_values_end_in_errors_with_a_field() -> None:
    """Catches another error than `SteeringError`, which a server answers with 500 or without the field."""
    read_keys(LENS, "extra_args")
    refused = 0
    for keys in changes_of(LENS):
        if isinstance(keys, dict):
            try:
                read_keys(keys, "extra_args")
            except SteeringError as error:
                refused += error.field.startswith("extra_args")
    assert refused > 200


class CountedInt(int):
    """A layer that counts comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedInt.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_work_is_linear_in_layers_and_vectors() -> None:
    """Catches comparisons of each layer with each other, and of each vector with each earlier one."""
    vector = SteeringVector(activations=torch.ones(4000, 1), layer_indices=[0])
    vector.layer_indices = [CountedInt(i) for i in range(4000)]
    vector.edits()
    assert CountedInt.compared < 40_000
    CountedInt.compared = 0
    rows = [SteeringVector(activations=torch.ones(1, 1, 1), layer_indices=[1], norm_match=True) for _ in range(3000)]
    for i, each in enumerate(rows):
        each.position_indices = [CountedInt(i)]
    read_keys({"apply_steering_vectors": rows}, "extra_args")
    assert CountedInt.compared < 300_000
