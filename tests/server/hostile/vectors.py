# SPDX-License-Identifier: Apache-2.0
"""Hostile vectors as JSON text: wrong shape, numbers, packing, depth or size."""

from __future__ import annotations

import base64
import gzip
import json
import zlib

import numpy as np

WIDTH = 64
GOOD = json.dumps([0.5] * WIDTH)
_REST = ", 0.5" * (WIDTH - 1)
_BYTES = np.full(WIDTH, 0.5, "<f4").tobytes()
_DATA = base64.b64encode(_BYTES).decode()


def _first(text: str) -> str:
    """Return a vector with ``text`` as its first component."""
    return f"[{text}{_REST}]"


def packed(dtype: object = "float32", shape: object = (WIDTH,), data: object = _DATA, **more: object) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data": data, **more})


def _floats(value: float, dtype: str = "<f4", count: int = WIDTH) -> str:
    return base64.b64encode(np.full(count, value, dtype).tobytes()).decode()


SHAPES: dict[str, str] = {
    "empty list": "[]",
    "empty object": "{}",
    "one row": f"[{GOOD}]",
    "two rows": f"[{GOOD}, {GOOD}]",
    "ragged": "[[1], [1, 2]]",
    "one too few": json.dumps([0.5] * (WIDTH - 1)),
    "one too many": json.dumps([0.5] * (WIDTH + 1)),
    "one number": "[1]",
    "65,537 wide": "[" + "1," * 65536 + "1]",
    "a scalar": "1.5",
    "zero": "0",
    "a string": '"0.5"',
    "a path": '"file:///etc/passwd"',
    "an address": '"http://127.0.0.1/vector"',
    "a flag": "true",
    "by index": json.dumps({str(i): 0.5 for i in range(WIDTH)}),
    "a list of objects": '[{"x": 1}]',
    "a scaled vector in a scaled vector": f'{{"vector": {{"vector": {GOOD}}}}}',
    "an unknown key": f'{{"vector": {GOOD}, "offset": 1}}',
    "a scale alone": '{"scale": 1}',
    "a reference": '{"$ref": "#/components/schemas/vector"}',
    "a pickled class": '{"py/object": "os.system", "vector": [1]}',
}
NUMBERS: dict[str, str] = {
    "NaN": _first("NaN"),
    "Infinity": _first("Infinity"),
    "-Infinity": _first("-Infinity"),
    "1e39": _first("1e39"),
    "-1e39": _first("-1e39"),
    "1e400": _first("1e400"),
    "-1e400": _first("-1e400"),
    "an exponent of 999,999,999": _first("1e999999999"),
    "a fraction of 100,000 digits": _first("9" * 60 + "." + "9" * 100_000),
    "10 ** 60": _first(str(10**60)),
    "-10 ** 400": _first(str(-(10**400))),
    "5,000 digits": _first("1" * 5000),
    "500,000 digits": _first("1" * 500_000),
    "NaN as a string": _first('"NaN"'),
    "1 as a string": _first('"1"'),
    "null": _first("null"),
    "true": _first("true"),
    "a list": _first("[1]"),
    "an object": _first("{}"),
    "hexadecimal": _first("0x10"),
    "a plus sign": _first("+1"),
    "a leading zero": _first("01"),
    "no digit": _first("."),
    "other digits": _first("٣"),
    "only NaN": "[" + ", ".join(["NaN"] * WIDTH) + "]",
}
PACKED: dict[str, str] = {
    "a shape of 10 ** 12": packed(shape=[10**12]),
    "a shape of 2 ** 63": packed(shape=[2**63]),
    "a shape of 10 ** 300": packed(shape=[10**300]),
    "a negative shape": packed(shape=[-1]),
    "a negative even shape": packed(shape=[-WIDTH]),
    "a shape of 0": packed(shape=[0], data=""),
    "a shape of no dimension": packed(shape=[]),
    "a shape of two dimensions": packed(shape=[8, 8]),
    "a shape of 20,000 dimensions": packed(shape=[1] * 20_000),
    "a fractional shape": packed(shape=[64.0]),
    "a shape of strings": packed(shape=["64"]),
    "a shape of true": packed(shape=[True]),
    "a shape of null": packed(shape=[None]),
    "a shape that is a number": packed(shape=WIDTH),
    "a shape that overflows to 64": packed(shape=[2**32 + WIDTH]),
    "another shape than the data": packed(shape=[32]),
    "the widest shape, little data": packed(shape=[65536]),
    "the widest shape, all its data": packed(shape=[65536], data=_floats(1, "<f4", 65536)),
    "900,000 characters for 64 numbers": packed(data="A" * 900_000),
    "64 KiB of zeros, gzipped": packed(data=base64.b64encode(gzip.compress(bytes(1 << 16))).decode()),
    "256 MiB of zeros, deflated": packed(data=base64.b64encode(zlib.compress(bytes(1 << 28), 9)).decode()),
    "an encoding": packed(encoding="gzip"),
    "NaN": packed(data=_floats(np.nan)),
    "Infinity": packed(data=_floats(np.inf)),
    "a float64 beyond float32": packed("float64", data=_floats(1e300, "<f8")),
    "half an infinity": packed("float16", data=_floats(np.inf, "<f2")),
    "no dtype": json.dumps({"shape": [WIDTH], "data": _DATA}),
    "no data": json.dumps({"dtype": "float32", "shape": [WIDTH]}),
    "int8": packed("int8"),
    "object": packed("object"),
    "a pickle's dtype": packed("O8"),
    "a structured dtype": packed("i4,i4"),
    "another byte order": packed(">f4"),
    "float32 with a space": packed("float32 "),
    "FLOAT32": packed("FLOAT32"),
    "a dtype of null": packed(None),
    "a list of dtypes": packed(["float32"]),
    "a dtype of 100,000 letters": packed("f" * 100_000),
    "line breaks": packed(data=_DATA[:76] + "\n" + _DATA[77:]),
    "a space": packed(data=_DATA[:-5] + " " + _DATA[-4:]),
    "the alphabet of addresses": packed(data="_-" * 172),
    "no padding": packed(data=_DATA.rstrip("=")),
    "padding in the middle": packed(data="==" + _DATA[2:]),
    "padding only": packed(data="=" * 344),
    "full-width letters": packed(data="Ａ" * 344),
    "Cyrillic letters": packed(data="А" * 344),
    "null characters": packed(data="\0" * 344),
    "half surrogate pairs": '{"dtype": "float32", "shape": [64], "data": "' + "\\ud800" * 344 + '"}',
    "bytes as a list": packed(data=list(_BYTES)),
    "data of null": packed(data=None),
    "a pickle": packed(data=base64.b64encode(b"\x80\x04\x95" + bytes(253)).decode() + "AAAA"),
}


def _nested(opening: str, closing: str, depth: int, core: str = "1") -> str:
    return opening * depth + core + closing * depth


NESTING: dict[str, str] = {
    "3 lists": _nested("[", "]", 3),
    "100 lists": _nested("[", "]", 100),
    "900 lists": _nested("[", "]", 900),
    "100,000 lists": _nested("[", "]", 100_000),
    "400,000 open lists": "[" * 400_000,
    "100 objects": _nested('{"vector": ', "}", 100),
    "900 objects": _nested('{"a": ', "}", 900),
    "80,000 objects": _nested('{"a": ', "}", 80_000),
    "lists and objects": _nested('[{"a": ', "}]", 500),
    "300,000 siblings": "[" + "[]," * 300_000 + "[]]",
}
