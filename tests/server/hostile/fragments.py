# SPDX-License-Identifier: Apache-2.0
"""Hostile values of our fields, as the inside of a JSON object. Vectors are in `vectors.py`."""

from __future__ import annotations

import itertools
import json

from tests.server.hostile.vectors import GOOD

Fragments = dict[str, str]
"""Fragments by name."""

# Invalid names, most of them attacks.
NAMES: dict[str, str] = {
    "nothing": "",
    "a parent folder": "../../etc/passwd",
    "a parent folder, percent-encoded": "..%2f..%2fetc%2fpasswd",
    "a parent folder, twice encoded": "%252e%252e%252f",
    "a parent folder of Windows": "..\\..\\windows\\system32",
    "an absolute path": "/etc/passwd",
    "two dots": "..",
    "one dot": ".",
    "a hidden file": ".bashrc",
    "an index": "objects/index.json",
    "an option": "--help",
    "a NUL": "calm\0.safetensors",
    "a line break": "calm\r\nSet-Cookie: x=1",
    "a space": "calm ",
    "a tab": "\tcalm",
    "an escape": "\x1b[2Jcalm",
    "a backspace": "calm\x08\x08\x08\x08evil",
    "Cyrillic а": "cаlm",
    "Greek ο": "cοlm",
    "full width": "ｃａｌｍ",
    "mathematical letters": "𝐜𝐚𝐥𝐦",
    "small capitals": "ᴄᴀʟᴍ",
    "a ligature": "ﬁle",
    "a combining accent": "cálm",
    "a zero-width space": "ca\u200blm",
    "a zero-width joiner": "ca\u200dlm",
    "a soft hyphen": "ca\u00adlm",
    "a word joiner": "\u2060calm",
    "a byte-order mark": "\ufeffcalm",
    "right to left": "\u202emlac",
    "an isolate": "\u2066calm\u2069",
    "an Arabic digit": "calm٣",
    "an emoji": "calm😀",
    "a tag character": "calm\U000e0041",
    "a noncharacter": "calm\uffff",
    "half a surrogate pair": "calm\ud800",
    "halves in the wrong order": "\udc00\ud800",
    "65 letters": "a" * 65,
    "100,000 letters": "a" * 100_000,
    "a format": "{0.__class__.__mro__}",
    "a template": "{{7*7}}${7*7}",
    "an injection": "calm'; DROP TABLE modules;--",
    "markup": "<script>alert(1)</script>",
    "no digest": "calm@sha256:0",
    "a digest that is a path": "calm@sha256:../../../../etc/passwd",
    "a digest in capitals": "sha256:" + "A" * 64,
    "a digest of full-width digits": "sha256:" + "０" * 64,
    "two digests": "calm@sha256:" + "0" * 64 + "@sha256:" + "0" * 64,
    "an empty name with a digest": "@sha256:" + "0" * 64,
    "another hash": "calm@md5:" + "0" * 32,
}


def at(vector: str = GOOD, layer: str = "1", point: str = "post_block", field: str = "steering_vectors") -> str:
    return f'"{field}": {{{json.dumps(point)}: {{{json.dumps(layer)}: {vector}}}}}'


def edit(vector: str = GOOD, **parts: object) -> str:
    """Return ``steering`` with one edit; ``parts`` replace its valid attributes."""
    given = {"kind": "add", "point": "post_block", "layers": 1, **parts}
    return f'"steering": [{{{json.dumps(given)[1:-1]}, "vector": {vector}}}]'


def capture(consumer: str = "memory", **parts: object) -> str:
    return json.dumps({"capture": {consumer: {"hooks": {"post_block": [1]}, **parts}}})[1:-1]


def holding(vectors: dict[str, str]) -> Fragments:
    """Return a fragment for each vector, in each of the fields that accept vectors in turn."""
    places = itertools.cycle(_PLACES)
    return {name: next(places)(vector) for name, vector in vectors.items()}


_PLACES = (
    at,
    edit,
    lambda vector: at(vector, field="prefill_steering_vectors"),
    lambda vector: edit(vector, kind="clamp", low=-1, high=1),
    lambda vector: at(f'{{"vector": {vector}, "scale": 2}}', field="decode_steering_vectors"),
)

_SCALARS: dict[str, str] = {
    "a number": "1", "a string": '"x"', "true": "true", "false": "false", "an empty list": "[]",
    "an empty object": "{}", "a list of null": "[null]", "a list of lists": "[[]]", "NaN": "NaN",
    "an empty string": '""', "a list of an empty object": "[{}]", "a huge integer": "9" * 400, "a float": "1e308",
}  # fmt: skip
FIELDS = (
    "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering", "steering_modules", "capture"
)  # fmt: skip


def whole_fields() -> Fragments:
    """Return values of a wrong type in place of a whole field."""
    return {
        f"{field} is {name}": f'"{field}": {text}' for field in FIELDS for name, text in _SCALARS.items()
    }  # fmt: skip


def duplicates() -> Fragments:
    """Return objects with a duplicate key, at every depth."""
    good, spec = at(), '{"hooks": {"post_block": [1]}}'
    return {
        "a field": f"{good}, {good}",
        "a field, once null": f'{good}, "steering_vectors": null',
        "a field, first null": f'"steering_vectors": null, {good}',
        "a field, once in escapes": f'{good}, "\\u0073teering_vectors": {{}}',
        "edits": f"{edit()}, {edit()}",
        "a point": f'"steering_vectors": {{"post_block": {{"1": {GOOD}}}, "post_block": {{"2": {GOOD}}}}}',
        "a layer": f'"steering_vectors": {{"post_block": {{"1": {GOOD}, "1": {GOOD}}}}}',
        "a vector": at(f'{{"vector": {GOOD}, "vector": {GOOD}}}'),
        "a scale": at(f'{{"vector": {GOOD}, "scale": 1, "scale": 100}}'),
        "a packed dtype": at('{"dtype": "float32", "dtype": "float16", "shape": [64], "data": ""}'),
        "a kind": f'"steering": [{{"kind": "add", "kind": "ablate", "point": "post_block", "layers": 1, '
        f'"vector": {GOOD}}}]',
        "a strength": edit().replace('"layers"', '"strength": 1, "strength": 2, "layers"'),
        "a consumer": f'"capture": {{"memory": {spec}, "memory": {spec}}}',
        "hooks": '"capture": {"memory": {"hooks": {"post_block": [1]}, "hooks": {"pre_attn": [1]}}}',
        "a hook": '"capture": {"memory": {"hooks": {"post_block": [1], "post_block": [2]}}}',
        "modules": '"steering_modules": ["a"], "steering_modules": ["b"]',
        "a key in half a surrogate pair": f'"steering_vectors": {{"\\ud800": {{"1": {GOOD}, "1": {GOOD}}}}}',
        "a key that runs right to left": f'"steering_vectors": {{"\\u202e": {{"1": {GOOD}, "1": {GOOD}}}}}',
        "10,000 times": ", ".join([good.replace(GOOD, "[1]")] * 10_000),
    }


def names() -> Fragments:
    """Return hostile names in every field that takes a name."""
    found: Fragments = {}
    for i, (name, text) in enumerate(NAMES.items()):
        found[f"module: {name}"] = json.dumps({"steering_modules": [text if i % 2 else [text, 1.5]]})[1:-1]
    places = itertools.cycle(
        (
            lambda text: at(point=text),
            lambda text: at(layer=text),
            lambda text: capture(consumer=text),
            lambda text: capture(reduce={"probes": [f"{text}/joy"]}),
            lambda text: capture(reduce={"probes": [f"calm/{text}"]}),
            lambda text: edit(kind=text),
            lambda text: edit(tokens=text),
            lambda text: capture(**{text or "-": 1}),
            lambda text: json.dumps({"capture": {"memory": {"hooks": {text: [1]}}}})[1:-1],
        )
    )
    # Twice, so that each place gets many names.
    for name, text in (*NAMES.items(), *reversed(NAMES.items())):
        made = next(places)(text)
        found[f"{made[1 : made.index(chr(34), 1)]}: {name}, {len(found)}"] = made
    return found


def lookalikes() -> Fragments:
    """Return keys that look like our fields and must be refused because they would be ignored."""
    keys = {
        "a letter too few": "steering_vector", "a letter too many": "steering_vectorss", "a dash": "steering-vectors",
        "a space behind": "steering_vectors ", "capitals": "Steering_Vectors", "all capitals": "STEERING",
        "Cyrillic е": "stееring_vectors", "Cyrillic о": "steering_vectоrs", "Greek ε": "stεεring",
        "full width": "ｓｔｅｅｒｉｎｇ",
        "mathematical": "𝐬𝐭𝐞𝐞𝐫𝐢𝐧𝐠", "a zero-width space": "steer\u200bing", "a soft hyphen": "steering\u00ad_vectors",
        "right to left": "\u202esteering", "a NUL": "steering\0", "a byte-order mark": "\ufeffsteering",
        "a combining accent": "stéering", "a dotless i": "steerıng", "half a surrogate pair": "steering\ud800",
        "halves within": "ste\udc00ering_vectors", "100,000 letters": "steering" * 12_500,
        "a tag": "steering\U000e0041", "another word": "steer_vectors", "camel case": "steeringVectors",
        "a wrong letter": "sterring_vectors", "another project": "output_residual_stream",
    }  # fmt: skip
    found = {name: f'{json.dumps(key)}: {{"post_block": {{"1": {GOOD}}}}}' for name, key in keys.items()}
    spec = '{"memory": {"hooks": {"post_block": [1]}}}'
    of_capture = {"Capture": "Capture", "captures": "captures", "Cyrillic а": "cаpture", "zero width": "cap\u200bture"}
    of_capture |= {"swapped letters": "captrue", "two words": "activation_capture"}
    return {**found, **{f"capture, {name}": f"{json.dumps(key)}: {spec}" for name, key in of_capture.items()}}


def places() -> Fragments:
    """Return our fields in places where they would be ignored, and internal keys."""
    good = f"{{{at()}}}"
    inner = ("steer", "steer_capture", "steer_modules", "steer_applied", "steer_prompt")
    return {
        "in extra_body": f'"extra_body": {good}',
        "in sampling_params": f'"sampling_params": {good}',
        "in extra_args": f'"sampling_params": {{"extra_args": {good}}}',
        "in vllm_xargs": f'"vllm_xargs": {{{at(GOOD)}}}',
        "capture in extra_body": f'"extra_body": {{{capture()}}}',
        **{f"{key} in vllm_xargs": f'"vllm_xargs": {{"{key}": "x"}}' for key in inner},
        "a stream of rows": capture(stream=True),
        "a root folder": capture("filesystem", root="/etc"),
        "a file by path": capture("filesystem", path="../../etc/passwd"),
        "a tag of 100,000 letters": capture("filesystem", tag="x" * 100_000),
        "a tag that is not a string": capture("filesystem", tag=["x"]),
        "a tag of half a surrogate pair": capture("filesystem", tag="\ud800"),
        "an unknown consumer": capture("webhook", url="http://127.0.0.1/"),
    }


_INTEGERS: dict[str, object] = {
    "-1": -1, "-10 ** 30": -(10**30), "10 ** 30": 10**30, "2 ** 31": 2**31, "2 ** 63": 2**63, "a float": 1.0,
    "a fraction": 1.5, "true": True, "null": None, "a digit": "1", "empty": [], "nested": [[[1]]], "an object": {},
    "twice": [1, 1], "a pair": [[1, 2]], "4": 4, "4096": 4096, "100,000 numbers": list(range(100_000)),
}  # fmt: skip


def selectors() -> Fragments:
    """Return hostile layers and tokens."""
    found = {f"layers: {name}": edit(layers=value) for name, value in _INTEGERS.items()}
    found |= {
        f"hooks: {name}": json.dumps({"capture": {"memory": {"hooks": {"pre_attn": value}}}})[1:-1]
        for name, value in _INTEGERS.items()
    }
    spans: dict[str, object] = {
        "a number": 1, "true": True, "a word": "everything", "empty": [], "an empty pair": [[5, 5]],
        "a reversed pair": [[5, 3]], "a pair of one": [[1]], "a pair of three": [[1, 2, 3]], "nested": [[[1, 2]]],
        "floats": [0.5], "booleans": [True], "null": [None], "a pair from null": [[None, 3]], "words": ["0"],
        "2 ** 31": [2**31 - 1], "10 ** 30": [10**30], "-10 ** 30": [-(10**30)], "before the prompt": [-500],
        "beyond the model": [256], "a stop of 0": [[-3, 0]], "an object": {"start": 0},
        "100,000 positions": list(range(100_000)), "more ranges than a request may have": list(range(0, 160, 2)),
    }  # fmt: skip
    found |= {f"tokens: {name}": edit(tokens=value) for name, value in spans.items()}
    allowed = ("more ranges than a request may have",)
    found |= {f"positions: {name}": capture(positions=value) for name, value in spans.items() if name not in allowed}
    return found


def parts() -> Fragments:
    """Return hostile attributes of edits, module references and capture specs."""
    numbers: dict[str, object] = {
        "a word": "1", "true": True, "a list": [1], "an object": {}, "1e39": 1e39, "10 ** 400": 10**400,
        "NaN": float("nan"), "-Infinity": float("-inf"),
    }  # fmt: skip
    found = {f"strength: {name}": edit(strength=value) for name, value in numbers.items()}
    found |= {f"low: {name}": edit(kind="clamp", low=value) for name, value in numbers.items()}
    found |= {
        f"scale: {name}": json.dumps({"steering_modules": [["calm", value]]})[1:-1] for name, value in numbers.items()
    }
    zero = json.dumps([0.0] * 64)
    return found | {
        "no bound": edit(kind="clamp"),
        "swapped bounds": edit(kind="clamp", low=2, high=1),
        "bounds of an add": edit(low=1),
        "a zero direction": edit(zero, kind="ablate"),
        "a direction that underflows": edit(json.dumps([1e-60] * 64), kind="ablate"),
        "no kind": f'"steering": [{{"point": "post_block", "layers": 1, "vector": {GOOD}}}]',
        "no vector": '"steering": [{"kind": "add", "point": "post_block", "layers": 1}]',
        "an unknown part": edit(__class__="x"),
        "a part of 100,000 letters": edit(**{"x" * 100_000: 1}),
        "4,097 edits": '"steering": [' + ", ".join([edit("[1]")[13:-1]] * 4097) + "]",
        "widths that differ": f'"steering": [{edit()[13:-1]}, {edit("[1]")[13:-1]}]',
        "5,000 layers": '"steering_vectors": {"post_block": {' + ", ".join(f'"{i}": [1]' for i in range(5000)) + "}}",
        "65 modules": json.dumps({"steering_modules": ["calm"] * 65})[1:-1],
        "a pair of one": '"steering_modules": [["calm"]]',
        "a pair of three": '"steering_modules": [["calm", 1, 1]]',
        "a module that is an object": '"steering_modules": [{"name": "calm"}]',
        "an unknown module": '"steering_modules": ["missing"]',
        "an unknown digest": json.dumps({"steering_modules": ["sha256:" + "0" * 64]})[1:-1],
        "17 consumers": json.dumps({"capture": {f"c{i}": {"hooks": {"post_block": [1]}} for i in range(17)}})[1:-1],
        "no hooks": '"capture": {"memory": {}}',
        "before as a string": capture(before="no"),
        "dtype int8": capture(dtype="int8"),
        "dtype of a list": capture(dtype=["float32"]),
        "reduce to a sum": capture(reduce="sum"),
        "reduce by nothing": capture(reduce={}),
        "reduce twice": capture(reduce={"directions": [[1.0]], "probes": ["a/b"]}),
        "directions of NaN": '"capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": [[NaN]]}}}',
        "narrow directions": capture(reduce={"directions": [[1.0, 2.0]]}),
        "no directions": capture(reduce={"directions": []}),
        "100,000 directions": capture(reduce={"directions": [[1]] * 100_000}),
        "packed directions of 10 ** 12": capture(
            reduce={"directions": {"dtype": "float32", "shape": [10**6, 10**6], "data": "AAAA"}}
        ),
        "probes that are not a list": capture(reduce={"probes": "calm/joy"}),
        "a probe without a module": capture(reduce={"probes": ["joy"]}),
        "options 20 deep": capture("filesystem", tag=json.loads("[" * 20 + "]" * 20)),
        "20,000 characters of options": capture("filesystem", **{f"o{i}": "x" * 100 for i in range(200)}),
        "tokens for positions": capture(tokens="all"),
    }
