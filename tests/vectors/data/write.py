# SPDX-License-Identifier: Apache-2.0
"""Write the vector files of this folder with the libraries that define their formats, and what these libraries steer.

Needs repeng 0.4.0 and steering-vectors 0.12.2, which the tests do not. Install them without their dependencies into a
scratch folder, because repeng wants NumPy 1 for one annotation, and run from the checkout's root::

    pip install --target scratch --no-deps repeng==0.4.0 steering-vectors==0.12.2
    pip install --target scratch --no-deps scikit-learn scipy joblib threadpoolctl
    PYTHONPATH=scratch:. python tests/vectors/data/write.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

np.float_ = np.float64  # repeng annotates with its old name
from repeng import ControlModel, ControlVector  # noqa: E402
from steering_vectors import SteeringVector  # noqa: E402

from vllm_steer.testing.fuzz.model import save_tiny_llama  # noqa: E402

FOLDER = Path(__file__).parent
HIDDEN, LAYERS = 64, 4
PROMPT, NEW_TOKENS = [5, 17, 99, 3, 42, 8, 61], 12


def generate(model: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Return greedy tokens of a function from tokens to logits."""
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def main() -> None:
    """Write all files."""
    random = np.random.default_rng(11)
    directions = {layer: (4 * random.standard_normal(HIDDEN)).astype(np.float32) for layer in range(1, LAYERS)}
    steered: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(save_tiny_llama(Path(folder)))
        steered["plain"] = generate(lambda tokens: model(tokens).logits)

        vector = ControlVector("llama", directions)
        vector.export_gguf(FOLDER / "repeng.gguf")
        controlled = ControlModel(model, list(directions))
        controlled.set_control(vector)
        steered["repeng"] = generate(lambda tokens: controlled(tokens).logits)
        model = controlled.unwrap()

        other = SteeringVector({layer: torch.from_numpy(each) for layer, each in directions.items()}, "decoder_block")
        with other.apply(model):
            steered["steering-vectors"] = generate(lambda tokens: model(tokens).logits)
        save_file({str(layer): each for layer, each in other.layer_activations.items()}, FOLDER / "layers.safetensors")

    writer = gguf.GGUFWriter(FOLDER / "cvector-generator.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_int32("controlvector.layer_count", len(directions))  # as llama.cpp's tool does
    for layer, each in directions.items():
        writer.add_tensor(f"direction.{layer}", each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (FOLDER / "steered.json").write_text(json.dumps({"prompt": PROMPT, "steered": steered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
