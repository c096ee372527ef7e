# SPDX-License-Identifier: Apache-2.0
"""Attributes and arguments of TransformerLens that are not supported, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_steer.errors import SteeringError

REFUSED = {
    "hooks": "use run_with_hooks or run_with_edits",
    "add_hook": "use run_with_hooks, LLM.register_hook or run_with_edits",
    "add_perma_hook": "use LLM.register_hook or LLM.steering",
    "W_E": "weights are not served",
    "W_U": "weights are not served",
}
"""Attributes of TransformerLens that are not supported, with the reason."""
_BACKWARD = "the engine runs no backward pass; omit it"
_ALL_LAYERS = "the engine runs all layers; omit it"
_CLEAN = "hooks are removed when the call ends; omit it"
ARGUMENTS = {
    "bwd_hooks": _BACKWARD,
    "incl_bwd": _BACKWARD,
    "stop_at_layer": _ALL_LAYERS,
    "start_at_layer": _ALL_LAYERS,
    "reset_hooks_end": _CLEAN,
    "clear_contexts": _CLEAN,
    "pos_slice": "is not supported; index the rows of the cache",
    "prepend_bos": "the tokenizer decides; pass tokens to decide yourself",
    "padding_side": "prompts are not padded; omit it",
    "loss_per_token": "the loss is not computed; use SteeringDriver with sequence_logits=True",
    "device": "rows are on the CPU; omit it",
    "return_cache_object": "the result is an ActivationCache; omit it",
}
"""Arguments of TransformerLens' methods that are not supported, with the reason."""
_ENDS = "generation ends at the model's end tokens; use ignore_eos or stop_token_ids"
GENERATING = {
    "do_sample": "is not supported; temperature=0, the default, is greedy",
    "stop_at_eos": _ENDS,
    "eos_token_id": _ENDS,
    "freq_penalty": "is not supported; use frequency_penalty",
    "use_past_kv_cache": "the engine always has a cache; omit it",
    "prepend_bos": ARGUMENTS["prepend_bos"],
    "padding_side": ARGUMENTS["padding_side"],
    "return_type": "the result is a text; use llm.generate for tokens",
    "verbose": "a progress bar is not shown; omit it",
}
"""Arguments of ``generate`` that are not supported, with the reason."""
_WEIGHTS = "the model runs with its own weights; omit it"
LOADING = {
    "fold_ln": _WEIGHTS,
    "fold_value_biases": _WEIGHTS,
    "center_writing_weights": _WEIGHTS,
    "center_unembed": _WEIGHTS,
    "refactor_factored_attn_matrices": _WEIGHTS,
    "hf_model": "the engine loads the model itself; pass its name or folder",
    "move_to_device": "vLLM places the model; omit it",
    "default_prepend_bos": "the tokenizer decides; pass tokens to decide yourself",
    "default_padding_side": "prompts are not padded; omit it",
}
"""Arguments of ``from_pretrained`` and ``boot_transformers`` that are not supported unless they are false."""


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raise SteeringError for an argument of a method that runs the model."""
    for name in arguments:
        raise SteeringError(name, ARGUMENTS.get(name, "is not an argument of this method; omit it"))


def loading_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LLM`` among those of ``from_pretrained``.

    Raises:
        SteeringError: An argument is not supported.
    """
    kept = dict(arguments)
    for name, advice in LOADING.items():
        if kept.pop(name, None):
            raise SteeringError(name, advice)
    device, accelerator = kept.pop("device", None), torch.accelerator.current_accelerator()
    own = "cpu" if accelerator is None else accelerator.type
    if device is not None and str(device).partition(":")[0] != own:
        raise SteeringError("device", f"vLLM runs on {own}; omit it")
    return kept
