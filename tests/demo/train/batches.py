# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation rows, stored on the device as one long tensor per kind and split."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizer as bpe
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

Kind = Literal["code", "prose"]
KINDS: tuple[Kind, ...] = ("code", "prose")
MEASURED_ROWS = 64  # rows of training text that the training loss is measured on
_OPENING = re.compile(r"[A-Za-z_@]")
_NEWLINES = ("\u010a", "\u010a\u010a")  # byte-level BPE's spelling of one and two line feeds


@dataclass(frozen=True)
class Stream:
    """Concatenated documents, int64 [tokens], with the start positions of paragraphs and unindented lines."""

    tokens: Tensor
    starts: Tensor
    last_start: int

    def rows(self, count: int, random: torch.Generator) -> Tensor:
        """Return int64 [count, bpe.CONTEXT + 1]: BOS, then text from a random start position.

        Rows begin at paragraphs and unindented lines, as prompts do. Each start is the first one after a uniform
        position, so that text with many short paragraphs is not over-represented.
        """
        positions = torch.randint(self.last_start, (count,), generator=random, device=self.tokens.device)
        picks = torch.searchsorted(self.starts, positions)
        offsets = torch.arange(bpe.CONTEXT, device=self.tokens.device)
        text = self.tokens[self.starts[picks][:, None] + offsets]
        return F.pad(text, (1, 0), value=bpe.BOS_ID)

    def in_order(self) -> Tensor:
        """Return int64 [n, bpe.CONTEXT + 1]: all complete rows of the stream, each after a BOS."""
        whole = len(self.tokens) // bpe.CONTEXT * bpe.CONTEXT
        return F.pad(self.tokens[:whole].view(-1, bpe.CONTEXT), (1, 0), value=bpe.BOS_ID)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out streams of both kinds."""

    code: Stream
    prose: Stream
    held_out: dict[Kind, Stream]
    token_bytes: Tensor  # float32 [vocabulary]: the length in bytes of each token's text

    @classmethod
    def load(cls, folder: Path, device: str) -> Corpus:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        spelling = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        newlines = [i for i, text in enumerate(spelling) if text in _NEWLINES] + [bpe.BOS_ID]
        openings = [i for i, text in enumerate(spelling) if i > bpe.PAD_ID and _OPENING.match(text)]
        lengths = torch.tensor([0.0 if i <= bpe.PAD_ID else len(text) for i, text in enumerate(spelling)])

        def stream(name: str) -> Stream:
            array = np.load(folder / f"{name}.npy")
            after_newline = np.isin(array[:-1], newlines) & np.isin(array[1:], openings)
            starts = np.flatnonzero(after_newline) + 1
            starts = starts[starts < len(array) - bpe.CONTEXT]
            tokens = torch.from_numpy(array.astype(np.int64))
            return Stream(tokens.to(device), torch.from_numpy(starts).to(device), int(starts[-1]))

        held_out = {kind: stream(f"{kind}.heldout") for kind in KINDS}
        return cls(stream("code.train"), stream("prose.train"), held_out, lengths.to(device))

    def describe(self) -> str:
        streams = {"code": self.code, "prose": self.prose}
        return ", ".join(
            f"{kind} {len(stream.tokens):,} tokens, {len(stream.starts):,} starts" for kind, stream in streams.items()
        )

    def held_out_loss(self, kind: Kind, model: LlamaForCausalLM) -> float:
        return self._measure(self.held_out[kind].in_order(), model)[0]

    def final_losses(self, model: LlamaForCausalLM) -> dict[str, dict[str, float]]:
        """Return nats per token and bits per byte for each kind, on training and held-out text."""
        out = {}
        streams: dict[Kind, Stream] = {"code": self.code, "prose": self.prose}
        for kind, stream in streams.items():
            rows = stream.in_order()
            sampled = rows[:: max(1, len(rows) // MEASURED_ROWS)]
            for split, rows in (("train", sampled), ("held_out", self.held_out[kind].in_order())):
                nats, bits = self._measure(rows, model)
                out[f"{kind}.{split}"] = {"nats_per_token": round(nats, 4), "bits_per_byte": round(bits, 4)}
        return out

    @torch.no_grad()
    def _measure(self, rows: Tensor, model: LlamaForCausalLM) -> tuple[float, float]:
        if not len(rows):
            raise ValueError("The text is shorter than one row")
        total = 0.0
        for part in rows.split(32):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
            total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        targets = rows[:, 1:]
        return total / targets.numel(), total / float(np.log(2)) / self.token_bytes[targets].sum().item()
