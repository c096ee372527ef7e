# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``vllm_steer.SamplingParams``."""

from types import SimpleNamespace

import msgspec
import pytest
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from vllm_steer.errors import SteeringError
from vllm_steer.params import IDLE_KEY, SamplingParams, compile_fields, refuse_assigned_fields, set_live_id


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
    assert msgspec.msgpack.decode(compile_fields({"steering": edits})[IDLE_KEY]) == ["steering[0]", "steering[2]"]
