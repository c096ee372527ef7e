# SPDX-License-Identifier: Apache-2.0
"""Train the model in ``demo/induction``: two layers that continue a sequence that repeats, in less than a minute.

The sequences are random words. From its second period on, a sequence is predictable by induction alone: find the last
occurrence of the current word, and repeat the word that followed it.

    python -m tests.demo.train.induction demo/induction
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEXT = (
    "apple arm bag ball bed bee bell bird boat book box bread bus cake car cat chair clock cloud coat corn cow cup "
    "desk dog door duck ear egg farm fish flag foot frog game gate gift goat hand hat hen hill horn horse house ice "
    "jam kite"
)
WORDS: tuple[str, ...] = tuple(_TEXT.split())
LENGTH = 48
STEPS = 2000
BATCH = 64


def sequences(generator: torch.Generator) -> torch.Tensor:
    """Return a batch of sequences that repeat with a random period, ``[BATCH, LENGTH]``."""
    rows = []
    for _ in range(BATCH):
        period = int(torch.randint(4, 25, (), generator=generator))
        words = torch.randperm(len(WORDS), generator=generator)[:period]
        rows.append(words.repeat(-(-LENGTH // period))[:LENGTH])
    return torch.stack(rows)


def train(seed: int = 0) -> LlamaForCausalLM:
    """Return a trained model."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        batch = sequences(generator)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def main(folder: Path) -> None:
    """Train, and save the model and its tokenizer in ``folder``."""
    train().bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
