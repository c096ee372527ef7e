# SPDX-License-Identifier: Apache-2.0
"""Train the demo model on the output of corpus.py, and save it with its tokenizer, samples and card.

    python tests/demo/train/train.py --data DIR --out demo/model

The schedule runs over --steps, or over --max-minutes when that comes first. One data-centre GPU
does the default in about three minutes; `--device cpu --steps 3 --rows 2` only tries the script out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import batches
import card
import samples
import tokenizer as bpe
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
WARM_UP = 0.02  # share of the schedule
FINAL_RATE = 0.01  # of the peak rate


@dataclass(frozen=True)
class Options:
    data: Path
    out: Path
    steps: int
    max_minutes: float
    rows: int
    rate: float
    dropout: float
    device: str
    compile: bool
    seed: int


def options() -> Options:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data", type=Path, required=True, help="the folder given to corpus.py as --out")
    parser.add_argument("--out", type=Path, required=True, help="where the model goes")
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    parser.add_argument("--rows", type=int, default=128, help="rows of the context's length in one step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args()))


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=bpe.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=bpe.CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=bpe.BOS_ID,
        eos_token_id=bpe.EOS_ID,
        pad_token_id=bpe.PAD_ID,
        architectures=["LlamaForCausalLM"],
        use_cache=True,
    )


def loss_of(model: LlamaForCausalLM, rows: Tensor, dropout: float) -> Tensor:
    """Return the mean cross-entropy of int64 [rows, tokens + 1], with dropout on each block's output.

    Runs the model's own modules without its mask building, so that attention takes the causal fast path.
    """
    inner = model.model
    hidden = F.dropout(inner.embed_tokens(rows[:, :-1]), dropout)
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = inner.rotary_emb(hidden, position_ids=positions)
    for layer in inner.layers:
        added = layer(hidden, attention_mask=None, position_embeddings=rotary) - hidden
        hidden = hidden + F.dropout(added, dropout)
    logits = model.lm_head(inner.norm(hidden))
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def rate_at(progress: float, peak: float) -> float:
    """Return the rate at a progress in [0, 1]: linear warm-up, then a cosine down to FINAL_RATE of the peak."""
    if progress < WARM_UP:
        return peak * (progress + 1e-3) / (WARM_UP + 1e-3)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def optimiser_of(model: LlamaForCausalLM, chosen: Options) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=chosen.rate, betas=BETAS, fused=chosen.device != "cpu")


def fit(model: LlamaForCausalLM, chosen: Options, corpus: batches.Corpus) -> dict[str, object]:
    """Train in place and return the report for the card."""
    optimiser = optimiser_of(model, chosen)
    step_loss = torch.compile(loss_of) if chosen.compile else loss_of
    random = torch.Generator(device=chosen.device).manual_seed(chosen.seed)
    half = chosen.rows // 2

    def gradients() -> Tensor:
        rows = torch.cat([corpus.code.rows(half, random), corpus.prose.rows(chosen.rows - half, random)])
        with torch.autocast(chosen.device, dtype=torch.bfloat16):
            loss: Tensor = step_loss(model, rows, chosen.dropout)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

    gradients()  # compiles, so that the schedule's clock starts with the first real step
    optimiser.zero_grad(set_to_none=True)
    started = time.monotonic()
    history: list[dict[str, float]] = []
    average = torch.zeros(())
    step = 0
    while True:
        minutes = (time.monotonic() - started) / 60
        progress = max(step / chosen.steps, minutes / chosen.max_minutes)
        if progress >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate_at(progress, chosen.rate)
        loss = gradients()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        average = loss if step == 0 else average.lerp(loss, 0.05)
        step += 1
        if step % 200 == 0:
            row = {"step": step, "minutes": round(minutes, 2), "train": round(average.item(), 4)}
            if step % 1000 == 0:
                row |= {kind: round(corpus.held_out_loss(kind, model), 4) for kind in batches.KINDS}
                history.append(row)
            print(json.dumps(row), flush=True)
    return {
        "steps": step,
        "tokens": step * chosen.rows * bpe.CONTEXT,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "rows": chosen.rows,
        "rate": chosen.rate,
        "dropout": chosen.dropout,
        "train_loss": round(average.item(), 4),
        "history": history,
    }


def save(model: LlamaForCausalLM, chosen: Options) -> None:
    """Write bf16 weights and the configuration, without the output layer, which is tied to the embedding."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, chosen.out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.dtype = torch.bfloat16
    config.save_pretrained(chosen.out)
    GenerationConfig(
        bos_token_id=bpe.BOS_ID, eos_token_id=bpe.EOS_ID, pad_token_id=bpe.PAD_ID,
        do_sample=True, temperature=0.8, top_p=0.95,
    ).save_pretrained(chosen.out)  # fmt: skip
    for name in bpe.FILES:
        (chosen.out / name).write_bytes((chosen.data / "tokens" / name).read_bytes())


def main() -> None:
    chosen = options()
    torch.manual_seed(chosen.seed)
    torch.set_float32_matmul_precision("high")
    corpus = batches.Corpus.load(chosen.data / "tokens", chosen.device)
    model = LlamaForCausalLM(configuration()).to(chosen.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters; {corpus.describe()}", flush=True)
    report: dict[str, object] = {"parameters": parameters, **fit(model, chosen, corpus)}
    save(model, chosen)
    # Measure the saved weights, rounded to bf16, with the library's own forward pass.
    saved = LlamaForCausalLM.from_pretrained(chosen.out, dtype=torch.float32).to(chosen.device).eval()
    report["losses"] = corpus.final_losses(saved)
    report["samples"] = samples.draw(saved, AutoTokenizer.from_pretrained(chosen.out), chosen.seed)
    print(json.dumps(report["losses"], indent=1), flush=True)
    (chosen.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    manifest = json.loads((chosen.data / "tokens" / "manifest.json").read_text())
    (chosen.out / "README.md").write_text(card.render(report, manifest))


if __name__ == "__main__":
    main()
