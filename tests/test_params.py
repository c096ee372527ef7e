# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``vllm_steer.SamplingParams``."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import msgspec
import pytest
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest

from vllm_steer.compat.stages import LOGGING
from vllm_steer.compat.wraps import install
from vllm_steer.errors import SteeringError
from vllm_steer.params import (
    PROGRAM_KEY,
    REPORT_KEY,
    SamplingParams,
    compile_fields,
    refuse_assigned_fields,
    set_live_id,
)
from vllm_steer.request.vector import content_digest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steer_vectors", "steering_vectors"),
        ("steering_module", "steering_modules"),
        ("captures", "capture"),
        ("vectors", "steering_vectors"),
        ("edits", "steering"),
        ("hooks", "capture"),
        ("max_token", "max_tokens"),
    ],
)
def test_suggests_the_argument_that_was_meant(name, meant):
    """Catches a misspelt steering argument reported without the valid name."""
    with pytest.raises(TypeError, match=f"'{name}'; did you mean {meant}\\?"):
        SamplingParams(max_tokens=1, **{name: {}})


def test_other_errors_stay_as_they_are():
    """Catches a suggestion for an argument that resembles none."""
    with pytest.raises(TypeError) as caught:
        SamplingParams(colour=1)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("steering_vectors", "SamplingParams\\(steering_vectors=...\\)"),
        ("steer_vectors", "did you mean steering_vectors"),
        ("output_residual_stream", "vllm-lens.*capture"),
        ("nnsight_mediator", "nnsight"),
        ("steer", "vLLM-Hook.*steering=..."),
    ],
)
def test_mistakes_in_extra_args(name, words):
    """Catches steering given in `extra_args`, which vLLM passes on and every part of the engine ignores."""
    with pytest.raises(SteeringError, match=words) as caught:
        SamplingParams(max_tokens=1, extra_args={name: {"post_block": {}}})
    assert caught.value.field == f"extra_args.{name}"


def test_fields_of_peers_that_are_assigned():
    """Catches ``params.patch = [...]``, as scripts of RhizoNymph/vllm do, which nothing reads."""
    params = VllmSamplingParams()
    params.patch = [{}]
    with pytest.raises(SteeringError, match="patch: is a field of RhizoNymph/vllm"):
        refuse_assigned_fields(params)
    refuse_assigned_fields(VllmSamplingParams())


def test_other_extra_args_pass():
    """Catches a refusal of the arguments of a plugin."""
    given = {"kv_transfer_params": {}, "session_id": "a", "capture": 3, "ngram_size": 2}
    assert SamplingParams(extra_args=given).clone().extra_args == given


def test_live_ids_can_be_encoded():
    """Catches a request id that the scheduler cannot encode for the block hashes of a request with live strengths."""
    request = SimpleNamespace(request_id="\ud800", sampling_params=SamplingParams(extra_args={"other": 1}))
    made = set_live_id(request)
    assert made.encode() and request.sampling_params.extra_args == {"other": 1, "steer_live": made}


def test_edits_that_add_nothing():
    """Catches an edit that adds 0 to a feature, which is left out of the program and missing in `no_effect`."""
    place = {"kind": "feature", "point": "post_block", "layers": 1, "sae": "topics", "feature": 3}
    edits = [
        {**place, "add": 0.0},
        {**place, "set": 0.0},
        {**place, "add": 2.0, "strength": 0.0},
        {**place, "add": 2.0},
    ]
    assert msgspec.msgpack.decode(compile_fields({"steering": edits})[REPORT_KEY]) == [
        ["steering[0]", "steering[2]"],
        {},
    ]


FIELDS = {
    "steering_vectors": {"post_block": {1: [0.5] * 4096}},
    "capture": {"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": [[0.5] * 4096] * 300}}},
}


def engine_request(params):
    given = {"request_id": "a", "prompt_token_ids": [1], "mm_features": None, "sampling_params": params}
    rest = ("pooling_params", "arrival_time", "lora_request", "cache_salt", "data_parallel_rank")
    return EngineCoreRequest(**given, **dict.fromkeys(rest))


def scheduled(params):
    empty = dict.fromkeys(field.name for field in dataclasses.fields(NewRequestData))
    return NewRequestData(**{**empty, "sampling_params": params, "prompt_token_ids": [1], "block_ids": ([0],)})


@pytest.mark.parametrize("holder", [lambda params: params, engine_request, scheduled, lambda params: [params]])
@pytest.mark.parametrize("steered", [SamplingParams(max_tokens=1, **FIELDS), VllmSamplingParams(max_tokens=1)])
def test_logs_do_not_contain_vectors(holder, steered):
    """Catches a program written whole by `print` or vLLM's logs, and arguments of others that are hidden."""
    install(LOGGING)
    extra = {**compile_fields(FIELDS), "session": b"other", "steer_live": "id"}
    params = copy.copy(steered)
    params.extra_args = extra
    text = str(holder(params))
    program = extra[PROGRAM_KEY]
    assert f"'steer': <{len(program)} bytes, {content_digest(program).hex()}>" in text
    assert "'session': b'other'" in text and "'steer_live': 'id'" in text
    assert len(text) < 2000 < len(program)


def test_text_of_steered_params_does_not_need_the_plugin(monkeypatch):
    """Catches `print(params)` that writes the vectors until an engine has been started."""
    original = VllmSamplingParams.__repr__
    monkeypatch.setattr(VllmSamplingParams, "__repr__", getattr(original, "_vllm_steer_wraps", (original,))[0])
    params = SamplingParams(max_tokens=1, **FIELDS)
    assert len(repr(params)) < 2000 < len(repr(params.clone().extra_args))


def test_printing_changes_nothing():
    """Catches a program that is sent, copied or pickled as its printed text."""
    params = SamplingParams(max_tokens=1, **FIELDS)
    expected = {**compile_fields(FIELDS)}
    wire = msgspec.msgpack.encode(params)
    assert "<" in repr(params)
    assert params.extra_args == expected and msgspec.msgpack.encode(params) == wire
    for same in (
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),  # noqa: S301
        msgspec.msgpack.decode(wire, type=VllmSamplingParams),
    ):
        assert same.extra_args == expected


def test_parameters_of_others_are_printed_by_vllm_itself(monkeypatch):
    """Catches digests computed for requests without steering, and text that differs from stock vLLM's."""
    install(LOGGING)
    monkeypatch.setattr("vllm_steer.params.content_digest", None)
    original = VllmSamplingParams.__repr__._vllm_steer_wraps[0]
    for extra in (None, {}, {"session": b"x" * 9}):
        params = VllmSamplingParams(max_tokens=1, extra_args=extra)
        assert repr(params) == original(params)
