# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries that are refused, with the reason: one table for the interfaces, their pages and tests."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NoReturn

from vllm_steer.adapters import FIELDS_OF_OTHERS
from vllm_steer.errors import SteeringError

NAME = "`{}`"
"""Place of names of a package, and of fields of requests."""
MODEL = "`model.{}`"
KEY = "`extra_args: {{{}}}`"
LLM = "`llm.{}`"
CLIENT = "`client.{}`"
CLIENT_ARGUMENT = "`client.generate(..., {}=...)`"
ARGUMENT = "`{}=...`"
GENERATING = "`generate(..., {}=...)`"
LOADING = "`from_pretrained(..., {}=...)`"
MODULE_FIELD = "`{}` of a module"

SERVED_BY_RHIZONYMPH = ("patch", "patch_vectors", "steering_name", "capture_wait")
"""Fields of the fork that this project does not have, and that are translated."""
_QK = "queries and keys cannot be captured; capture attn_out instead"
_OFFLINE = "functions run offline only, as user hooks: LLM.register_hook(function, point, layers)"
_HTTP = "a server runs no code of its clients; use capture, readouts, or edits with a condition in when"
_REMOVE = "register_hook returns a handle with remove()"
_NO_WEIGHTS = "weights are not served; use lens readouts"
_SKIP = "layers cannot be skipped; read layers_input in one invoke and write it to layers_output in another"
_PROJECT = "is not a hook point; use project_on_vocab"
_BACKWARD = "the engine runs no backward pass; omit it"
_ALL_LAYERS = "the engine runs all layers; omit it"
_CLEAN = "hooks are removed when the call ends; omit it"
_BOS = "the tokenizer decides; pass tokens to decide yourself"
_PADDING = "prompts are not padded; omit it"
_ENDS = "generation ends at the model's end tokens; use ignore_eos or stop_token_ids"
_OWN_WEIGHTS = "the model runs with its own weights; omit it"
_CLAMP = "is not supported; use steering with kind clamp"

REFUSALS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "vllm-lens": {
        KEY: {
            "output_qk": _QK,
            "apply_hooks": "pickled code is not run; use capture, readouts, or edits with a condition in when",
        },
        NAME: {"Hook": _OFFLINE, "attention_patterns": _QK},
        LLM: {
            "register_hooks": "use register_hook(function, point, layers)",
            "collect_hook_results": "functions of register_hook keep their own results",
            "clear_hooks": _REMOVE,
            "prefetch_params": _NO_WEIGHTS,
            "clear_prefetched": _NO_WEIGHTS,
        },
        CLIENT: {
            "register_hooks": _HTTP,
            "collect_hook_results": _HTTP,
            "clear_hooks": _HTTP,
            "prefetch_params": _NO_WEIGHTS,
            "clear_prefetched": _NO_WEIGHTS,
        },
        CLIENT_ARGUMENT: {"hooks": _HTTP, "capture_qk": _QK},
    },
    "nnterp": {
        MODEL: {
            "skip_layer": _SKIP,
            "skip_layers": _SKIP,
            "attention_probabilities": "places inside attention are not hook points; capture attentions_output",
            "token_embeddings": "is not a hook point; layers_input[0] is the input of the first layer",
            "ln_final": _PROJECT,
            "lm_head": _PROJECT,
            "scan": "runs the model's code without weights; the shape of rows is (1, tokens, hidden_size)",
            "session": "call the methods one after another",
            "edit": "the model's code cannot be changed; use steer, or edits of SamplingParams",
            "source": "lines of the model's code are not hook points",
        },
        NAME: {
            "it_repeat_prompt": "is not supported; call repeat_prompt with other words for each prompt",
            "patch_object_attn_lens": "is not supported; use patchscope_lens, or a trace that writes attentions_output",
            "TargetPromptBatch": "is not needed; pass a list of TargetPrompt",
            "get_rename_dict": "modules have no other names here; sites are named as in nnterp",
            "ModuleAccessor": "modules of the model are not accessible; use captures and edits",
        },
    },
    "transformer-lens": {
        MODEL: {
            "hooks": "use run_with_hooks or run_with_edits",
            "add_hook": "use run_with_hooks, LLM.register_hook or run_with_edits",
            "add_perma_hook": "use LLM.register_hook or LLM.steering",
            "W_E": "weights are not served",
            "W_U": "weights are not served",
        },
        ARGUMENT: {
            "bwd_hooks": _BACKWARD,
            "incl_bwd": _BACKWARD,
            "stop_at_layer": _ALL_LAYERS,
            "start_at_layer": _ALL_LAYERS,
            "reset_hooks_end": _CLEAN,
            "clear_contexts": _CLEAN,
            "pos_slice": "is not supported; index the rows of the cache",
            "prepend_bos": _BOS,
            "padding_side": _PADDING,
            "loss_per_token": "the loss is not computed; use SteeringDriver with sequence_logits=True",
            "device": "rows are on the CPU; omit it",
            "return_cache_object": "the result is an ActivationCache; omit it",
        },
        GENERATING: {
            "do_sample": "is not supported; temperature=0, the default, is greedy",
            "stop_at_eos": _ENDS,
            "eos_token_id": _ENDS,
            "freq_penalty": "is not supported; use frequency_penalty",
            "use_past_kv_cache": "the engine always has a cache; omit it",
            "prepend_bos": _BOS,
            "padding_side": _PADDING,
            "return_type": "the result is a text; use llm.generate for tokens",
            "verbose": "a progress bar is not shown; omit it",
        },
        LOADING: {
            "fold_ln": _OWN_WEIGHTS,
            "fold_value_biases": _OWN_WEIGHTS,
            "center_writing_weights": _OWN_WEIGHTS,
            "center_unembed": _OWN_WEIGHTS,
            "refactor_factored_attn_matrices": _OWN_WEIGHTS,
            "hf_model": "the engine loads the model itself; pass its name or folder",
            "move_to_device": "vLLM places the model; omit it",
            "default_prepend_bos": _BOS,
            "default_padding_side": _PADDING,
        },
    },
    "rhizonymph": {
        NAME: {
            **{
                name: f"is not supported; {advice}"
                for name, (project, advice) in FIELDS_OF_OTHERS.items()
                if project == "RhizoNymph/vllm" and name not in SERVED_BY_RHIZONYMPH
            },
            "steering_module_ref": "is not supported; register the module and name it in steering_name",
            "conversation_id": "requests share no state, because any client could name the id; use rest_of_request",
        },
        MODULE_FIELD: {"clamps": _CLAMP, "prefill_clamps": _CLAMP, "decode_clamps": _CLAMP},
    },
}
"""Reasons by page in ``docs/peers``, by place, which is how the page shows the input, and by name."""


def refuse_names(names: Iterable[str], refused: Mapping[str, str], default: str | None = None) -> None:
    """Raise SteeringError for the first refused name, or for the first one if there is a default reason."""
    for name in names:
        if (reason := refused.get(name, default)) is not None:
            raise SteeringError(name, reason)


def refuse_attribute(owner: object, name: str, refused: Mapping[str, str], names: Iterable[str] = ()) -> NoReturn:
    """Raise SteeringError for a refused name, and AttributeError for another.

    Args:
        owner: The object.
        name: The name.
        refused: Reasons by refused name.
        names: Attributes that ``dir(owner)`` does not list, for suggestions.
    """
    refuse_names([name], refused)
    known = {*dir(owner), *names}
    # A property that raises AttributeError comes here too.
    similar = [] if name.startswith("_") or name in known else difflib.get_close_matches(name, known, 1, 0.75)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    raise AttributeError(f"{type(owner).__name__} has no attribute {name}{hint}")
