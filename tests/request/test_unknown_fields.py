# SPDX-License-Identifier: Apache-2.0
"""Recognition of misspelt fields, and of fields that have nothing to do with steering."""

import importlib
import inspect
import pkgutil

import pytest
import vllm.entrypoints
from pydantic import BaseModel
from vllm.sampling_params import SamplingParams

from vllm_steer.peers.rhizonymph.fields import FIELDS as FORK_FIELDS
from vllm_steer.peers.vllm_lens.keys import KEYS
from vllm_steer.request.request_form import RequestForm
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS, problem_of

OF_VENDORS = [
    "store", "metadata", "service_tier", "reasoning_effort", "reasoning", "modalities", "prediction", "audio",
    "web_search_options", "verbosity", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "functions", "function_call", "logit_bias", "instructions", "previous_response_id",
    "conversation", "conversation_id", "include", "truncation", "text", "background", "max_tool_calls",
    "context_management", "stream", "stream_options", "streaming", "string", "strings", "structure", "structured",
    "texture", "picture", "caption", "captions", "features", "steps", "step", "signature", "thinking",
    "enable_thinking", "thinking_budget", "output_config", "container", "mcp_servers", "provider", "providers",
    "models", "route", "transforms", "plugins", "usage", "fallbacks", "preset", "safe_prompt", "random_seed",
    "prompt_mode", "document_image_limit", "citations", "documents", "tool_resources", "return_images",
    "return_citations", "search_mode", "search_recency_filter", "return_hidden_states", "input_ids", "sampling_params",
    "lora_path", "custom_logit_processor", "return_logprob", "logprob_start_len", "top_logprobs_num", "session_params",
    "bootstrap_host", "num_predict", "num_ctx", "keep_alive", "options", "format", "template", "raw", "mirostat",
    "mirostat_tau", "grammar", "n_predict", "cache_prompt", "id_slot", "samplers", "t_max_predict_ms", "lora",
    "timings_per_token", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "extra_headers", "extra_query",
    "api_key", "guided_json", "guided_regex", "response_format", "repetition_penalty", "typical_p", "do_sample",
    "num_beams", "watermark", "best_of", "echo", "enable_search", "incremental_output", "result_format",
    "system_instruction", "safety_settings", "generation_config", "vectors", "vector", "embedding", "encoding_format",
    "dimensions", "capture_id", "screen_capture", "video_capture_fps", "trace", "tracing", "control", "controls",
]  # fmt: skip


def fields_of_vllm() -> set[str]:
    """Return the names of all fields and aliases of the request models of vLLM's servers."""
    names = set(SamplingParams.__struct_fields__)
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.rpartition(".")[2] != "protocol" or ".cohere." in module.name:  # needs Cohere's library
            continue
        for _, model in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(model, BaseModel):
                names |= {*model.model_fields, *(field.alias or "" for field in model.model_fields.values())}
    return names


def test_fields_of_vllm_pass() -> None:
    """Catches a field of vLLM that is taken for a misspelt one."""
    names = fields_of_vllm()
    assert len(names) > 150
    assert {name: problem_of(name) for name in names if problem_of(name)} == {}


def test_fields_of_vendors_pass() -> None:
    """Catches a field of another API, which stock vLLM ignores, that is taken for a misspelt one."""
    assert {name: problem_of(name) for name in OF_VENDORS if problem_of(name)} == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steer_vectors", "steering_vectors"),
        ("steering_vector", "steering_vectors"),
        ("Steering-Vectors", "steering_vectors"),
        ("steer", "steering"),
        ("stering", "steering"),
        ("steering_module", "steering_modules"),
        ("prefill_steering", "prefill_steering_vectors"),
        ("decodeSteeringVectors", "decode_steering_vectors"),
        ("sterring_vectors", "steering_vectors"),
        ("captures", "capture"),
        ("captrue", "capture"),
        ("capure", "capture"),
        ("activation_capture", "capture"),
        ("capture_hidden_states", "capture"),
        ("captureSpec", "capture"),
        ("output_residual_streams", "output_residual_stream of vllm-lens"),
        ("output_residual", "output_residual_stream of vllm-lens"),
        ("apply_steering_vector", "apply_steering_vectors of vllm-lens"),
    ],
)
def test_misspelt_names(name: str, meant: str) -> None:
    """Catches a misspelt field that is ignored, and a suggestion of another field."""
    assert f"did you mean {meant}?" in str(problem_of(name))


OF_PEERS = {
    "RhizoNymph/vllm": [
        "capture", "capture_wait", "patch", "patch_vectors", "steering_vectors", "prefill_steering_vectors",
        "decode_steering_vectors", "steering_clamps", "prefill_steering_clamps", "decode_steering_clamps",
        "steering_name", "steering", "steering_module_ref", "sae_clamp_specs", "sae_full_reconstruction_specs",
    ],
    "vllm-lens": [
        "output_residual_stream", "output_qk", "apply_steering_vectors", "apply_hooks", "activations_transport",
    ],
    "EasySteer": ["steering", "steer_vector_request"],
    "vLLM-Hook": ["output_hidden_states", "output_qk", "steer", "highlighter_mode", "spotlight"],
    "nnsight": ["nnsight_mediator", "nnsight_edits"],
    "interp-engine": ["steering_spec", "lens_intervention", "steer_generated"],
    "TransformerLens": ["capture", "intervene", "interventions"],
}  # fmt: skip
"""Request fields in the newest sources of the peers, except those without effect on an answer.

``conversation_id`` of RhizoNymph/vllm names state that no request here has, and other vendors have a field of that
name. ``skip_reading_prefix_cache`` of vllm-lens does not change an answer.
"""


@pytest.mark.parametrize(
    ("project", "name"), [(project, name) for project, names in OF_PEERS.items() for name in names]
)
def test_each_field_of_a_peer_is_read_or_refused(project: str, name: str) -> None:
    """Catches a field of a peer that is answered with 200 and without effect, as `patch` was."""
    assert name in RequestForm.__struct_fields__ or problem_of(name) is not None


def test_the_interfaces_of_peers_read_all_their_fields() -> None:
    """Catches a field that an interface of a peer neither serves nor refuses by its own name."""
    assert {*OF_PEERS["RhizoNymph/vllm"], "conversation_id"} <= set(FORK_FIELDS)
    assert set(OF_PEERS["vllm-lens"]) <= set(KEYS)


@pytest.mark.parametrize("name", FIELDS_OF_OTHERS)
def test_fields_of_other_projects(name: str) -> None:
    """Catches a field of another project that is ignored, and a suggestion of a field that does not exist."""
    problem = str(problem_of(name))
    assert f"a field of {FIELDS_OF_OTHERS[name][0]}" in problem
    assert len(problem) < 160
    words = set(problem.replace(",", " ").replace(";", " ").split())
    assert words & {*RequestForm.__struct_fields__, "omit", "tokens='prompt'", "cannot"}


def test_long_names_are_not_compared() -> None:
    """Catches quadratic work for names as long as a body."""
    assert problem_of("steering_" * 100_000) is None
