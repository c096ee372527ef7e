# SPDX-License-Identifier: Apache-2.0
"""Tests of parsing modules, references and metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.registry.modules import content, module, vector
from vllm_steer.client.encoding import to_json
from vllm_steer.errors import SteeringError
from vllm_steer.registry.metadata import MAX_TEXT, ModuleMetadata, parse_metadata
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.request.references import Reference, parse_probe, parse_reference, parse_references

DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_json_round_trip() -> None:
    """Catches a part of a module that is lost when it is written or parsed."""
    said = json.loads(json.dumps(module().to_wire()))
    again = parse_module(said)
    assert set(said) == {"base", "prefill", "decode", "edits", "probes"}
    assert again == module()
    assert again.all_edits == module().all_edits
    assert list(again.probes) == ["anger", "deep.weights", "joy", "whole"]


def test_digest_depends_on_content_only() -> None:
    """Catches a digest that depends on the notation, or that ignores a part of the content."""
    other = content()
    other["base"] = {"post_block": dict(reversed(other["base"]["post_block"].items()))}
    assert parse_module(other).digest == module().digest
    digests = {module().digest}
    for path, value in (
        (("base", "post_block", "1", "scale"), 3.0),
        (("prefill", "pre_attn", 2), vector(99)),
        (("decode",), None),
        (("edits", 0, "strength"), 0.5),
        (("edits", 1, "tokens"), "all"),
        (("probes", "joy"), vector(99)),
        (("probes", "deep.weights", "weights"), [vector(8), vector(99)]),
        (("probes", "deep.weights", "outputs"), [1.0, 2.0]),
        (("probes", "deep.weights", "biases"), None),
        (("probes", "deep.weights", "activation"), "relu"),
    ):
        changed: Any = content()
        part = changed
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        digests.add(parse_module(changed).digest)
    swapped = content()
    swapped["edits"].reverse()  # they apply in another order
    digests.add(parse_module(swapped).digest)
    assert len(digests) == 12


def test_merge_keeps_unchanged_sites() -> None:
    """Catches a merge that drops another site, or adds to a site instead of replacing it."""
    change = parse_module({"base": {"post_block": {1: vector(50)}}})
    merged = module().merged(change)
    assert [edit.layers for edit in merged.base] == [(0,), (1,)]
    assert merged.base[1] == change.base[0]
    assert (merged.prefill, merged.decode, merged.edits) == (module().prefill, module().decode, module().edits)
    assert module().merged(Module()) == module()


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "module", "empty"),
    "another key": ({"vectors": {}}, "vectors", "base, prefill, decode, edits, probes"),
    "empty tier": ({"base": {}}, "base", "empty"),
    "point": ({"prefill": {"mlp": {1: [1.0]}}}, "prefill", "pre_attn"),
    "NaN": ({"decode": {"pre_attn": {1: [float("nan")]}}}, "decode.pre_attn[1][0]", "finite"),
    "widths in tiers": ({"base": {"pre_attn": {1: [1]}}, "decode": {"pre_attn": {1: [1, 2]}}},
                        "decode.pre_attn[1]", "base.pre_attn[1] has width 1"),
    "width of a probe": ({"base": {"pre_attn": {1: [1]}}, "probes": {"p": [1, 2]}}, "probes.p", "width 2"),
    "width of a hidden layer": ({"probes": {"a": [1], "p": {"weights": [[1, 2]], "outputs": [1]}}},
                                "probes.p", "width 2"),
    "hidden layer": ({"probes": {"p": {"weights": [[1, 2]]}}}, "probes.p.outputs", "missing"),
    "bias": ({"probes": {"p": {"weights": [1], "bias": True}}}, "probes.p.bias", "number"),
    "sigmoid": ({"probes": {"p": {"weights": [1], "sigmoid": 1}}}, "probes.p.sigmoid", "true or false"),
    "site of a probe": ({"probes": {"p": {"weights": [1], "point": "resid_post.3", "layer": 4}}},
                        "probes.p.layer", "names layer 3"),
    "no weights": ({"probes": {"p": {"bias": 1.0}}}, "probes.p.weights", "missing"),
    "misspelt": ({"probes": {"p": {"weights": [1], "threshold": 1.0}}}, "probes.p", "use weights, outputs"),
    "probes": ({"probes": []}, "probes", "name: probe"),
    "name of a probe": ({"probes": {"a/b": [1]}}, "probes", "ASCII"),
    "kind": ({"edits": [{"kind": "x", "point": "pre_attn", "layers": 1, "vector": [1]}]}, "edits[0].kind", "clamp"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_rejects_invalid_modules(case: str) -> None:
    """Catches invalid content that is accepted, and errors with the wrong field."""
    given, field, words = WRONG[case]
    with pytest.raises(SteeringError) as refused:
        parse_module(given)
    assert refused.value.field == field
    assert words in refused.value.problem


@pytest.mark.parametrize(
    ("given", "name", "digest", "scale"),
    [
        ("calm", "calm", None, 1.0),
        (f"calm@{DIGEST}", "calm", DIGEST, 1.0),
        (DIGEST, None, DIGEST, 1.0),
        (["calm", 1.5], "calm", None, 1.5),
        ((f"a.b-c_D9@{DIGEST}", -2), "a.b-c_D9", DIGEST, -2.0),
    ],
)
def test_parses_references(given: Any, name: str | None, digest: str | None, scale: float) -> None:
    """Catches a reference that is parsed as a different one."""
    found = parse_reference(given, "m")
    assert (found.name, found.digest, found.scale, found.dose) == (name, digest, scale, None)
    assert parse_reference(found, "m") == parse_reference(found.to_wire(), "m") == found


def test_names_in_edits_of_modules_are_refused() -> None:
    """Catches advice for Python where a module or global steering is given over HTTP."""
    for kind, named in (("add", {"module": "calm"}), ("replace", {"capture": "x"})):
        with pytest.raises(SteeringError) as refused:
            parse_module({"edits": [{"kind": kind, "point": "pre_attn", "layers": 1, "vector": named}]})
        assert refused.value.field == "edits[0].vector" and "Edit(" not in refused.value.problem
        assert "only edits in `steering` of a request" in refused.value.problem


def test_parses_references_with_a_dose() -> None:
    """Catches a dose that is dropped on the way, or read as a scale."""
    found = parse_reference({"module": f"calm@{DIGEST}", "dose": -0.5}, "m")
    assert found == Reference("calm", DIGEST, 1.0, -0.5)
    assert parse_reference(found, "m") == parse_reference(to_json(found, "m"), "m") == found
    for given, field, words in (
        ({"module": "calm", "dose": 1, "scale": 1.0}, "m", "has a dose and a scale; give one of them"),
        ({"module": "calm", "dose": "1"}, "m.dose", "must be a number"),
        ({"module": "calm", "dose": None}, "m.dose", "is null; give a number, or the name alone for scale 1"),
        ({"module": "calm", "dose": 1e20}, "m.dose", "between -1000 and 1000, not 1e+20"),
        ({"module": ["calm", 2], "dose": 1}, "m.module", "must be a module name"),
        ({"dose": 1}, "m.module", "is missing"),
        ({"name": "calm", "dose": 1}, "m", "unknown key 'name'; a reference has module and dose"),
        ({"module": "calm", "live": "x"}, "m", "unknown key 'live'; a reference has module and dose. For other fields"),
        ({"module": "calm", "scale": 2}, "m", 'has a scale; write it as in ["calm", 1.5]'),
        ({"module": "calm"}, "m.dose", 'is missing; write {"module": "calm", "dose": 0.5}'),
    ):
        with pytest.raises(SteeringError) as refused:
            parse_reference(given, "m")
        assert refused.value.field == field and words in refused.value.problem


NO_NAMES = [
    "", " calm", "calm ", "../x", "a/b", "a\\b", ".", "..", ".hidden", "-x", "c\u0430lm", "\uff43alm", "calm\u200b",
    "calm\n",    "a\0b", "x" * 65, "café", "%2e%2e", "calm@", "@" + DIGEST, f"calm@{DIGEST[:-1]}",
    f"calm@{DIGEST.upper()}",
    "sha256:", DIGEST + "0", 1, None, True, b"calm", ["calm"], ["calm", "1"], ["calm", float("nan")],
    ["calm", True], ["calm", 10**60], ["calm", 1, 2], {"calm": 1}, [["calm", 1], 1],
]  # fmt: skip


@pytest.mark.parametrize("given", NO_NAMES, ids=ascii)
def test_rejects_invalid_references(given: Any) -> None:
    """Catches path characters, characters that resemble ASCII letters, and ambiguous forms."""
    with pytest.raises(SteeringError, match=r"steering_modules\[0\]"):
        parse_references([given])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["calm:1.5"], 'steering_modules[0]: \'calm:1.5\' is not a valid name; a scale is the second item of a pair: '
                       '["calm", 1.5]'),
        (["x", "calm=-0.5"], 'a scale is the second item of a pair: ["calm", -0.5]'),
        (("calm", 1.5), "steering_modules: is a pair; write a list of pairs: [('calm', 1.5)]"),
        (["calm", 2], "write a list of pairs: [('calm', 2)]"),
        ([f"sha256:{1:064}5"], "has an invalid digest"),
        (["./calm.safetensors"], "is a path, not the name of a module; register one with `vllm-steer modules add"),
        ([[Path("calm.gguf"), 2]], "'calm.gguf' is a path, not the name of a module"),
        ([{"module": "C:\\calm", "dose": 1}], "register_file"),
        ([{"name": "calm"}], 'must be a name, a pair such as ["calm", 1.5] or {"module": "calm", "dose": 0.3}'),
    ],
)  # fmt: skip
def test_errors_show_the_valid_form(given: Any, message: str) -> None:
    """Catches the command line's form, a bare pair and a path refused without the valid form."""
    with pytest.raises(SteeringError) as caught:
        parse_references(given)
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [[], "calm", {"calm": 1}, 1, ["calm"] * 65])
def test_rejects_invalid_reference_lists(given: Any) -> None:
    """Catches an invalid list read as empty, and a string read as a list of letters."""
    with pytest.raises(SteeringError, match="steering_modules"):
        parse_references(given)


def test_parses_probe_references() -> None:
    """Catches a probe that is looked up in another module."""
    probe = parse_probe(f"calm@{DIGEST}/joy", "p")
    assert (probe.module.name, probe.module.digest, probe.probe) == ("calm", DIGEST, "joy")
    for wrong in ("calm", "calm/", "/joy", "calm/a/b", "calm/../x", 1):
        with pytest.raises(SteeringError, match="p: "):
            parse_probe(wrong, "p")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"description": 1}, "description"),
        ({"description": "x" * (MAX_TEXT + 1)}, "description"),
        ({"model": "\ud800"}, "model"),
        ({"provenance": ["x"]}, "provenance"),
        ({"provenance": {"a": {"b": 1}}}, "provenance.'a'"),
        ({"provenance": {str(i): "" for i in range(33)}}, "provenance"),
        *(
            ({"provenance": {"stream": text}}, "provenance.stream")
            for text in ("", "of layer 1", "[1]", '{"1": "4"}', '{"1": NaN}', '{"1": 1e999}', '{"a": 1}')
        ),
        *(
            ({"provenance": {"stream": f'{{"0": 3, "1": {length}}}'}}, "provenance.stream[1]")
            for length in ("0", "-2.5", "1e39")
        ),
        ({"provenance": {"stream": '{"-1": 3}'}}, "provenance.stream[-1]"),
    ],
)
def test_rejects_invalid_metadata(given: Any, field: str) -> None:
    """Catches metadata that cannot be stored or have no limit, and lengths of the stream that no dose can have."""
    with pytest.raises(SteeringError) as refused:
        parse_metadata(given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"0": 0, "1": -2.5, "2": 7, "3": 4.5}', {2: 7.0, 3: 4.5}), ('{"2": 1e999}', {}), ("[1]", {}), ("prose", {})],
)
def test_lengths_of_the_stream_that_mean_nothing(text: str, expected: dict[int, float]) -> None:
    """Catches doses divided by zero, and lengths of which a dose is negative or infinite."""
    assert ModuleMetadata(provenance={"stream": text}).streams == expected
