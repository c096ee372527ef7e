# SPDX-License-Identifier: Apache-2.0
"""Names of nnterp and nnsight that are not supported, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_SKIP = "layers cannot be skipped; read layers_input in one invoke and write it to layers_output in another"
_PROJECT = "is not a hook point; use project_on_vocab"

ATTRIBUTES: Mapping[str, str] = {
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
}
"""Attributes of a model."""
FUNCTIONS: Mapping[str, str] = {
    "it_repeat_prompt": "is not supported; call repeat_prompt with other words for each prompt",
    "patch_object_attn_lens": "is not supported; use patchscope_lens, or a trace that writes attentions_output",
    "TargetPromptBatch": "is not needed; pass a list of TargetPrompt",
    "get_rename_dict": "modules have no other names here; sites are named as in nnterp",
    "ModuleAccessor": "modules of the model are not accessible; use captures and edits",
}
"""Names of nnterp's modules."""
