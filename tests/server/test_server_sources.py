# SPDX-License-Identifier: Apache-2.0
"""Rows of `replace` that a request names: a stored capture, or a probe of a module, which every kind takes."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np

from tests.server.server import HIDDEN, LAYERS
from vllm_steer.request import pack_vector

CLEAN, CORRUPT = "the cat sat", "the dog sat"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 5}
SPEC = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}


def complete(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**GREEDY, "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def logprobs(client: httpx.Client, **fields: Any) -> list[float]:
    found: list[float] = complete(client, CORRUPT, **fields)["logprobs"]["token_logprobs"]
    return found


def edit(vector: Any, **changes: Any) -> dict[str, Any]:
    return {"kind": "replace", "point": "post_block", "layers": 2, "vector": vector, "tokens": [4, 5], **changes}


def test_rows_of_a_stored_capture(client: httpx.Client) -> None:
    """Catches rows of another site, prompt or position than the ones that are named, and rows that still travel."""
    inline = complete(client, CLEAN, capture={"memory": SPEC})["capture_results"]["memory"]["sites"]["post_block"]
    report = complete(client, CLEAN, capture={"memory": {**SPEC, "store": True}})["capture_results"]["memory"]
    assert report["status"] == "ok" and "sites" not in report
    site = inline["2"]
    rows = {"dtype": site["dtype"], "shape": site["shape"], "data": site["data"]}
    whole = logprobs(client, steering=[edit(rows, tokens="prompt")])
    assert logprobs(client, steering=[edit({"capture": report["id"]}, tokens="prompt")]) == whole
    array = np.frombuffer(base64.b64decode(site["data"]), "<f4").reshape(site["shape"])
    sent = {shift: [pack_vector(row) for row in array[4 + shift : 6 + shift]] for shift in (0, 1)}
    named = {"capture": report["id"]}
    here, off = (logprobs(client, steering=[edit(sent[shift])]) for shift in (0, 1))
    assert logprobs(client, steering=[edit(named)]) == here != off
    assert logprobs(client, steering=[edit({**named, "positions": [5, 6]})]) == off
    one = logprobs(client, steering=[edit(pack_vector(array[-1]), tokens=[4])])
    assert logprobs(client, steering=[edit({**named, "positions": [-1]}, tokens=[4])]) == one
    # Tokens that depend on the length of the prompt are matched one by one as well.
    last = logprobs(client, steering=[edit(pack_vector(array[-1]), tokens=[-1])])
    for tokens in ([-1], "last_prompt"):
        assert logprobs(client, steering=[edit({**named, "positions": [-1]}, tokens=tokens)]) == last
    mixed = logprobs(client, steering=[edit([pack_vector(array[2]), pack_vector(array[-1])], tokens=[3, -1])])
    assert logprobs(client, steering=[edit({**named, "positions": [2, -1]}, tokens=[3, -1])]) == mixed != last
    generated = {"tokens": {"generated": [0, 1]}}
    texts = [
        complete(client, CORRUPT, steering=[edit(vector, **generated)], max_tokens=3)["logprobs"]["token_logprobs"]
        for vector in (sent[1], {**named, "positions": [5, 6]}, sent[0])
    ]
    assert texts[0] == texts[1] != texts[2]
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "tokens without a number": (edit({**named, "positions": [1]}, tokens="prompt"), "steering[0].vector.positions"),
        "a mask": (edit({**named, "positions": [0, 0, 1]}, tokens=[3, 4, 5]), "steering[0].vector.positions"),
        "a kind without rows": (edit(named, kind="add"), "steering[0].vector"),
        "a position that was not captured": (edit(named, tokens=[4, 50]), "steering[0].tokens"),
        "another number of positions": (edit({**named, "positions": [1]}), "steering[0].vector.positions"),
        "a position outside of the prompt": (edit({**named, "positions": [1, 40]}), "steering[0].vector.positions"),
        "a point that was not captured": (edit(named, point="pre_attn"), "steering[0].vector"),
        "an id that does not exist": (edit({"capture": "x" * 43}), "steering[0].vector.capture"),
        "an id of another type": (edit({"capture": 3}), "steering[0].vector.capture"),
        "a misspelt key": (edit({**named, "position": [1, 2]}), "steering[0].vector"),
    }
    for case, (bad, field) in wrong.items():
        response = client.post("/v1/completions", json={**GREEDY, "prompt": CORRUPT, "steering": [bad]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), (case, response.text)
    assert client.delete(f"/v1/captures/{report['id']}").status_code == 204
    response = client.post("/v1/completions", json={**GREEDY, "prompt": CORRUPT, "steering": [edit(named)]})
    assert response.status_code == 400 and "no such capture" in response.text


def test_rows_of_a_module(client: httpx.Client) -> None:
    """Catches a probe of another name, an edit that is dropped because its module is unknown, and no similar name."""
    probes = {name: np.random.default_rng(i).standard_normal(HIDDEN).astype("f4") for i, name in enumerate("ab")}
    body = {"name": "rows", "probes": {name: pack_vector(probe) for name, probe in probes.items()}}
    client.post("/v1/steering/modules", json=body).raise_for_status()
    first, second = (logprobs(client, steering=[edit(pack_vector(probes[name]))]) for name in "ab")
    assert logprobs(client, steering=[edit({"module": "rows/b"})]) == second != first
    # Every kind that has a vector takes the name, also behind a gate and with a strength that can be changed.
    readout = {"r": {"probe": pack_vector(probes["a"]), "point": "pre_attn", "layer": 0}}
    more: dict[str, Any] = {"when": {"readout": "r", "above": -1e9}, "live": "s"}
    for kind in ({"kind": "add"}, {"kind": "add_normed"}, {"kind": "ablate"}, {"kind": "clamp", "low": 3.0}):
        for fields in ({}, more):
            changed = [
                logprobs(client, steering=[edit(vector, **kind, **fields)], readouts=readout)
                for vector in (pack_vector(probes["b"]), {"module": "rows/b"}, pack_vector(probes["a"]))
            ]
            assert changed[0] == changed[1] != changed[2], (kind, fields)
    assert LAYERS > 2
    for name in ("rows/c", "gone/a", "row/a", "rows"):
        response = client.post(
            "/v1/completions", json={**GREEDY, "prompt": CORRUPT, "steering": [edit({"module": name})]}
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "steering[0].vector.module"
        assert ("did you mean rows?" in response.text) is (name == "row/a")
    client.delete("/v1/steering/modules/rows").raise_for_status()


def test_an_expression_over_modules(client: httpx.Client) -> None:
    """Catches a dose taken for a strength, terms of other tokens or layers, and names that are not modules."""
    draw = np.random.default_rng(4).standard_normal
    calm, formal = (draw(HIDDEN).astype("f4") for _ in range(2))
    layer = LAYERS - 1
    about = {"provenance": {"stream": f'{{"1": 6.0, "{layer}": 8.0}}'}}
    base = {"post_block": {"1": pack_vector(calm), str(layer): pack_vector(formal)}}
    for name, body in {"calm": {"base": base, **about}, "raw": {"base": base}}.items():
        assert client.post("/v1/steering/modules", json={"name": name, **body}).status_code == 200
    try:
        add = [
            {"kind": "add", "point": "post_block", "layers": n, "strength": dose * length / float(np.linalg.norm(row)),
             "vector": pack_vector(row), "tokens": tokens}
            for dose, tokens in ((0.7, "prompt"), (-0.2, "all"))
            for n, row, length in ((1, calm, 6.0), (layer, formal, 8.0))
        ]  # fmt: skip
        ablate = {"kind": "ablate", "point": "post_block", "layers": 1, "vector": pack_vector(calm)}
        ablate |= {"when": {"readout": "mood", "above": -1e9}}
        readouts = {"mood": {"probe": pack_vector(calm), "point": "post_block", "layer": 0}}
        whole = logprobs(client, steering=add)
        np.testing.assert_allclose(logprobs(client, steering="0.7 calm@prompt - 0.2 calm"), whole, atol=1e-4)
        assert logprobs(client, steering="0.7 calm@prompt") != whole
        # The same doses as edits of the module's vectors, and those of all tokens as a reference to the module.
        named = [{**each, "dose": 0.7, "vector": {"module": "calm"}} for each in add[:2]]
        named = [{key: item for key, item in each.items() if key != "strength"} for each in named]
        for fields in (
            {"steering": [*named, *({**each, "dose": -0.2, "tokens": "all"} for each in named)]},
            {"steering": named, "steering_modules": [{"module": "calm", "dose": -0.2}]},
        ):
            np.testing.assert_allclose(logprobs(client, **fields), whole, atol=1e-4)
        gated = "ablate raw when mood > -1000000000"
        sent = [ablate, {**ablate, "layers": layer, "vector": pack_vector(formal)}]
        expected = logprobs(client, steering=sent, readouts=readouts)
        np.testing.assert_allclose(logprobs(client, steering=gated, readouts=readouts), expected, atol=1e-4)
        refused = {
            "0.5 raw": "gives a dose of raw, which does not tell the length of the stream at layer 1",
            "0.5 nobody": "unknown module 'nobody'",
            "calm calm": "cannot be read from ' calm' on",
            "calm when anger > 1": "'anger' is not among the request's readouts",
        }
        for text, problem in refused.items():
            response = client.post("/v1/completions", json={**GREEDY, "prompt": CORRUPT, "steering": text})
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"].startswith("steering"), response.text
            assert problem in error["message"]
    finally:
        for name in ("calm", "raw"):
            assert client.delete(f"/v1/steering/modules/{name}").status_code in (200, 204)
