# SPDX-License-Identifier: Apache-2.0
"""The files of the demo model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from tests.demo.train import tokenizer as bpe
from tests.repo.tree import ROOT

MODEL = ROOT / "demo/model"
MESSAGES = [
    {"role": "user", "content": "Return the value"},
    {"role": "assistant", "content": "of x."},
    {"role": "user", "content": "def area("},
]


def test_chat_template_joins_the_messages() -> None:
    """Catches a model without a chat template, a second or missing ``<s>``, and messages that run into each other."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == f"{bpe.BOS}Return the value\n\nof x.\n\ndef area("
    encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded == tokenizer(text.removeprefix(bpe.BOS))["input_ids"]
    assert encoded.count(bpe.BOS_ID) == 1


def test_training_saves_the_same_files(tmp_path: Path) -> None:
    """Catches a tokenizer file that the next training would leave out or write differently."""
    bpe.save(bpe.Tokenizer.from_file(str(MODEL / "tokenizer.json")), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(bpe.FILES)
    for name in bpe.FILES:
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes(), name
