# SPDX-License-Identifier: Apache-2.0
"""Tests of modules and global steering in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.tiny import direction
from vllm_steer import Edit, SteeringError

A, B, C = direction(1), direction(2), direction(3)
PROMPT = prompt(1, 2, 3, 4)
SITE = {"post_block": {1: A}}


def clamp(vector: np.ndarray, low: float = 3.0) -> Edit:
    return Edit(kind="clamp", point="post_block", layers=1, vector=vector, low=low)


def add(vector: np.ndarray, strength: float = 1.0) -> Edit:
    return Edit(kind="add", point="post_block", layers=1, vector=vector, strength=strength)


def scores(llm: Any, **fields: Any) -> np.ndarray:
    """Return the log-probabilities of every token at every step. Only equal programs give equal scores."""
    return logprobs_of(run(llm, [PROMPT], [params(**fields)])[0])


@pytest.fixture(autouse=True)
def empty(llm: Any) -> Iterator[None]:
    yield
    llm.steering.clear()
    for module in llm.steering.list().data:
        llm.steering.delete(module.name)


@pytest.mark.feature("modules by name and global steering", "steer")
def test_module_equals_its_edits(llm: Any) -> None:
    """Catches mixed-up tiers, a scale that is dropped or partly applied, and a lost order."""
    llm.steering.register("m", base=SITE, prefill={"pre_attn": {2: B}}, decode={"pre_attn": {3: C}}, edits=[clamp(B)])
    inline = scores(
        llm,
        steering_vectors={"post_block": {1: {"vector": A, "scale": 0.5}}},
        prefill_steering_vectors={"pre_attn": {2: {"vector": B, "scale": 0.5}}},
        decode_steering_vectors={"pre_attn": {3: {"vector": C, "scale": 0.5}}},
        steering=[Edit(kind="clamp", point="post_block", layers=1, vector=B, low=3.0, strength=0.5)],
    )
    assert np.array_equal(scores(llm, steering_modules=[("m", 0.5)]), inline)
    assert not np.array_equal(scores(llm, steering_modules=["m"]), inline)
    assert np.array_equal(scores(llm, steering_modules=[("m", 0.0)]), scores(llm))


def test_order_is_global_then_modules_then_request(llm: Any) -> None:
    """Catches another order. Clamps on directions that are not orthogonal do not commute, as the control shows."""
    parts = {name: clamp(direction(seed), low=6.0) for name, seed in (("set", 4), ("one", 5), ("two", 6), ("own", 7))}
    llm.steering.register("one", edits=[parts["one"]])
    llm.steering.register("two", edits=[parts["two"]])
    llm.steering.set(edits=[parts["set"]])
    composed = scores(llm, steering_modules=["one", "two"], steering=[parts["own"]])
    llm.steering.clear()
    assert np.array_equal(scores(llm, steering=[parts[name] for name in ("set", "one", "two", "own")]), composed)
    for other in (("one", "set", "two", "own"), ("set", "two", "one", "own"), ("set", "one", "own", "two")):
        assert not np.array_equal(scores(llm, steering=[parts[name] for name in other]), composed)


@pytest.mark.feature("modules by name and global steering", "steer")
def test_global_steering_reaches_plain_requests(llm: Any) -> None:
    """Catches plain requests without global steering, and cached blocks that outlive it."""
    plain = scores(llm)
    llm.steering.set(base=SITE)
    assert np.array_equal(scores(llm), scores_of_inline := scores_inline(llm, plain))
    llm.steering.set(decode={"pre_attn": {2: B}})  # SITE stays
    assert not np.array_equal(scores(llm), scores_of_inline)
    assert not np.array_equal(scores(llm), plain)
    llm.steering.clear()
    assert np.array_equal(scores(llm), plain)


def test_global_steering_reaches_engine_requests(llm: Any) -> None:
    """Catches an EngineCoreRequest of a caller that runs without global steering."""
    engine = llm.llm_engine
    llm.steering.register("m", base={"post_block": {1: C}})
    llm.steering.set(base=SITE)
    for fields in ({}, {"steering_modules": ["m"]}):
        made = engine.input_processor.process_inputs(
            "made", PROMPT, params(**fields), supported_tasks=engine.get_supported_tasks()
        )
        engine.add_request("made", made, params())
        outputs = [output for _ in range(20) if engine.has_unfinished_requests() for output in engine.step()]
        (finished,) = [output for output in outputs if output.finished]
        assert np.array_equal(logprobs_of(finished), scores(llm, **fields))
        assert finished.steering_applied == run(llm, [PROMPT], [params(**fields)])[0].steering_applied


def scores_inline(llm: Any, plain: np.ndarray) -> np.ndarray:
    """Return the scores of a request with SITE inline, without global steering."""
    llm.steering.clear()
    inline = scores(llm, steering_vectors=SITE)
    llm.steering.set(base=SITE)
    assert not np.array_equal(inline, plain)
    return inline


def test_running_requests_keep_their_program(llm: Any) -> None:
    """Catches running requests that follow a change of global steering or modules."""
    llm.steering.register("m", base=SITE)
    wanted = scores(llm, steering_modules=["m"])
    engine = llm.llm_engine
    engine.add_request("held", PROMPT, params(steering_modules=["m"]))
    engine.step()
    llm.steering.register("m", base={"post_block": {1: -A}})
    llm.steering.set(base={"post_block": {1: C}})
    llm.steering.delete("m")
    with pytest.raises(SteeringError, match=r"steering_modules\[0\]: unknown module 'm'"):
        run(llm, [PROMPT], [params(steering_modules=["m"])])
    outputs = [output for _ in range(20) if engine.has_unfinished_requests() for output in engine.step()]
    (held,) = [output for output in outputs if output.finished]
    assert np.array_equal(logprobs_of(held), wanted)


def test_outputs_report_what_was_applied(llm: Any) -> None:
    """Catches a missing report, or one that differs from what the request ran with."""
    first = llm.steering.register("m", base=SITE)
    status = llm.steering.set(modules=[("m", 2.0)], base={"post_block": {2: B}})
    second = llm.steering.register("m", base={"post_block": {1: B}})
    assert first.digest != second.digest and second.versions == [first.digest, second.digest]
    old = params(steering_modules=[f"m@{first.digest}", ("m", 0.5)], steering_vectors=SITE)
    steered, plain = run(llm, [PROMPT, PROMPT], [old, params()])
    applied = steered.steering_applied
    assert (applied.epoch, applied.global_steering) == (second.epoch, status.digest)
    assert [(use.name, use.digest, use.scale) for use in applied.modules] == [
        ("m", first.digest, 1.0),
        ("m", second.digest, 0.5),
    ]
    assert applied.request is not None
    assert plain.steering_applied.global_steering == status.digest
    assert plain.steering_applied.modules == () and plain.steering_applied.request is None
    llm.steering.clear()
    assert run(llm, [PROMPT], [params()])[0].steering_applied is None
    assert run(llm, [PROMPT], [old])[0].steering_applied.request == applied.request


def test_does_not_modify_sampling_params(llm: Any) -> None:
    """Catches a program left on the caller's object, with which global steering would apply twice."""
    llm.steering.register("m", base=SITE)
    mine = params(steering_modules=["m"])
    once = logprobs_of(run(llm, [PROMPT], [mine])[0])
    llm.steering.set(base={"post_block": {2: B}})
    assert not np.array_equal(logprobs_of(run(llm, [PROMPT], [mine])[0]), once)
    llm.steering.clear()
    assert np.array_equal(logprobs_of(run(llm, [PROMPT], [mine])[0]), once)


def test_modules_steer_every_sample(llm: Any) -> None:
    """Catches `n` of which only the first sample has the module."""
    llm.steering.register("m", base=SITE)
    wanted = tokens_of(run(llm, [PROMPT], [params(steering_modules=["m"])])[0])
    assert wanted != tokens_of(run(llm, [PROMPT], [params()])[0])
    (output,) = run(llm, [PROMPT], [params(steering_modules=["m"], n=3, temperature=1.0, top_k=1)])
    assert [list(sample.token_ids) for sample in output.outputs] == [wanted] * 3


@pytest.mark.feature("modules by name and global steering", "capture")
def test_probes_of_modules_project_captures(llm: Any) -> None:
    """Catches columns in another order, and a projection on another direction."""
    llm.steering.register("emotions", probes={"joy": A, "anger": B})
    spec: dict[str, Any] = {"hooks": {"post_block": [2]}, "positions": "all_prompt"}
    named = {**spec, "reduce": {"probes": ["emotions/joy", "emotions/anger"]}}
    (whole,) = run(llm, [PROMPT], [params(capture={"memory": spec})])
    (read,) = run(llm, [PROMPT], [params(capture={"memory": named})])
    rows = whole.capture_results["memory"].tensor("post_block", 2).numpy()
    found = read.capture_results["memory"].tensor("post_block", 2).numpy()
    np.testing.assert_allclose(found, rows @ np.stack([A, B]).T, rtol=1e-4, atol=1e-4)
    with pytest.raises(SteeringError, match="emotions has no probe 'fear'; its probes are: anger, joy"):
        run(llm, [PROMPT], [params(capture={"memory": {**spec, "reduce": {"probes": ["emotions/fear"]}}})])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"base": {"post_block": {1: A[:-1]}}}, "hidden size is 64"),
    "probe's width": ({"probes": {"p": A[:-1]}}, "hidden size is 64"),
    "layer": ({"base": {"post_block": {4: A}}}, "layer 4"),
    "point": ({"base": {"mlp": {1: A}}}, "pre_attn, attn_out, post_attn, mlp_in, mlp_out, post_block"),
    "nothing": ({}, "empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rejects_modules_that_the_engine_cannot_serve(llm: Any, case: str) -> None:
    """Catches a module that registers and then fails its first request."""
    content, message = REFUSED[case]
    with pytest.raises(SteeringError, match=message):
        llm.steering.register("m", **content)
    assert llm.steering.list().data == []


@pytest.mark.parametrize("tokens", [[-2], [[-1, 5]], [[3, -1]], list(range(0, 80, 2))])
def test_rejects_global_steering_that_depends_on_the_prompt_length(llm: Any, tokens: Any) -> None:
    """Catches global steering under which short or long plain requests would be refused."""
    edit = Edit(kind="add", point="post_block", layers=1, vector=A, tokens=tokens)
    with pytest.raises(SteeringError, match="every prompt"):
        llm.steering.set(edits=[edit])
    assert llm.steering.status().digest is None


def test_rejects_forged_arguments(llm: Any) -> None:
    """Catches a client that bypasses global steering with an internal key."""
    llm.steering.set(base=SITE)
    for key in ("steer_applied", "steer_modules"):
        with pytest.raises(SteeringError, match=key):
            run(llm, [PROMPT], [params(extra_args={key: {"epoch": 1}})])


def test_registry_folder_outlives_its_engine(llm: Any, tmp_path: Path) -> None:
    """Catches acknowledged changes that are lost when the registry is opened again."""
    from vllm_steer.frontend.context import engine_context
    from vllm_steer.registry.directory import DirectoryStore
    from vllm_steer.registry.registry import SteeringRegistry

    capabilities = engine_context(llm.llm_engine).capabilities
    first = SteeringRegistry(capabilities, DirectoryStore(tmp_path / "registry"))
    first.register("m", base=SITE, probes={"p": B}, description="d", provenance={"made by": "a test"})
    first.set(modules=["m"], edits=[clamp(C)])
    second = SteeringRegistry(capabilities, DirectoryStore(tmp_path / "registry"))
    assert second.get("m", data=True) == first.get("m", data=True)
    assert second.status(data=True) == first.status(data=True)
