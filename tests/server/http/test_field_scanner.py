# SPDX-License-Identifier: Apache-2.0
"""Detection of fields and duplicate keys in raw bodies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_steer.params import FIELDS
from vllm_steer.server.http import field_scanner
from vllm_steer.server.http.field_scanner import (
    _FORM_PART,
    _object,
    find_fields,
    form_field,
    form_names,
    is_utf8,
    may_hold_fields,
)

names = st.sampled_from(FIELDS)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(name=names, value=values, others=st.dictionaries(st.text(), values), data=st.data())
def test_escaped_names_are_found(name: str, value: object, others: dict[str, object], data: st.DataObject) -> None:
    """Catches a field that goes past the search because some of its letters are escapes."""
    escaped = data.draw(st.sets(st.integers(0, len(name) - 1)))
    hexadecimal = data.draw(st.sampled_from(["04x", "04X"]))
    spelt = "".join(f"\\u{ord(c):{hexadecimal}}" if i in escaped else c for i, c in enumerate(name))
    rest = json.dumps(others, ensure_ascii=data.draw(st.booleans()))[1:]
    body = f'{{"{spelt}": {json.dumps(value)}{", " if others else ""}{rest}'
    assert name in json.loads(body)
    assert may_hold_fields(body.encode("utf-8", "surrogatepass"))


@given(document=st.dictionaries(st.text(), values))
def test_bodies_without_fields(document: dict[str, object]) -> None:
    """Catches a search that takes steering fields from bodies that have none."""
    body = json.dumps(document).encode()
    expected = tuple(name for name in FIELDS if document.get(name) is not None)
    assert find_fields(body).fields == expected
    assert find_fields(body).problem is None


@pytest.mark.parametrize("text", ["steering", "my steering wheel", "prefill_steering_vectors", "café ü 漢字", "a\\b"])
def test_names_in_prompts_are_not_fields(text: str) -> None:
    """Catches a refusal of a plain request that only talks about steering."""
    assert find_fields(json.dumps({"prompt": text, "steering": None}).encode()).fields == ()


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"steering": [], "steering": []}', "steering"),
        ('{"steering": null, "steering": []}', "steering"),
        ('{"steering": [], "steering": null}', "steering"),
        ('{"steering_vectors": {}, "steering\\u005fvectors": {}}', "steering_vectors"),
        ('{"steering_vectors": {"post_block": {}, "post_block": {}}}', "steering_vectors"),
        ('{"decode_steering_vectors": {"pre_attn": {"15": 1, "15": 1}}}', "decode_steering_vectors.pre_attn"),
        ('{"steering_vectors": {"p": {"1": {"scale": 1, "scale": 2}}}}', "steering_vectors.p[1]"),
        ('{"steering_vectors": {"p": {"1": {"vector": {"data": 1, "data": 2}}}}}', "steering_vectors.p[1].vector"),
        ('{"steering": [{"kind": "add"}, {"kind": "add", "kind": "ablate"}]}', "steering[1]"),
        ('{"steering": [{"vector": {"shape": 1, "shape": 2}}]}', "steering[0].vector"),
        ('{"steering": [{"vector": [[1.0], {"data": 1, "data": 2}]}]}', "steering[0].vector[1]"),
        ('{"steering": [{"subspace": [{"data": 1, "data": 2}]}]}', "steering[0].subspace[0]"),
        ('{"steering_vectors": {"\\ud800": {"1": 1, "1": 2}}}', "steering_vectors.\\ud800"),
        ('{"steering_vectors": {"\\u202e": {"1": 1, "1": 2}}}', "steering_vectors.\\u202e"),
        ('{"capture": {}, "c\\u0061pture": {}}', "capture"),
        ('{"capture": {"memory": {}, "memory": {}}}', "capture"),
        ('{"capture": {"memory": {"hooks": {"post_block": 1, "post_block": 2}}}}', "capture.memory.hooks"),
        ('{"capture": {"m": {"reduce": {"directions": {"data": 1, "data": 2}}}}}', "capture.m.reduce.directions"),
        ('{"capture": {"m": {"an_option": [1, [{"a": {"b": 1, "b": 1}}]]}}}', "capture.m.an_option[1][0].a"),
    ],
)
def test_duplicate_keys_are_found(body: str, path: str) -> None:
    """Catches one of two values being taken and the other ignored, as JSON parsers do."""
    problem = find_fields(body.encode()).problem
    assert problem is not None
    assert problem.field == path
    assert "twice" in problem.problem


pairs = st.recursive(
    st.sampled_from(["1", "1.5e3", "null", '"a"', '"a: b"', '"\\u003a"', "[]", "{}", "NaN"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(
            st.tuples(st.sampled_from(["steering", "capture", "a", "b:", "st\\u0065ering"]), inner), max_size=3
        ).map(lambda items: "{" + ", ".join(f'"{key}": {value}' for key, value in items) + "}")
    ),
    max_leaves=8,
)


@given(pairs)
def test_the_fast_parser_finds_the_same(text: str) -> None:
    """Catches duplicate keys that msgspec hides, and fields that it reads otherwise than Python's parser."""
    found = find_fields(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_scanner, "_without_duplicates", lambda body: None)
        slow = find_fields(text.encode())
    assert found.fields == slow.fields
    assert str(found.problem) == str(slow.problem)
    assert found.document is None or (found.document == json.loads(text) and slow.problem is None)


def test_colons_in_texts_do_not_hide_duplicates() -> None:
    """Catches prompts with colons that go to the slow parser, and a duplicate key that an escaped colon hides."""
    assert find_fields(b'{"prompt": "a: b", "steering": [1]}').document == {"prompt": "a: b", "steering": [1]}
    assert find_fields(b'{"prompt": "\\u003A", "steering": [1], "steering": [1]}').problem is not None


def test_duplicates_outside_the_fields_are_ignored() -> None:
    """Catches a refusal of what vLLM accepts."""
    body = b'{"prompt": 1, "prompt": 2, "metadata": {"a": 1, "a": 2}, "steering": [{"kind": "add"}]}'
    assert find_fields(body).problem is None


@pytest.mark.parametrize(
    "place", ["extra_args", "extra_body", "sampling_params", "sampling_params.extra_args", "vllm_xargs"]
)
def test_rejects_fields_in_wrong_objects(place: str) -> None:
    """Catches fields that vLLM drops since they are one level too deep."""
    inner: dict[str, object] = {"steering": []}
    for key in reversed(place.split(".")):
        inner = {key: inner}
    problem = find_fields(json.dumps(inner).encode()).problem
    assert problem is not None
    assert problem.field == f"{place}.steering"


@pytest.mark.parametrize("place", ["extra_body", "sampling_params", "vllm_xargs"])
def test_unrelated_capture_keys_are_ignored(place: str) -> None:
    """Catches a refused `capture` key of another API, and our own `capture` field silently dropped."""
    assert find_fields(json.dumps({place: {"capture": "yes"}}).encode()).problem is None
    problem = find_fields(json.dumps({place: {"capture": {"memory": {}}}}).encode()).problem
    assert problem is not None
    assert problem.field == f"{place}.capture"


@pytest.mark.parametrize("body", ['{"prompt": "say \\"capture\\""}', '{"captured": {}}', '{"prompt": "capture"}'])
def test_names_in_text_need_no_parsing(body: str) -> None:
    """Catches bodies that are parsed twice for a word in their prompt."""
    assert may_hold_fields(body.encode()) == (body == '{"prompt": "capture"}')
    assert find_fields(body.encode()).fields == ()


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000 + "]" * 100_000])
def test_unreadable_json_is_reported(text: str) -> None:
    """Catches an exception from the depths of the JSON module."""
    problem = find_fields(f'{{"steering": {text}}}'.encode()).problem
    assert problem is not None
    assert problem.field == "body"


@pytest.mark.parametrize("body", [b"", b"{", b'{"steering": [1}', b"[1]", b'"steering"', b"null", b'{"steering"}'])
def test_malformed_bodies_have_no_fields(body: bytes) -> None:
    """Catches a refusal in words other than vLLM's, and an exception."""
    assert find_fields(body).fields == ()
    assert find_fields(body).problem is None


@pytest.mark.parametrize("name", FIELDS)
def test_single_escapes_are_found(name: str) -> None:
    """Catches one letter of which the escaped form goes past the search: the underscore is the likely one."""
    for i, letter in enumerate(name):
        assert may_hold_fields(f'{{"{name[:i]}\\u{ord(letter):04x}{name[i + 1 :]}": []}}'.encode())


class Counted(str):
    """A key that counts how often one is looked at."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def test_many_duplicates_are_reported_once() -> None:
    """Catches a search that is quadratic in the number of keys: one request would stop the server."""
    pairs = [(Counted(i), 0) for i in range(2_000) for _ in range(2)]
    Counted.looks = 0
    assert len(_object(pairs)) == 2_000
    assert Counted.looks < 10 * len(pairs)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_are_detected(encoding: str) -> None:
    """Catches fields hidden from the search in an encoding that JSON parsers accept."""
    body = '{"steering": []}'.encode(encoding)
    assert not is_utf8(body)
    assert find_fields(body).fields == ("steering",)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_is_detected(encoding: str) -> None:
    """Catches every ordinary body being parsed twice."""
    assert is_utf8('{"prompt": "ü"}'.encode(encoding))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("quote", ['"', ""])
def test_form_fields_are_found(name: str, quote: str) -> None:
    """Catches steering fields in an audio upload, which vLLM would drop."""
    part = f"--x\r\nContent-Disposition: form-data; name={quote}{name}{quote}\r\n\r\n{{}}\r\n--x--".encode()
    assert form_field(form_names(part)) == name


def test_form_objects_are_found() -> None:
    """Catches an object from OpenAI's clients, which write each of its values as a part."""
    part = b'--x\r\nContent-Disposition: form-data; name="capture[memory][hooks][post_block][]"\r\n\r\n1\r\n--x--'
    assert form_field(form_names(part)) == "capture"


def test_form_values_are_not_fields() -> None:
    """Catches a refusal of an upload whose text speaks of steering."""
    part = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nname="steering" steering\r\n--x--'
    assert form_field(form_names(part)) is None


@pytest.mark.parametrize("piece", [b"form-data;", b'form-data; name="', b"form-data;name="])
def test_forms_are_scanned_once(piece: bytes) -> None:
    """Catches a search that is quadratic in the length of a line, with which a small upload could block the server."""
    form = b"steering" + piece * 1_000
    assert form_field(form_names(form)) is None
    assert len(_FORM_PART.findall(form)) == 1
    assert form_field(form_names(form + b'form-data; filename="x"; name="capture"\r\n')) == "capture"
