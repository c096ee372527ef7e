# SPDX-License-Identifier: Apache-2.0
"""Rows that a request names, looked up in a store and a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import memory
from tests.server.fakes import HIDDEN, engine_context
from vllm_steer.capture.files.tensors import encode_request
from vllm_steer.capture.results import CapturedRequest, SiteRows
from vllm_steer.errors import SteeringError
from vllm_steer.registry.directions import Directions
from vllm_steer.request import Edit, parse_capture, parse_fields
from vllm_steer.server.capture_store import CaptureStore, StoreLimits
from vllm_steer.server.http.request_context import RequestContext
from vllm_steer.server.http.row_sources import take_store_option, with_rows

ROWS = torch.arange(4.0 * HIDDEN).reshape(4, HIDDEN) + 1
((_, SPEC),) = parse_capture({"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}})
SITE = SiteRows(np.arange(4), ROWS)
CAPTURED = CapturedRequest("a", 0, "tiny", (5, 6, 7, 8), (9,), SPEC, {("post_block", 1): SITE}, "ok", None)
MINE, OTHERS = b"mine", b"others"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CaptureStore]:
    made = CaptureStore(StoreLimits(1 << 20, 1 << 20, 600.0), tmp_path.name)
    yield made
    made.close()


def resolve(store: CaptureStore | None, vector: Any, owner: bytes = MINE, **changes: Any) -> np.ndarray:
    opener = None if store is None else lambda: store
    context = RequestContext(engine=engine_context(), owner=owner, capture_store=opener)
    edit = {"kind": "replace", "point": "post_block", "layers": 1, "vector": vector, "tokens": [1, 2], **changes}
    (parsed,) = parse_fields(with_rows({"steering": [edit]}, context))
    return parsed.vector


def test_only_the_owner_can_name_a_capture(store: CaptureStore) -> None:
    """Catches rows of another key's capture, and a capture that is gone and leaves the request unpatched."""
    named = {"capture": store.put(b"".join(encode_request(CAPTURED)), "safetensors", MINE)}
    assert np.array_equal(resolve(store, named), ROWS[1:3].numpy())
    with pytest.raises(SteeringError, match="no such capture"):
        resolve(store, named, OTHERS)
    store.delete(named["capture"], MINE)
    with pytest.raises(SteeringError, match="no such capture"):
        resolve(store, named)


def test_rows_of_other_positions(store: CaptureStore) -> None:
    """Catches rows in the order of the capture instead of the one that is named, and one position off.

    Tokens in another order would be sorted, and each would get the row of another one.
    """
    named = {"capture": store.put(b"".join(encode_request(CAPTURED)), "safetensors", MINE)}
    with pytest.raises(SteeringError, match="ascending order") as error:
        resolve(store, {**named, "positions": [3, 0]}, tokens=[2, 1])
    assert error.value.field == "steering[0].tokens[1]"
    assert np.array_equal(resolve(store, {**named, "positions": [3, 0]}), ROWS[[3, 0]].numpy())
    for i in range(4):
        assert np.array_equal(resolve(store, {**named, "positions": [i - 4]}, tokens=[0]), ROWS[i].numpy())
    assert np.array_equal(resolve(store, {**named, "positions": [2, 1, 0]}, tokens=[[5, 8]]), ROWS[[2, 1, 0]].numpy())
    for positions, tokens in (([1], [1, 2]), ([1, 9], [1, 2]), ([1], "prompt"), ("x", [1]), ([1], None)):
        with pytest.raises(SteeringError, match="positions"):
            resolve(store, {**named, "positions": positions}, tokens=tokens)
    with pytest.raises(SteeringError, match="position -5 is outside of the captured prompt of 4 tokens"):
        resolve(store, {**named, "positions": [-5]}, tokens=[0])
    with pytest.raises(SteeringError) as refused:
        resolve(store, {**named, "positions": [0]}, tokens="x")
    assert refused.value.field == "steering[0].tokens"


@pytest.mark.parametrize("stop", [1 << 29, 2_000_000_000])
@pytest.mark.parametrize("positions", [None, [0]])
def test_long_intervals_are_not_listed(stop: int, positions: list[int] | None, store: CaptureStore) -> None:
    """Catches a body of 200 bytes that lists two billion positions, which fills the memory of the server."""
    named = {"capture": store.put(b"".join(encode_request(CAPTURED)), "safetensors", MINE), "positions": positions}
    with memory.at_most(256), pytest.raises(SteeringError, match=r"was not captured|for each token|one by one"):
        resolve(store, named, tokens=[[0, stop]])


def test_sources_without_rows_are_refused(store: CaptureStore) -> None:
    """Catches a report that is read as rows, a batch run without a store, a module that is gone, and a lost dose."""
    report = store.put(b"{}", "json", MINE)
    cases: list[tuple[Any, Any, str]] = [
        (store, {"capture": report}, "keeps no rows"),
        (None, {"capture": report}, "stores no captures"),
        (store, {"module": "gone/probe"}, "unknown module"),
        (store, {"module": "gone"}, "unknown module"),
        (store, {"module": 1}, "must be a name"),
        (store, {"module": ["gone", 2.0]}, 'must be a name, such as "calm" or'),
        (store, {"module": {"module": "gone", "dose": 2.0}}, 'must be a name, such as "calm" or'),
        (store, {"module": "a/b", "capture": "x"}, "unknown key"),
    ]
    for given, vector, message in cases:
        with pytest.raises(SteeringError, match=message) as refused:
            resolve(given, vector)
        assert refused.value.field.startswith("steering[0].vector")
    for kind, vector, message in (
        ("replace", {"module": "a/b"}, "as plain dicts or JSON; give the vector itself"),
        ("add", {"module": "a/b"}, "as plain dicts or JSON; give the vector itself"),
        ("add", {"capture": "x"}, "only replace takes stored rows"),
    ):
        with pytest.raises(SteeringError, match=message):
            Edit(kind=kind, point="post_block", layers=1, vector=vector)


def test_doses_of_modules() -> None:
    """Catches a guessed length or that of another layer, a dose taken for a strength, and a probe's dose elsewhere.

    Each of these requests would be steered by another amount than it says.
    """
    engine = engine_context()
    vector = np.arange(1.0, HIDDEN + 1, dtype=np.float32)
    base = {"post_block": {n: {"vector": vector, "scale": n + 1} for n in range(3)}}
    probes = {"joy": {"weights": vector, "point": "post_block", "layer": 1}, "bare": vector}
    streams = {"stream": '{"0": 2.0, "1": 4.0}'}
    engine.registry.register("calm", base=base, probes=probes, provenance=streams)
    engine.registry.register("told", base=base, probes=probes, provenance={"stream": '{"0": 2.0}'})
    digest = engine.registry.snapshot().index.modules["calm"][-1].digest
    context = RequestContext(engine=engine, owner=MINE, capture_store=None)

    def edit(module: str, **changes: Any) -> Edit:
        sent = {"kind": "add", "point": "post_block", "layers": 1, "vector": {"module": module}, **changes}
        (made,) = parse_fields(with_rows({"steering": [sent]}, context))
        return made

    added = 0.5 * 4.0 * vector / np.linalg.norm(vector)
    for module in ("calm", "calm/joy"):
        made = edit(module, dose=0.5, tokens="prompt")
        np.testing.assert_allclose(made.strength * made.vector, added, rtol=1e-6)
        assert made.tokens.to_wire() == "prompt"
    live = edit("calm", strength=3, live="mood")
    np.testing.assert_allclose(live.vector * live.strength, 3 * 2 * vector, rtol=1e-6)
    assert live.live == "mood"
    assert np.array_equal(edit("calm/joy", layers=0).vector, vector)
    for module, changes, field, problem in (
        ("calm", {"layers": 2}, "dose", "the vector of post_block[2] does not tell; use a vector of a file made with"),
        ("told", {}, "dose", "the vector of post_block[1] does not tell"),
        ("told/joy", {}, "dose", "the vector of post_block[1] does not tell"),
        (f"{digest}/joy", {}, "vector.module", "needs the name of the module"),
        ("calm", {"strength": 1.0}, "dose", "cannot be combined with strength"),
        ("calm", {"kind": "add_normed"}, "dose", "is not a parameter of add_normed"),
        ("calm", {"layers": [0, 1]}, "layers", "send one edit for each layer"),
        ("calm/joy", {"layers": 0}, "layers", "has no vector of layer 0"),
        ("calm/bare", {}, "vector.module", "has no point, layer or length, so a dose has no meaning"),
    ):
        with pytest.raises(SteeringError) as refused:
            edit(module, **{"dose": 0.5, **changes})
        assert (refused.value.field, problem in refused.value.problem) == (f"steering[0].{field}", True), refused.value


def test_the_option_store() -> None:
    """Catches an option that reaches a consumer, which does not know it, and a value that is not a boolean."""
    spec = {"hooks": {"post_block": [1]}}
    fields, stored = take_store_option({"capture": {"memory": {**spec, "store": True}, "logging": spec}}, "memory")
    assert stored and fields == {"capture": {"memory": spec, "logging": spec}}
    assert take_store_option({"capture": {"memory": spec}}, "memory")[1] is False
    with pytest.raises(SteeringError, match="store"):
        take_store_option({"capture": {"memory": {**spec, "store": 1}}}, "memory")


def test_edits_of_an_expression_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches modules that are converted although the request has too many edits, which takes seconds of a server."""
    engine = engine_context()
    base = {"post_block": {layer: [1.0] * HIDDEN for layer in range(3)}}
    engine.registry.register("calm", base=base, provenance={"stream": '{"0": 2.0, "1": 2.0, "2": 2.0}'})
    converted: list[str] = []
    real = Directions.of

    def of(*args: Any) -> Directions:
        converted.append(args[2])
        return real(*args)

    monkeypatch.setattr(Directions, "of", of)
    context = RequestContext(engine=engine, owner=MINE, capture_store=None)
    assert len(with_rows({"steering": " + ".join(["calm"] * 85)}, context)["steering"]) == 255
    assert converted == ["calm"]
    with pytest.raises(SteeringError, match="means 258 edits") as error:
        with_rows({"steering": " + ".join(["calm"] * 86)}, context)
    assert error.value.field == "steering" and converted == ["calm"]
