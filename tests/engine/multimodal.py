# SPDX-License-Identifier: Apache-2.0
"""A tiny Idefics 3 model whose vision tower has as many layers as its language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.tiny import HIDDEN, LAYERS, VOCAB

IMAGE_SIZE, PATCH, SCALE = 28, 7, 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH // SCALE) ** 2
SPECIAL = ("<unk>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
WORDS = VOCAB - len(SPECIAL)


def save_tiny_idefics(folder: Path) -> Path:
    """Save a model and processor in float32, with random weights large enough that the image matters."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": WORDS,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "image_size": IMAGE_SIZE, "patch_size": PATCH,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=SCALE, image_token_id=WORDS + 1, pad_token_id=WORDS,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config).float()
    for name, weight in model.named_parameters():
        if ("vision" in name or "connector" in name) and weight.ndim > 1:
            weight.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def processor() -> Any:
    """Return a processor for which words ``t0``, ``t1``, ... are tokens 0, 1, ... and an image is one square patch."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor, PreTrainedTokenizerFast

    words = [*(f"t{i}" for i in range(WORDS)), *SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": IMAGE_SIZE}, max_image_size={"longest_edge": IMAGE_SIZE}, do_image_splitting=False
    )
    return Idefics3Processor(image_processor=images, tokenizer=fast, image_seq_len=IMAGE_TOKENS)


def image(seed: int) -> Image.Image:
    """Return noise that depends on the seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
