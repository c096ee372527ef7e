# SPDX-License-Identifier: Apache-2.0
"""The request fields of RhizoNymph/vllm: translation, effects compared with HF Transformers, and the middleware."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI, HTTPException, Request

from examples.peers import nnterp, probe_hook, rhizonymph, transformer_lens, vllm_lens
from tests.capture.captured import captured
from tests.docs.runner import offline_blocks
from tests.peers.conftest import hidden_states, hooked, logits_of, replaced
from vllm_steer import CaptureSpec, SteeringError, open_captures
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.params import FIELDS, compile_fields
from vllm_steer.peers.rhizonymph import LLM, FilesystemCaptureRequest, SamplingParams, translate_fields
from vllm_steer.peers.rhizonymph.http import DYNAMIC, RhizonymphMiddleware

PROBE = {"hook": "post_block", "layer": 1, "vector": [1.0, 0.0]}
GATE: dict[str, Any] = {
    "when": {"kind": "probe", "probe": PROBE, "threshold": 0.5, "sharpness": 2.0},
    "scope": "next_step",
    "apply": {"kind": "add", "steer": {"hook": "post_attn", "layer": 2, "vector": [0.0, 1.0]}, "strength": 3.0},
}
SITE: dict[str, Any] = {"layer": 1, "hook": "post_block", "dest_position": 2, "source_inline": [1.0, 2.0]}
PACKED = {
    "dtype": "float32", "shape": [2, 2], "layer_indices": [3, 1], "scales": [1.0, 0.5],
    "data": base64.b64encode(np.array([[1, 2], [3, 4]], "<f4").tobytes()).decode(),
}  # fmt: skip
TABLE = {name: PACKED[name] for name in ("dtype", "shape", "data")}


def inline(**packed: Any) -> dict[str, Any]:
    """Return a source of the fork with vectors."""
    return {"kind": "inline", "packed": packed}


TWO = inline(post_block={name: each for name, each in PACKED.items() if name != "scales"})


def packed(layer: int, row: Any) -> dict[str, Any]:
    """Return one vector as the fork's clients send it."""
    data = base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()
    return {"dtype": "float32", "shape": [1, len(row)], "layer_indices": [layer], "data": data}


def floats(vector: Any) -> list[float]:
    """Return the numbers of a packed vector."""
    return list(np.frombuffer(base64.b64decode(vector["data"]), "<f4"))


def test_inline_sources_and_the_default_sharpness() -> None:
    """Catches the fork's own form of sources refused, rows of another layer, and a hard gate where its gate is soft."""
    gate = {
        "when": {"kind": "probe", "probe": inline(pre_attn=packed(0, [5, 6])), "threshold": 0.5},
        "apply": {"kind": "add", "steer": TWO, "strength": 2.0},
    }
    fields = translate_fields({"steering": [{**gate, "scope": "this_token"}, {**gate, "scope": "rest_of_request"}]})
    first, second, latched, _ = fields["steering"]
    assert [(each["layers"], floats(each["vector"])) for each in (first, second)] == [(3, [1, 2]), (1, [3, 4])]
    assert first["when"] == {"readout": "rhizonymph_gate_0", "above": 0.5, "window": "token", "sharpness": 1.0}
    assert "sharpness" not in latched["when"]
    readout = fields["readouts"]["rhizonymph_gate_0"]
    assert (readout["point"], readout["layer"], floats(readout["probe"])) == ("pre_attn", 0, [5, 6])
    compile_fields(fields)
    scaled = {"apply": {"kind": "add", "steer": inline(post_block=PACKED)}}
    with pytest.raises(SteeringError, match=r"apply\.steer\.packed\.post_block\.scales: are not supported"):
        translate_fields({"steering": [scaled]})


ODD = [None, True, 0, 1.5, "x", "", [], [1], [[]], {}, {"kind": []}, {"a": 1}, "\ud800"]
BODY: dict[str, Any] = {
    "steering": [GATE, {"apply": {"kind": "add", "steer": inline(post_block=packed(1, [1, 2]))}}],
    "readouts": {},
    "patch": [{**SITE, "source_inline": 0}],
    "patch_vectors": TABLE,
    "steering_vectors": {"post_block": PACKED},
    "steering_name": "calm",
    "capture_wait": True,
    "capture": {"memory": {"hooks": {"post_block": {"layers": [1]}}, "request_id": "a"}},
}


def changes_of(value: Any) -> Iterator[Any]:
    """Yield copies of a value with an odd value in the place of one of its parts."""
    yield from ODD
    if isinstance(value, dict):
        for key in value:
            yield {name: each for name, each in value.items() if name != key}
            for changed in changes_of(value[key]):
                yield {**value, key: changed}
    elif isinstance(value, list):
        for i in range(len(value)):
            for changed in changes_of(value[i]):
                yield [*value[:i], changed, *value[i + 1 :]]


def test_odd_values_end_in_errors_with_a_field() -> None:
    """Catches a TypeError, which a server answers with 500 or without the field, for a value of another type."""
    compile_fields(translate_fields(BODY))
    refused = 0
    for body in changes_of(BODY):
        if isinstance(body, dict):
            try:
                compile_fields({name: each for name, each in translate_fields(body).items() if name in FIELDS})
            except SteeringError as error:
                refused += bool(error.field)
    assert refused > 500


def test_gates_become_edits_with_conditions() -> None:
    """Catches a scope, a threshold or a strength that is dropped, and a gate read at the site that it steers."""
    fields = translate_fields({"steering": [GATE, {"apply": {**GATE["apply"], "kind": "clamp", "min": -1, "max": 2}}]})
    gated, always = fields["steering"]
    assert gated == {
        "kind": "add", "point": "post_attn", "layers": 2, "vector": [0.0, 1.0], "strength": 3.0, "tokens": "generated",
        "when": {"readout": "rhizonymph_gate_0", "above": 0.5, "window": "previous", "sharpness": 2.0},
    }  # fmt: skip
    assert (always["kind"], always["low"], always["high"], "when" in always) == ("clamp", -1, 2, False)
    readout = fields["readouts"]["rhizonymph_gate_0"]
    assert (readout["probe"], readout["point"], readout["layer"]) == ([1.0, 0.0], "post_block", 1)
    assert compile_fields(fields)


def test_other_fields_are_translated() -> None:
    """Catches layers or scales of packed hooks in another order, a patch at another token, and changed own fields."""
    own = {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0, 1.0]}
    fields = translate_fields(
        {
            "steering": [own],
            "patch": [{**SITE, "alpha": 0.25}, {**SITE, "source_inline": 1}],
            "patch_vectors": TABLE,
            "decode_steering_vectors": {"post_block": PACKED, "pre_attn": {"2": [1.0, 1.0]}},
            "steering_name": "calm",
            "capture_wait": True,
            "capture": {
                "filesystem": {"hooks": {"post_block": {"layers": [1]}}, "request_id": "a", "layout": "packed"},
                "memory": {"hooks": {"post_block": [2]}},
            },
            "temperature": 0,
        }
    )
    first, second, third = fields["steering"]
    assert first is own
    assert (second["kind"], second["strength"], second["tokens"]) == ("replace", 0.25, [2])
    assert floats(third["vector"]) == [3, 4]
    vectors = fields["decode_steering_vectors"]
    assert {layer: each["scale"] for layer, each in vectors["post_block"].items()} == {"3": 1.0, "1": 0.5}
    assert floats(vectors["post_block"]["1"]["vector"]) == [3, 4]
    assert fields["steering_modules"] == ["calm"]
    assert fields["capture"]["filesystem"] == {"hooks": {"post_block": [1]}, "tag": "a", "layout": "packed"}
    assert set(fields) == {"steering", "decode_steering_vectors", "steering_modules", "capture", "temperature"}
    compile_fields({name: fields[name] for name in ("steering", "decode_steering_vectors", "capture")})


def test_a_misspelt_key_of_a_patch_is_named() -> None:
    """Catches a refusal that lists keys, of which some are refused as well, and does not say which one is wrong."""
    with pytest.raises(SteeringError, match=r"^patch\[0\]: unknown key 'position'; use layer, .*, alpha$"):
        translate_fields({"patch": [{**SITE, "position": 2}]})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"steering": [GATE, {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0]}]}, "steering[1]"),
        ({"steering": [{**GATE, "scope": "rest_of_conversation"}]}, "steering[0].scope"),
        ({"steering": [{**GATE, "scope": "ever"}]}, "steering[0].scope"),
        ({"steering": [{**GATE, "apply": {"kind": "attenuate", "strength": 1.0}}]}, "steering[0].apply.kind"),
        ({"steering": [{**GATE, "if": 1}]}, "steering[0]"),
        ({"steering": [{**GATE, "when": {"kind": "always", "threshold": 1.0}}]}, "steering[0].when"),
        ({"steering": [{"apply": {**GATE["apply"], "low": 1.0}}]}, "steering[0].apply.low"),
        ({"steering": [{"apply": {"kind": "add", "steer": "calm"}}]}, "steering[0].apply.steer"),
        ({"patch": [{**SITE, "source_run": "a"}]}, "patch[0].source_run"),
        ({"patch": [{**SITE, "source_module": "a"}]}, "patch[0].source_module"),
        ({"patch": [{**SITE, "mask": {"indices": [1]}}]}, "patch[0].mask"),
        ({"patch": [{**SITE, "source_inline": 0}]}, "patch[0].source_inline"),
        ({"patch": [{**SITE, "dest_position": [1]}]}, "patch[0].dest_position"),
        ({"patch_vectors": {}}, "patch_vectors"),
        ({"patch": [{**SITE, "source_inline": 2}], "patch_vectors": TABLE}, "patch[0].source_inline"),
        ({"patch": [SITE] * 5000}, "patch"),
        ({"patch": [SITE], "steering": 5}, "steering"),
        ({"steering": [GATE], "readouts": [1]}, "readouts"),
        ({"steering": [{"apply": {"kind": "add", "steer": TWO}}] * 2049}, "steering[2048]"),
        ({"steering": [{**GATE, "when": {"kind": "probe", "probe": TWO}}]}, "steering[0].when.probe"),
        ({"steering": [{"apply": {"kind": "add", "steer": {"kind": "name", "name": "x"}}}]}, "steering[0].apply.steer"),
        ({"steering_vectors": dict.fromkeys(map(str, range(2049)), PACKED)}, "steering_vectors"),
        ({"prefill_steering_clamps": {}}, "prefill_steering_clamps"),
        ({"sae_clamp_specs": []}, "sae_clamp_specs"),
        ({"steering_vectors": {"post_block": {**PACKED, "scales": [1.0]}}}, "steering_vectors.post_block.scales"),
        (
            {"steering_vectors": {"pre_attn": {**PACKED, "layer_indices": [1, 1]}}},
            "steering_vectors.pre_attn.layer_indices",
        ),
        ({"steering_vectors": {"post_block": {**PACKED, "shape": [2, 3]}}}, "steering_vectors.post_block.data"),
        ({"steering_clamps": {}}, "steering_clamps"),
        ({"steering_module_ref": "a"}, "steering_module_ref"),
        ({"conversation_id": "a"}, "conversation_id"),
        ({"capture_wait": False}, "capture_wait"),
        (
            {"capture": {"memory": {"hooks": {"pre_attn": {"ranges": [[0, 2]]}}}}},
            "capture.memory.hooks.pre_attn.ranges",
        ),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], field: str) -> None:
    """Catches fields that are accepted and ignored, and errors without their path."""
    with pytest.raises(SteeringError) as caught:
        translate_fields(fields)
    assert caught.value.field == field


def test_requests_choose_their_layout(tmp_path: Path) -> None:
    """Catches a layout of a request that is ignored, and files that the reader does not open."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout="per_request")
    request = FilesystemCaptureRequest(request_id="mine", hooks={"post_block": {"layers": [1]}}, layout="packed")
    spec = request.to_spec()
    assert spec["hooks"] == {"post_block": [1]}
    options = {name: spec[name] for name in ("tag", "layout")}
    paths = [
        consumer.accept(captured(request_id=name, options=chosen))["path"]
        for name, chosen in (("a", options), ("b", {}))
    ]
    consumer.close()
    assert [Path(path).suffix for path in paths] == [".arrows", ".safetensors"]
    assert {each.request_id: each.tag for each in open_captures(tmp_path)} == {"a": "mine", "b": None}
    with pytest.raises(SteeringError, match="layout"):
        consumer.check(CaptureSpec(hooks={"post_block": [1]}, options={"layout": "scattered"}), "capture.filesystem")


@pytest.mark.slow
def test_gates_and_patches_act_as_in_transformers(engine: Any, hf: Any) -> None:
    """Catches a gate that lags, that reads another site, or that is always open, and a patch of another row."""
    rng = np.random.default_rng(4)
    probe, vector = rng.standard_normal((2, 64)).astype("f4")
    prompts = ["one", "two and three", "a long prompt about nothing"]
    tokens = [list(engine.get_tokenizer().encode(each)) for each in prompts]
    gate = {
        "when": {"kind": "probe", "probe": inline(post_block=packed(1, probe)), "threshold": 0.0},
        "scope": "this_token",
        "apply": {"kind": "add", "steer": inline(post_block=packed(2, vector)), "strength": 2.0},
    }  # fmt: skip
    site = {**SITE, "dest_position": 0, "source_inline": vector.tolist()}
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 5}
    gated = [SamplingParams(**fields, steering=[gate]) for _ in prompts]
    patched = [SamplingParams(**fields, patch=[site]) for _ in prompts]
    outputs = engine.generate([{"prompt_token_ids": each} for each in tokens * 2], gated + patched, use_tqdm=False)
    opened = 0.0
    for output in outputs[:3]:
        count = len(output.prompt_token_ids)
        whole = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        fires = torch.sigmoid(hidden_states(hf, whole)[2] @ torch.from_numpy(probe))
        fires[:count] = 0.0
        opened += float(fires.sum()) / len(fires)

        pushed = 2.0 * fires[None, :, None] * torch.from_numpy(vector)
        compare(output, hf, lambda rows, pushed=pushed: rows + pushed, 2)
    assert 0 < opened < 3
    for output in outputs[3:]:
        compare(output, hf, replaced(0, torch.from_numpy(vector)), 1)


def compare(output: Any, hf: Any, change: Any, layer: int) -> None:
    """Compare the log-probabilities of an output's tokens with HF's with changed outputs of a layer."""
    whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with hooked(hf.model.layers[layer], change):
        logprobs = logits_of(hf, [whole[:-1]])[0].log_softmax(-1)
    for i, token in enumerate(output.outputs[0].token_ids):
        right = float(logprobs[len(output.prompt_token_ids) - 1 + i, token])
        assert output.outputs[0].logprobs[i][token].logprob == pytest.approx(right, abs=2e-3)


TEXT = len("Once upon a time")
EXAMPLES: dict[Any, Callable[[Any], bool]] = {
    nnterp: lambda shown: (
        (shown["rows"], shown["lens"][:2], shown["scope"][:2]) == ((4, 1, 64), (1, 4), (1, 2))
        and shown["change"] > 1e-3
    ),
    probe_hook: lambda shown: shown == {"decode": (3, 64), "prefill": (TEXT, 64)},
    rhizonymph: lambda shown: shown["plain"] != shown["patched"] and 0 < max(shown["gates"]) <= 1,
    transformer_lens: lambda shown: shown["cached"] == 4 and shown["before"] != shown["after"],
    vllm_lens: lambda shown: shown["shape"] == (1, TEXT + 3, 64) and shown["plain"] != shown["steered"],
}
"""Examples, and whether what one shows has the right shapes and effects."""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_the_examples_run(engine: Any, example: Any) -> None:
    """Catches an example that no longer runs, and steering or a patch without effect."""
    shown = example.run(engine)
    assert EXAMPLES[example](shown), shown


@pytest.mark.slow
@pytest.mark.parametrize("page", ["nnterp", "transformer-lens", "vllm-probe-hook", "rhizonymph"])
def test_the_pages_run(engine: Any, page: str) -> None:
    """Catches code of a page that no longer runs."""
    namespace: dict[str, Any] = {"engine": engine}
    for block in offline_blocks(f"docs/peers/{page}.md"):
        code = block.code.replace('LLM("demo/model", max_steering_configs=8)', "engine")
        exec(compile(code.replace('"demo/model"', "engine"), block.file, "exec"), namespace)  # noqa: S102
    assert len(namespace) > 3


def test_arguments_of_the_engine_are_checked() -> None:
    """Catches shapes of arguments that fail later, or without their name."""
    for arguments, field in (
        ({"capture_consumers": [{"name": "filesystem", "options": {}}]}, "capture_consumers[0]"),
        ({"capture_consumers": [{"name": "memory"}, {"name": "memory"}]}, "capture_consumers[1]"),
        ({"max_steering_configs": 0}, "max_steering_configs"),
    ):
        with pytest.raises(SteeringError) as caught:
            LLM("nowhere", **arguments)
        assert caught.value.field == field


@pytest.fixture
def http() -> httpx.AsyncClient:
    app = FastAPI()

    async def answer(request: Request) -> Any:
        if request.url.path == DYNAMIC:  # which vLLM does not have
            raise HTTPException(404)
        body = await request.json() if request.method == "POST" else {}
        choice: dict[str, Any] = {"index": 0, "text": "x"}
        if "capture" in body:
            choice["capture_results"] = {"filesystem": {"status": "ok", "data": {"path": "/acts/a.safetensors"}}}
        return {"choices": [choice], "received": body, "path": request.url.path}

    app.add_api_route("/{path:path}", answer, methods=["GET", "POST"])
    app.add_middleware(RhizonymphMiddleware)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_bodies_and_paths_are_translated(http: httpx.AsyncClient) -> None:
    """Catches fields and routes that reach the server untranslated, and results that stay in the choices only."""
    capture = {"filesystem": {"hooks": {"post_block": [1]}, "request_id": "a"}}
    body = {"prompt": "x", "steering": [GATE], "capture": capture}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["received"]["steering"][0]["when"]["readout"] in answer["received"]["readouts"]
    assert answer["capture_results"]["filesystem"]["payload"] == ["/acts/a.safetensors"]
    vectors = {"post_block": {"1": [1.0]}}
    answer = (await http.post("/v1/steering/modules/register", json={"name": "a", "vectors": vectors})).json()
    assert answer["path"] == "/v1/steering/modules"
    assert answer["received"] == {"name": "a", "base": vectors}
    answer = (await http.post("/v1/steering/set", json={"decode_vectors": {"post_block": PACKED}})).json()
    assert list(answer["received"]["decode"]["post_block"]) == ["3", "1"]
    assert (await http.get("/v1/steering")).json()["path"] == "/v1/steering/set"
    assert (await http.get("/v1/steering/layers")).json()["path"] == "/v1/steering/capabilities"
    own = {"prompt": "x", "steering_vectors": vectors}
    assert (await http.post("/v1/completions", json=own)).json()["received"] == own


async def test_http_refusals(http: httpx.AsyncClient) -> None:
    """Catches refusals without status 400 or without the field."""
    for method, path, body, field in (
        ("POST", "/v1/completions", {"conversation_id": "a"}, "conversation_id"),
        ("POST", "/v1/chat/completions", {"steering": [{**GATE, "scope": "ever"}]}, "steering[0].scope"),
        ("POST", "/v1/steering/set", {"vectors": {}, "base": {}}, "vectors"),
        ("GET", "/v1/steering/dynamic", None, "dynamic"),
    ):
        answer = await http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
