# SPDX-License-Identifier: Apache-2.0
"""Recognition of unknown request fields that were probably meant for steering or capture.

vLLM ignores fields that it does not know. A misspelt field, or a field of another project, would therefore be answered
without steering and without an error.
"""

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from vllm_steer.request.request_form import RequestForm

_FIELDS: tuple[str, ...] = RequestForm.__struct_fields__
_MAX_CHARS = 64
_CUTOFF = 0.86
"""Similarity from which a name counts as misspelt: below `captrue`, above `string` and `streaming`."""

FIELDS_OF_OTHERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "output_residual_stream": (
            "vllm-lens",
            "use capture with hooks at post_block and positions 'all', or vllm_steer.peers.vllm_lens",
        ),
        "output_qk": ("vllm-lens", "queries and keys cannot be captured"),
        "apply_steering_vectors": ("vllm-lens", "use steering_vectors, or steering with kind add_normed"),
        "apply_hooks": ("vllm-lens", "code in requests is not run; use steering and capture"),
        "lora_request": ("vllm-lens", "omit it, and name the adapter in model"),
        "activations_transport": ("vllm-lens", "use capture; large rows are fetched from /v1/captures"),
        "capture_wait": ("RhizoNymph/vllm", "omit it; the response waits for the consumers"),
        "steering_name": ("RhizoNymph/vllm", "use steering_modules"),
        "steering_module_ref": ("RhizoNymph/vllm", "use steering_modules"),
        "steering_clamps": ("RhizoNymph/vllm", "use steering with kind clamp"),
        "prefill_steering_clamps": ("RhizoNymph/vllm", "use steering with kind clamp and tokens 'prompt'"),
        "decode_steering_clamps": ("RhizoNymph/vllm", "use steering with kind clamp and tokens 'generated'"),
        "sae_clamp_specs": ("RhizoNymph/vllm", "use steering with kind feature"),
        "sae_full_reconstruction_specs": ("RhizoNymph/vllm", "reconstructions cannot replace rows"),
        "prefill_vectors": ("RhizoNymph/vllm", "use prefill_steering_vectors"),
        "decode_vectors": ("RhizoNymph/vllm", "use decode_steering_vectors"),
        "patch": ("RhizoNymph/vllm", "use steering with kind replace"),
        "patch_vectors": ("RhizoNymph/vllm", "use steering with kind replace"),
        "steer_vector": ("EasySteer", "use steering_vectors"),
        "steer_vector_request": ("EasySteer", "use steering_vectors"),
        "output_hidden_states": ("vLLM-Hook", "use capture with hooks at post_block"),
        "highlighter_mode": ("vLLM-Hook", "gradients cannot be computed"),
        "spotlight": ("vLLM-Hook", "attention scores cannot be changed"),
        "nnsight_mediator": ("nnsight", "code in requests is not run; use steering and capture"),
        "nnsight_edits": ("nnsight", "code in requests is not run; use steering"),
        "steer_generated": ("interp-engine", "use tokens='prompt' in the edit to leave out generated tokens"),
        "lens_intervention": ("interp-engine", "use steering"),
        "intervene": ("TransformerLens", "use steering"),
        "interventions": ("TransformerLens", "use steering"),
        "control_vector": ("llama.cpp", "use steering_vectors"),
        "control_vectors": ("llama.cpp", "use steering_vectors"),
    }
)
"""Request fields of other projects: the project, and what to use instead.

The interfaces in ``vllm_steer/peers`` serve some of them; requests that do not pass through one are refused.
"""

_LONG = tuple(name for name in FIELDS_OF_OTHERS if len(name) >= 16)
"""Names of which a misspelt one is recognised; short ones resemble fields of vendors."""

_CAPTURE_WORDS = frozenset((
    "activation", "activations", "capture", "captured", "captures", "capturing", "config", "consumer", "consumers",
    "generated", "hidden", "hook", "hooks", "layer", "layers", "memory", "output", "outputs", "param", "params",
    "position", "positions", "prompt", "request", "requests", "resid", "residual", "result", "results", "row",
    "rows", "spec", "specs", "state", "states", "stream", "token", "tokens", "vector", "vectors",
))  # fmt: skip
_CASE_CHANGE = re.compile("(?<=[a-z0-9])(?=[A-Z])")
_NOT_LETTERS = re.compile("[^a-z]+")


@lru_cache(maxsize=1024)
def problem_of(name: str) -> str | None:
    """Return why the unknown field ``name`` is refused, or None if it is unrelated to steering and capture."""
    if len(name) > _MAX_CHARS:  # comparing takes quadratic time
        return None
    snake = _CASE_CHANGE.sub("_", name).lower().replace("-", "_")
    if snake in FIELDS_OF_OTHERS:
        project, advice = FIELDS_OF_OTHERS[snake]
        return f"is a field of {project}, which would be ignored here; {advice}"
    # Comparing is slow, so one end has to be equal. Many names with "steer" resemble a field of this project as well.
    others = [each for each in _LONG if each[:5] == snake[:5] or each[-5:] == snake[-5:]]
    if others and (other := difflib.get_close_matches(snake, others, 1, 0.9 if "steer" in snake else 0.8)):
        return f"unknown field, which would be ignored; did you mean {other[0]} of {FIELDS_OF_OTHERS[other[0]][0]}?"
    meant = _closest_field(snake)
    return None if meant is None else f"unknown field, which would be ignored; did you mean {meant}?"


def _closest_field(name: str) -> str | None:
    if "steer" in name:
        return difflib.get_close_matches(name, [field for field in _FIELDS if "steer" in field], 1, 0.0)[0]
    words = set(_NOT_LETTERS.split(name)) - {""}
    if words & {"capture", "captures", "captured", "capturing"} and words <= _CAPTURE_WORDS:
        return "capture"
    # Similarity does not detect swapped letters in short names.
    swapped = [field for field in _FIELDS if len(field) == len(name) and sorted(field) == sorted(name)]
    return next(iter(swapped or difflib.get_close_matches(name, _FIELDS, 1, _CUTOFF)), None)
