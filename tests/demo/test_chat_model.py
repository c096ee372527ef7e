# SPDX-License-Identifier: Apache-2.0
"""`scripts/chat_model.py` converts a GGUF file of a Llama to what Transformers reads."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.repo.tree import load_script

TOKENS = ["<|end|>", "<|im_start|>", "a", "b", "ab", "\u0120", "1", "2", "12", "\u0120a"]
MERGES = ["a b", "1 2", "\u0120 a"]
CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=len(TOKENS), max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("chat_model")


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, names: dict[str, str]) -> None:
    """Write a model as llama.cpp stores it: rows of queries and keys in neighbouring pairs."""
    writer = GGUFWriter(str(path), "llama")
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
             "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": len(TOKENS)}  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, *([1] * (len(TOKENS) - 2))])
    for name, token in (("bos", 1), ("eos", 0), ("padding", 0), ("unknown", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in model.state_dict().items():
        weight = value.numpy()
        if name == "lm_head.weight":
            continue
        if ".q_proj" in name or ".k_proj" in name:
            heads = 4 if ".q_proj" in name else 2
            weight = weight.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(weight.shape)
        head, _, part = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
        stored = f"blk.{head}.{names[part]}" if head.isdigit() else names[name.removesuffix(".weight")]
        writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(script: ModuleType, original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    names = {ours: theirs for theirs, ours in (script.LAYER_NAMES | script.NAMES).items()}
    write_gguf(folder / "model.gguf", original, names)
    script.convert(folder / "model.gguf", folder)
    return folder


def test_the_converted_model_computes_the_same(converted: Path, original: LlamaForCausalLM) -> None:
    """Catches swapped tensors, queries and keys in llama.cpp's order, and lost settings of the norm or rotation."""
    ids = torch.tensor([[1, 4, 2, 3, 9, 6, 8]])
    found = AutoModelForCausalLM.from_pretrained(converted, dtype="auto").eval()
    torch.testing.assert_close(found(ids).logits, original(ids).logits)


def test_the_order_of_rows_matters(script: ModuleType) -> None:
    """Negative control: the rows that llama.cpp stores are not those of Transformers."""
    stored = np.arange(16, dtype=np.float32).reshape(8, 2)
    assert script.unpermuted(stored, 1)[:, 0].tolist() == [0, 4, 8, 12, 2, 6, 10, 14]


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(converted: Path) -> None:
    """Catches numbers that are merged, special tokens that are split as text, and a lost chat template."""
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("<|im_start|>ab a12") == ["<|im_start|>", "ab", "\u0120a", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
