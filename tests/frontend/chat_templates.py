# SPDX-License-Identifier: Apache-2.0
"""Chat templates of several families in a small form, and a tokenizer with their special tokens."""

from __future__ import annotations

from typing import Any

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|end_head|>", "<|eot|>", "<start_of_turn>",
    "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]", "<think>", "</think>",
)  # fmt: skip

_LOOP = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}{}{{% endif %}}"


def _template(message: str, generation: str) -> str:
    return _LOOP.format(message, generation)


TEMPLATES: dict[str, str] = {
    "chatml": _template(
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n<think>\n"
    ),
    "two tokens": "<s>" + _template(
        "<|head|>{{ m.role }}<|end_head|>\n\n{{ m.content | trim }}<|eot|>", "<|head|>assistant<|end_head|>\n\n"
    ),
    "no system": "<s>" + _template(
        "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "token per role": _template("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n"),
    "user without end": "<s>" + _template(
        "{% if m.role == 'system' %}{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endif %}", "<|assistant|>"
    ),
    "instructions": "<s>" + _template(
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}", ""
    ),
    "text": _template("### {{ m.role }}: {{ m.content }}\n", "### assistant:"),
    "text and end": _template("### {{ m.role }}\n{{ m.content }}</s>\n", "### assistant\n"),
    "system as user": _template(
        "<|im_start|>{{ 'user' if m.role == 'system' else m.role }}\n{{ m.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
}  # fmt: skip


def make_tokenizer(template: str | None) -> Any:
    """Return a tokenizer of bytes, in which two line breaks and a letter behind a space are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), *(("Ġ", letter) for letter in "abcdefgm")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.chat_template = template
    return fast
