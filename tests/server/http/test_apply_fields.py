# SPDX-License-Identifier: Apache-2.0
"""Steering fields of vLLM's request objects in sampling parameters."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.sampling_params import SamplingParams

from tests.server.fakes import HIDDEN, MAX_MODEL_LEN, engine_context, vector
from vllm_steer.errors import SteeringError
from vllm_steer.frontend import requests
from vllm_steer.params import (
    APPLIED_KEY,
    FIELDS,
    PROGRAM_KEY,
    PROMPT_KEY,
    capture_specs,
    compile_fields,
    has_steering,
    program_of,
)
from vllm_steer.plugin.entry_point import wrap_front_end
from vllm_steer.program import compile_program
from vllm_steer.request import parse_fields
from vllm_steer.server.http import apply_fields
from vllm_steer.server.http.apply_fields import RequestRefused, apply_to_params, read_fields
from vllm_steer.server.http.request_context import RequestContext, current_request, set_prompt_len

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
REQUESTS: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hi"},
    ChatCompletionRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": "hi"},
}
FIELD_VALUES: dict[str, Any] = {
    "steering_vectors": {"post_block": {"1": vector()}},
    "prefill_steering_vectors": {"pre_attn": {"0": {"vector": vector(), "scale": 2.0}}},
    "decode_steering_vectors": {"post_attn": {"3": vector()}},
    "steering": [{"kind": "ablate", "point": "post_block", "layers": [0, 1], "vector": vector()}],
}

classes = pytest.mark.parametrize("of", list(REQUESTS), ids=lambda of: of.__name__)


def request_with(of: type[Any] = CompletionRequest, **fields: Any) -> Any:
    return of.model_validate({**REQUESTS[of], **fields})


def assert_refused(request: Any, field: str, words: str = "") -> None:
    """Check that a request is refused because of a field, with these words in the message."""
    with pytest.raises(RequestRefused) as refused:
        apply_to_params(request, SamplingParams())
    assert refused.value.parameter == field
    assert words in str(refused.value)


def assert_steered(request: Any, steered: bool = True) -> None:
    assert has_steering(apply_to_params(request, SamplingParams())) == steered


@pytest.fixture
def context() -> Iterator[RequestContext]:
    """Set the context that the middleware sets for the current request."""
    context = RequestContext(engine=engine_context())
    token = current_request.set(context)
    yield context
    current_request.reset(token)


@classes
def test_fields_compile_to_a_program(of: type[Any]) -> None:
    """Catches a field that one of the request classes loses, and an edit that becomes another one."""
    params = apply_to_params(request_with(of, **FIELD_VALUES), SamplingParams())
    expected = compile_program(parse_fields(FIELD_VALUES))
    program = program_of(params)
    assert program is not None
    assert msgspec.structs.replace(program, sources=()) == expected


@classes
def test_vllm_calls_the_wrapped_methods(of: type[Any]) -> None:
    """Catches wrapped methods that are not the ones which vLLM calls."""
    wrap_front_end()
    assert program_of(request_with(of, **FIELD_VALUES).to_sampling_params(4, {})) is not None
    assert program_of(request_with(of).to_sampling_params(4, {})) is None


def test_batch_chat_conversations_are_steered() -> None:
    """Catches the batch route, which makes requests of its own from the one that came in, dropping fields."""
    wrap_front_end()
    batch = BatchChatCompletionRequest.model_validate({"messages": [MESSAGES], **FIELD_VALUES})
    single = batch.to_chat_completion_request(MESSAGES)
    assert program_of(single.to_sampling_params(4, {})) is not None


def test_other_extra_args_are_kept(context: RequestContext) -> None:
    """Catches steering that drops a user's `vllm_xargs`, and steering that writes into the request itself."""
    request = request_with(vllm_xargs={"mine": 1}, steering=FIELD_VALUES["steering"])
    for _ in range(2):
        params = apply_to_params(request, SamplingParams(extra_args=request.vllm_xargs))
        assert set(params.extra_args) == {"mine", PROGRAM_KEY, APPLIED_KEY, PROMPT_KEY}
    assert request.vllm_xargs == {"mine": 1}


@pytest.mark.parametrize("name", FIELDS)
def test_null_counts_as_absent(name: str, context: RequestContext) -> None:
    """Catches clients that send every optional field being refused."""
    request = CompletionRequest.model_validate({"prompt": "hi", name: None})
    assert read_fields(request) == {}
    assert_steered(request, False)


@pytest.mark.parametrize(
    ("of", "inside", "field"),
    [
        (ResponsesRequest, {"metadata": {"steering": '[{"kind": "add"}]'}}, "metadata.steering"),
        (ChatCompletionRequest, {"chat_template_kwargs": {"steering": [{}]}}, "chat_template_kwargs.steering"),
    ],
)
def test_refuses_fields_in_objects_of_vllm(of: Any, inside: Any, field: str, context: RequestContext) -> None:
    """Catches the unsteered answer to a field in an object of the request class, whose unknown keys have no effect."""
    assert_refused(request_with(of, **inside), field)
    apply_to_params(request_with(of, **{name: {"steering": "off"} for name in inside}), SamplingParams())


@classes
@pytest.mark.parametrize(
    "name", ["steering_vector", "prefill_steering", "steering_config", "Xsteering", "decode_steering_vectors "]
)
def test_rejects_misspelled_fields(of: type[Any], name: str) -> None:
    """Catches the fluent, unsteered answer to a misspelt field."""
    assert_refused(request_with(of, **{name: {}}), name)


@classes
@pytest.mark.parametrize("name", ["steer", "steer_capture", "steer_prompt", "steering", "steering_vectors"])
def test_rejects_fields_in_vllm_xargs(of: type[Any], name: str) -> None:
    """Catches steering that is accepted where it is ignored, or that goes past the checks."""
    assert_refused(request_with(of, vllm_xargs={name: "x"}), f"vllm_xargs.{name}")


EDIT = {"kind": "add", "point": "post_block", "layers": 1, "vector": vector()}


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"steering_vectors": {"post_block": {"1": vector()[1:]}}}, "steering_vectors.post_block[1]", "hidden size"),
        ({"steering_vectors": {"post_block": {"0": vector(), "4": vector()}}}, "steering_vectors.post_block[4]", "4"),
        (
            {"decode_steering_vectors": {"post_attn": {"2": vector()}}},
            "decode_steering_vectors.post_attn[2]",
            "parallel",
        ),
        ({"steering": [EDIT, {**EDIT, "layers": [1, 9]}]}, "steering[1]", "layer 9"),
        ({"steering": [EDIT, {**EDIT, "tokens": [MAX_MODEL_LEN]}]}, "steering[1]", "max_model_len"),
        ({"steering": [{**EDIT, "point": "post_attn", "layers": "all"}]}, "steering[0]", "layer 2"),
        ({"steering": [EDIT, EDIT, {**EDIT, "tokens": [-6]}]}, "steering[2].tokens", "prompt of 5 tokens"),
        ({"steering": [EDIT, {**EDIT, "tokens": [20]}]}, "steering[1].tokens", "max_tokens=16, 19 is the last"),
    ],
)
def test_rejection_names_the_edit(fields: dict[str, Any], path: str, words: str, context: RequestContext) -> None:
    """Catches an error without the path of the edit, or after a stream has started."""
    set_prompt_len(5)
    assert_refused(request_with(**fields), path, words)
    assert not context.fields_applied


HOOKS = {"hooks": {"post_block": [1]}}


def test_prompts_with_captures_are_numbered(context: RequestContext) -> None:
    """Catches samples of a second prompt that are taken for the first one's."""
    request = request_with(capture={"memory": HOOKS}, n=3, temperature=1)
    set_prompt_len(5)
    params = [apply_to_params(request, SamplingParams(n=3)) for _ in range(2)]
    assert [each.extra_args[PROMPT_KEY] for each in params] == [0, 1]
    assert (context.consumers, context.samples) == (("memory",), 3)
    assert [name for name, _ in capture_specs(params[0])] == ["memory"]


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        ({"hooks": {"pre_attn": [0], "post_block": [1, 4]}}, "capture.memory.hooks.post_block", "layer 4"),
        ({"hooks": {"post_attn": "all"}}, "capture.memory.hooks.post_attn", "layer 3: this branch is a partial sum"),
        ({**HOOKS, "positions": [MAX_MODEL_LEN]}, "capture.memory.positions", "max_model_len"),
        ({**HOOKS, "positions": [-6]}, "capture.memory.positions", "prompt of 5 tokens"),
        ({**HOOKS, "positions": [[20, None]]}, "capture.memory.positions", "max_tokens=16, 19 is the last"),
        ({**HOOKS, "colour": 1}, "capture.memory.colour", "nor an option of memory"),
    ],
)
def test_rejection_names_the_capture(spec: Any, path: str, words: str, context: RequestContext) -> None:
    """Catches an error with the path of another consumer or of an edit."""
    set_prompt_len(5)
    assert_refused(request_with(capture={"memory": spec}, steering=[EDIT]), path, words)
    assert context.consumers == ()


@classes
@pytest.mark.parametrize("value", [HOOKS, {"memory": HOOKS}])
@pytest.mark.parametrize("name", ["captures", "Capture", "capture_hidden"])
def test_rejects_misspelled_captures(name: str, value: Any, of: type[Any]) -> None:
    """Catches an answer without the rows that were asked for."""
    assert_refused(request_with(of, **{name: value}), name)


@pytest.mark.parametrize("fields", [{"capture_id": "x"}, {"screen_capture": {"fps": 3}}, {"steer_vectors": None}])
def test_accepts_unrelated_fields(fields: dict[str, Any], context: RequestContext) -> None:
    """Catches a refusal of what stock vLLM serves."""
    assert_steered(request_with(**fields), False)


MISTAKES = {
    "steer_vectors": "did you mean steering_vectors",
    "steeringVectors": "did you mean steering_vectors",
    "steerModules": "did you mean steering_modules",
    "captures": "did you mean capture",
    "activation_capture": "did you mean capture",
    "sterring_vectors": "did you mean steering_vectors",
    "output_residual_stream": "vllm-lens",
    "apply_steering_vectors": "vllm-lens",
    "steer_vector_request": "EasySteer",
}


@classes
@pytest.mark.parametrize("place", ["", "vllm_xargs", "extra_args", "extra_body", "sampling_params"])
@pytest.mark.parametrize(("name", "words"), MISTAKES.items())
def test_rejects_known_mistakes(name: str, words: str, place: str, of: type[Any], context: RequestContext) -> None:
    """Catches a misspelt field, or one of another project, that is ignored: HTTP 200 with plain text."""
    request = request_with(of, **({place: {name: 1}} if place else {name: 1}))
    assert_refused(request, f"{place}.{name}" if place else name, words)


def test_other_servers_ignore_mistakes() -> None:
    """Catches a server without steering that refuses what stock vLLM serves."""
    assert apply_to_params(request_with(steer_vectors={}), SamplingParams()).extra_args is None


def test_rejects_captures_that_no_response_carries(context: RequestContext) -> None:
    """Catches captures whose answer is sent before there are any, or comes from several runs, or from nowhere."""
    wanted: dict[str, Any] = {"capture": {"memory": HOOKS}}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    apply_to_params(request_with(ResponsesRequest, tools=[tool], **wanted), SamplingParams())
    assert context.results_in == "response"
    assert_refused(request_with(ResponsesRequest, background=True, **wanted), "capture", "omit background")
    served = [{"type": "web_search_preview"}]
    assert_refused(request_with(ResponsesRequest, tools=served, **wanted), "capture", "web_search_preview")
    current_request.set(None)
    assert_refused(request_with(**wanted), "capture", "vllm_steer.LLM")


def test_rejects_live_strengths_in_the_background(context: RequestContext) -> None:
    """Catches live strengths that cannot be changed: the route said that the running request has ended."""
    live = [EDIT, {**EDIT, "live": "calm"}]
    background = {"of": ResponsesRequest, "background": True}
    assert_refused(request_with(**background, steering=live), "steering[1].live", "omit background")
    assert_steered(request_with(**background, steering=[EDIT]))


def test_rejects_live_strengths_in_several_runs(context: RequestContext) -> None:
    """Catches a strength that was set in one run of the model and is 1 again in the next, and plain edits refused."""
    tools = [{"type": "web_search_preview"}]
    live = [EDIT, {**EDIT, "live": "calm"}]
    request = request_with(ResponsesRequest, tools=tools, steering=live)
    assert_refused(request, "steering[1].live", "web_search_preview")
    assert_steered(request_with(ResponsesRequest, steering=live))
    context.compiled = None  # as for the next body
    assert_steered(request_with(ResponsesRequest, tools=tools, steering=[EDIT, {**EDIT, "live": None}]))


def test_rejects_edits_that_only_fit_separately(context: RequestContext) -> None:
    """Catches per-edit checks that miss a limit on all edits together."""
    set_prompt_len(5)
    edits = [{**EDIT, "vector": vector(i + 1), "tokens": [[i, None]]} for i in range(40)]
    assert_refused(request_with(steering=edits), "steering", "max_segments")


def test_each_prompt_is_checked_with_its_own_length(context: RequestContext) -> None:
    """Catches the first prompt's length being used for the second one's check."""
    request = request_with(steering=[{**EDIT, "tokens": [-4]}])
    set_prompt_len(5)
    apply_to_params(request, SamplingParams())
    set_prompt_len(3)
    assert_refused(request, "steering[0].tokens", "prompt of 3 tokens")


def test_fields_of_a_body_are_compiled_once(context: RequestContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a thousand prompts with one vector costing a thousand times its parsing."""
    parsed = []

    def compile_once(fields: Any) -> dict[str, bytes]:
        parsed.append(fields)
        return compile_fields(fields)

    monkeypatch.setattr(apply_fields, "compile_json_fields", compile_once)
    request = request_with(**FIELD_VALUES)
    programs = [apply_to_params(request, SamplingParams()).extra_args[PROGRAM_KEY] for _ in range(5)]
    assert len(parsed) == 1
    assert all(program is programs[0] for program in programs)


def test_nothing_is_compiled_without_fields(context: RequestContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches plain requests that pay for the parsing of fields which they do not have."""

    def fail(_fields: Any) -> dict[str, bytes]:
        raise AssertionError("compiled")

    monkeypatch.setattr(apply_fields, "compile_json_fields", fail)
    params = apply_to_params(request_with(), SamplingParams())
    assert params.extra_args == {APPLIED_KEY: b""}
    assert context.changes_nothing


@classes
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": 0, "steering": [{**FIELD_VALUES["steering"][0], "live": "calm"}]}, "steering.live"),
    ],
)
def test_refuses_what_vllm_cannot_serve_before_the_response(
    of: type[Any], fields: dict[str, Any], field: str, context: RequestContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a refusal by the engine client only, when a stream has started: HTTP 200, and a cut stream."""
    wrap_front_end()
    monkeypatch.setattr(requests, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    parallel = SimpleNamespace(data_parallel_size=2)
    config = SimpleNamespace(speculative_config=object(), lora_config=None, parallel_config=parallel)
    context.input_processor = SimpleNamespace(vllm_config=config)
    with pytest.raises(RequestRefused) as refused:
        request_with(of, stream=True, **fields).to_sampling_params(4, {})
    assert refused.value.parameter == field
    context.compiled = context.own = None  # the next body
    request_with(of, stream=True, temperature=0, steering=FIELD_VALUES["steering"]).to_sampling_params(4, {})


def test_request_refused_is_both_error_types() -> None:
    """Catches HTTP 500 for a client's mistake, and an error that loses its field between processes."""
    refused = pickle.loads(pickle.dumps(RequestRefused("steering[2].layers", "is wrong")))  # noqa: S301
    assert isinstance(refused, SteeringError)
    error = create_error_response(refused).error
    assert (error.code, error.param, error.message) == (400, "steering[2].layers", "steering[2].layers: is wrong")


def test_without_middleware_the_engine_checks() -> None:
    """Catches the batch runner, which has no middleware, failing on every steered request."""
    wrong = {"post_block": {"99": [1.0] * (HIDDEN + 1)}}
    assert program_of(apply_to_params(request_with(steering_vectors=wrong), SamplingParams())) is not None


def test_rejection_names_the_module(context: RequestContext) -> None:
    """Catches an error with the path of a field inside the module."""
    assert context.engine is not None
    edits = [{**EDIT, "tokens": [-4]}]
    context.engine.registry.register("late", edits=edits)
    context.engine.registry.register("fine", base={"post_block": {1: vector()}})
    set_prompt_len(3)
    assert_refused(request_with(steering_modules=["fine", "late"]), "steering_modules[1].tokens", "prompt of 3 tokens")


def test_prompts_of_a_body_get_the_same_global_steering(context: RequestContext) -> None:
    """Catches prompts of one body of which some have the global steering of before, and some that of after."""
    assert context.engine is not None
    request = request_with()
    for _ in range(2):
        assert apply_to_params(request, SamplingParams()).extra_args == {APPLIED_KEY: b""}
        assert context.applied_json is None
        context.engine.registry.set(base={"post_block": {1: vector()}})
    context.compiled = None  # as for the next body
    params = apply_to_params(request, SamplingParams())
    program = params.extra_args[PROGRAM_KEY]
    context.engine.registry.clear()
    assert apply_to_params(request, SamplingParams()).extra_args[PROGRAM_KEY] is program
    assert context.applied_json == params.extra_args[APPLIED_KEY]
