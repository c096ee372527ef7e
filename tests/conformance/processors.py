# SPDX-License-Identifier: Apache-2.0
"""Tiny processors, which vLLM's Transformers backend wants of multimodal models although no image comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import transformers

_VOCAB: Final = 128
"""Tokens, as many as the models have."""


def save_processor(config: str, path: Path) -> None:
    """Save the processor of a model beside it, if the model needs one.

    Args:
        config: The name of the model's config class.
        path: The folder of the model.
    """
    if config in PROCESSORS:
        PROCESSORS[config]().save_pretrained(path)


def _tokenizer(**special: str) -> Any:
    """Return a tokenizer of whole words, the last of which are the special tokens, by name."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = [f"t{number}" for number in range(_VOCAB - len(special))] + list(special.values())
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="t0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model),
        bos_token="t1",
        eos_token="t2",
        pad_token="t0",
        unk_token="t0",
        extra_special_tokens=special,
    )


def _emu3() -> Any:
    names = "image_token", "boi_token", "eoi_token", "image_wrapper_token", "eof_token"
    tokenizer = _tokenizer(**{name: f"<{name}>" for name in names})
    return transformers.Emu3Processor(transformers.Emu3ImageProcessor(), tokenizer)


def _hunyuan() -> Any:
    tokenizer = _tokenizer(**{name: f"<{name}>" for name in ("image_token", "image_start_token", "image_end_token")})
    return transformers.HunYuanVLProcessor(transformers.Emu3ImageProcessor(), tokenizer)


PROCESSORS: Final[Mapping[str, Callable[[], Any]]] = {"Emu3Config": _emu3, "HunYuanVLConfig": _hunyuan}
"""Makers of processors by config class."""
