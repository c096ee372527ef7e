# SPDX-License-Identifier: Apache-2.0
"""First half of a proof: build the shrunk model in HF Transformers and record its streams, plain and edited.

``python -m vllm_steer.testing.prove.reference CONFIG_FOLDER OUT`` writes the model and ``streams.npz`` to OUT. It runs
in a process without vLLM, whose Transformers backend changes HF's classes in place.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_steer.testing.prove.shrink import VOCAB, shrink

STREAMS = "streams.npz"
EDITED_LAYER = 1
PROMPT_LEN = 12
_WEIGHT_STD, _NORM_SPREAD = 0.2, 0.3


def prompt() -> list[int]:
    """Return the tokens of the request."""
    return [int(token) for token in np.random.default_rng(7).integers(3, VOCAB, PROMPT_LEN)]


def make(source: str, out: Path, trust_remote_code: bool = False) -> None:
    """Write the shrunk model and its streams; raises HF's error if it does not know the model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    shrink(config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
    ).eval()
    randomise(model)
    model.save_pretrained(out)
    plain = _streams(model, None)
    length = float(np.linalg.norm(plain[EDITED_LAYER + 1], axis=-1).mean())
    vector = np.random.default_rng(3).standard_normal(config.hidden_size).astype(np.float32)
    vector *= length / np.linalg.norm(vector)
    np.savez(out / STREAMS, plain=plain, edited=_streams(model, vector), vector=vector)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Set weights large enough for every sublayer to matter, and norms around their neutral value."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.ndim > 1 or name.endswith("bias"):
            weight.copy_(_WEIGHT_STD * noise)
        else:
            weight.add_(_NORM_SPREAD * noise.clamp(-1.0, 1.0))


@torch.no_grad()
def _streams(model: Any, vector: np.ndarray | None) -> np.ndarray:
    """Return the stream before each layer and after the last one, ``[layers + 1, tokens, hidden]``.

    ``vector`` is added after layer ``EDITED_LAYER``.
    """
    seen: dict[int, torch.Tensor] = {}
    blocks = _blocks(model)

    def record_input(number: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            seen[number] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def record_output(number: int) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            if number == EDITED_LAYER and vector is not None:
                stream = stream + torch.from_numpy(vector)
            seen[number + 1] = stream[0].clone()
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        return hook

    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(record_input(number), with_kwargs=True))
        handles.append(block.register_forward_hook(record_output(number)))
    model(torch.tensor([prompt()]), use_cache=False)
    for handle in handles:
        handle.remove()
    return np.stack([seen[number].numpy() for number in range(len(blocks) + 1)])


def _blocks(model: nn.Module) -> nn.ModuleList:
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == layers)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), "--trust-remote-code" in sys.argv)
