# SPDX-License-Identifier: Apache-2.0
"""Every accepted form of a vector gives the same array; every other value is refused, and says where."""

import base64
import itertools
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_steer.errors import SteeringError
from vllm_steer.request import bytes_of, pack_vector, parse_vector

FLOAT32_MAX = 3.4028234663852886e38
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


def packed(dtype, values, code):
    """A packed vector made with struct, not with the code under test."""
    data = struct.pack(f"<{len(values)}{code}", *values)
    return {"dtype": dtype, "shape": [len(values)], "data": base64.b64encode(data).decode()}


def assert_refused(value, field, *words):
    with pytest.raises(SteeringError) as caught:
        parse_vector(value, "v")
    assert caught.value.field == field
    for word in words:
        assert word in caught.value.problem
    assert len(str(caught.value)) < 400


class TestAccepted:
    @given(st.lists(float32s, min_size=1, max_size=50))
    def test_every_form_of_the_same_numbers_gives_the_same_array(self, numbers):
        expected = struct.pack(f"={len(numbers)}f", *numbers)
        array = np.array(numbers, np.float32)
        for form in (
            numbers,
            tuple(numbers),
            list(array),
            array,
            array.astype(np.float64),
            array.astype(">f4"),
            np.repeat(array, 2)[::2],
            torch.tensor(numbers, dtype=torch.float32),
            torch.tensor(numbers, dtype=torch.float64),
            packed("float32", numbers, "f"),
            packed("float64", numbers, "d"),
            pack_vector(numbers),
            json.loads(json.dumps(pack_vector(array))),
        ):
            vector = parse_vector(form)
            assert (vector.dtype, vector.shape) == (np.float32, (len(numbers),))
            assert vector.flags.c_contiguous and not vector.flags.writeable
            assert vector.tobytes() == expected, form

    @given(hnp.arrays(np.uint16, st.integers(1, 20)))
    def test_bfloat16_and_float16_are_decoded_as_torch_does(self, bits):
        """Catches byte order, a shift to the wrong half, and one 16-bit format read as the other."""
        data = base64.b64encode(bits.astype("<u2").tobytes()).decode()
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
            tensor = torch.from_numpy(bits.view(np.int16)).view(dtype)
            if not tensor.isfinite().all():
                continue
            vector = parse_vector({"dtype": name, "shape": [bits.size], "data": data})
            assert np.array_equal(vector, tensor.float().numpy())
            assert np.array_equal(vector, parse_vector(tensor))

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64", "float16", "longdouble"])
    def test_any_real_numpy_dtype(self, dtype):
        assert parse_vector(np.array([1, 2, 3], dtype)).tolist() == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "int64"])
    def test_any_real_tensor_dtype(self, dtype):
        tensor = torch.tensor([1.0, -2.0]).to(getattr(torch, dtype))
        assert parse_vector(tensor).tolist() == [1.0, -2.0]

    def test_parameter_that_requires_grad(self):
        assert parse_vector(torch.nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]

    def test_zeros_and_the_largest_float32(self):
        assert parse_vector([0.0, -0.0]).tolist() == [0.0, 0.0]
        assert parse_vector([FLOAT32_MAX, -FLOAT32_MAX]).tolist() == [FLOAT32_MAX, -FLOAT32_MAX]

    def test_widest(self):
        assert parse_vector(np.ones(65536)).size == 65536
        assert_refused(np.ones(65537), "v", "65537", "65536")
        assert_refused([1.0] * 65537, "v", "65537")


class TestImmutable:
    @pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
    def test_later_writes_to_the_source_do_not_show(self, make):
        """Catches a vector that aliases the caller's memory."""
        source = make([1.0, 2.0])
        vector = parse_vector(source)
        source[0] = 9.0
        assert vector.tolist() == [1.0, 2.0]

    def test_read_only_view_of_writeable_memory_is_copied(self):
        source = np.ones(2, np.float32)
        view = source[:]
        view.flags.writeable = False
        vector = parse_vector(view)
        source[0] = 9.0
        assert vector.tolist() == [1.0, 1.0]

    def test_cannot_be_made_writeable_again(self):
        vector = parse_vector([1.0])
        with pytest.raises(ValueError):
            vector.flags.writeable = True
        with pytest.raises(ValueError):
            vector[0] = 2.0

    def test_own_result_is_not_copied_again(self):
        vector = parse_vector([1.0])
        assert parse_vector(vector) is vector

    def test_immutable_float64_is_converted_all_the_same(self):
        """Catches the shortcut for immutable arrays taken before the dtype is looked at."""
        vector = parse_vector(np.frombuffer(struct.pack("<2d", 1.0, 2.0), np.float64))
        assert (vector.dtype, vector.tolist()) == (np.float32, [1.0, 2.0])


GOOD = packed("float32", [1.0, 2.0], "f")
REFUSED = [
    *((value, "v", ["list of numbers"])
      for value in (None, 3, 3.0, True, "1 2", b"12", {1.0, 2.0}, object(), iter([1.0]))),
    *((value, "v", ["0 components"]) for value in ([], (), np.empty(0), torch.empty(0))),
    # numpy's silent conversions, e.g. of True to 1.0.
    *(([1.0, bad, 3.0], "v[1]", ["number"]) for bad in (True, np.True_, "2", None, [2.0], {}, 1j, torch.tensor(1.0))),
    *((value, "v", ["flat list"]) for value in ([[1.0, 2.0]], [[1.0], [2.0, 3.0]], ((1.0,),))),
    *((value, field, ["finite"])
      for bad in (math.nan, math.inf, -math.inf, 1e39, -1e300, np.float64(1e39))
      for value, field in (
          ([0.0, bad], "v[1]"), (np.array([0.0, 1.0, bad]), "v[2]"),
          (torch.tensor([bad], dtype=torch.float64), "v[0]"), (packed("float64", [0.0, bad], "d"), "v[1]"),
      )),
    ([0.0, 10**39], "v[1]", ["finite"]),
    ([1.0, 10**400], "v", ["float32"]),
    *((np.ones(3, np.int64).astype(dtype), "v", ["dtype"])
      for dtype in ("bool", "complex64", "U3", "S3", "object", "datetime64[s]")),
    (np.ma.masked_array([1.0, 2.0], [False, True]), "v", ["masked"]),  # used as if they were there
    *((value, "v", ["[1, 4]", "vector[0]"]) for value in (np.ones((1, 4)), torch.ones(1, 4))),
    *((make(shape), "v", ["one dimension"]) for shape in ((), (2, 2), (1, 1, 4)) for make in (np.ones, torch.ones)),
    *((tensor, "v", [])
      for tensor in (torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64))),
    (torch.ones(2, dtype=torch.bool), "v", ["bool"]),
    *(({k: v for k, v in GOOD.items() if k != key}, "v", ["dtype, shape and data"]) for key in GOOD),
    *((GOOD | {key: 1}, "v", ["has the keys"]) for key in ("order", 1, None)),
    *((GOOD | {"dtype": dtype}, "v.dtype", ["bfloat16"])
      for dtype in ("int32", "<f4", "FLOAT32", "", None, 4, ["float32"])),
    *((GOOD | {"shape": shape}, "v.shape", ["[H]"]) for shape in (2, "2", None, [2.0], ["2"], [True], [None], {})),
    *((GOOD | {"shape": shape}, "v.shape", []) for shape in ([], [0], [-2], [1, 2], [2, 1], [65537], [10**30])),
    *((GOOD | change, "v.data", ["characters"]) for change in ({"shape": [1]}, {"shape": [3]}, {"dtype": "float64"})),
    # 8 bytes and 9 bytes are both 12 base64 characters.
    (GOOD | {"data": base64.b64encode(bytes(9)).decode()}, "v.data", ["9 bytes"]),
    # A lenient decoder drops foreign characters and shifts what follows.
    *((GOOD | {"data": data}, "v.data", ["base64"])
      for data in ("AACAPwAAAEA\n", "AACAPwAA-EA=", "AACA=wAAAEA=", "äACAPwAAAEA=", "============")),
    *((GOOD | {"data": data}, "v.data", ["base64 string"]) for data in (None, 5, b"AACAPwAAAEA=", ["AACAPwAAAEA="])),
]  # fmt: skip


@pytest.mark.parametrize(("value", "field", "words"), REFUSED)
def test_refused_by_path(value, field, words):
    """Catches a wrong vector that is accepted or converted silently, and an error without its path or a remedy."""
    assert_refused(value, field, *words)


def test_the_good_packed_vector_is_good():
    """Negative control of the packed vectors above."""
    assert parse_vector(GOOD).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_among_many(bad):
    """Catches a look at sums, which large components make infinite and opposite infinities cancel."""
    for width, at, large in itertools.product((1, 17, 4096, 65536), (0, -1), (0.0, 1.0, FLOAT32_MAX)):
        vector = np.full(width, large, np.float32)
        assert parse_vector(vector).tolist() == vector.tolist()
        vector[at] = bad
        vector[-at - 1 if width > 1 else at] = -bad
        assert_refused(vector, "v[0]", "finite")


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=64))
def test_pack_and_parse_are_inverse_for_all_finite_bits(raw):
    bits = np.frombuffer(raw + bytes(-len(raw) % 4), np.float32)
    if np.isfinite(bits).all():
        assert parse_vector(pack_vector(bits)).tobytes() == bits.tobytes()


WIDE = np.arange(12, dtype="<f4")


@pytest.mark.parametrize(
    "given_as",
    [
        lambda raw: np.frombuffer(raw, "<f4"),
        lambda raw: np.frombuffer(raw, "<f4")[4:],
        lambda raw: np.frombuffer(raw, "<f4", offset=16),
        lambda raw: np.frombuffer(raw, "<f4", count=5),
        lambda raw: np.frombuffer(raw, "<f4")[::-1],
        lambda raw: np.frombuffer(raw, "<f4")[::2],
        lambda raw: np.frombuffer(raw, "<f4").astype(">f4"),
        lambda raw: np.frombuffer(raw, "<i4"),
        lambda raw: np.frombuffer(raw, "<f4").tolist(),
    ],
)
def test_the_bytes_are_those_of_the_vector(given_as):
    """Catches the bytes underneath a part, or a view in another order, taken for the vector's own."""
    given_vector = given_as(WIDE.tobytes())
    right = struct.pack(f"<{len(given_vector)}f", *given_vector)
    assert bytes_of(parse_vector(given_vector)) == right


def test_bytes_that_are_there_are_not_copied():
    raw = WIDE.tobytes()
    assert bytes_of(parse_vector(np.frombuffer(raw, "<f4"))) is raw
