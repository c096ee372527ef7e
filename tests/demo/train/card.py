# SPDX-License-Identifier: Apache-2.0
"""The model card, generated from the training report and the corpus manifest."""

from __future__ import annotations

from typing import Any


def render(report: dict[str, Any], manifest: dict[str, Any]) -> str:
    """Return the card as Markdown."""
    totals = manifest["totals"]
    return "\n".join(
        [
            _HEAD.format(parameters=report["parameters"] / 1e6, unique=_millions(totals, "tokens")),
            "## Losses\n",
            *_losses(report["losses"]),
            "\n## Training\n",
            _TRAINING.format(**{**report, "tokens": report["tokens"] / 1e9}),
            "## What it writes\n",
            "Openings end at the bar `|`; temperature 0.8, top-p 0.95, one draw each, none chosen.\n",
            *_samples(report["samples"]),
            "\n## Corpus\n",
            _CORPUS.format(
                code=totals["code.train"],
                prose=totals["prose.train"],
                held=_millions(totals, "tokens", "heldout"),
            ),
            *_sources(manifest["sources"]),
            "",
        ]
    )


def _millions(totals: dict[str, Any], key: str, split: str = "train") -> float:
    return float(sum(row[key] for name, row in totals.items() if name.endswith(split)) / 1e6)


def _losses(losses: dict[str, Any]) -> list[str]:
    lines = ["| text | nats per token | bits per byte |", "|---|---|---|"]
    for name, row in losses.items():
        kind, _, split = name.partition(".")
        label = f"{kind}, {split.replace('_', '-')}"
        lines.append(f"| {label} | {row['nats_per_token']} | {row['bits_per_byte']} |")
    return lines


def _samples(samples: dict[str, Any]) -> list[str]:
    lines = []
    for rows in samples.values():
        for row in rows:
            body = f"{row['opening']}|{row['continuation']}".rstrip().splitlines()
            lines += ["```text", *(line.rstrip() for line in body), "```", ""]
    return lines


def _sources(sources: list[dict[str, Any]]) -> list[str]:
    lines = ["| source | version | licence | code, kB | prose, kB |", "|---|---|---|---|---|"]
    for row in sources:
        sizes = f"{row['code_characters'] // 1000} | {row['prose_characters'] // 1000}"
        lines.append(f"| {row['name']} | {row['version']} | {row['licence']} | {sizes} |")
    return lines


_HEAD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: [en, code]
---
# A small model to steer

A Llama of {parameters:.2f} million parameters (6 layers, hidden size 256, 8 heads over 4 key-value heads
of 32, MLP 704, context 1024, byte-level BPE of 4096, tied embeddings, bfloat16) that writes two plainly
different things: Python code and English documentation. It was trained from scratch for this project's
demo and tests, on {unique:.0f} million tokens of text that comes with CPython and with permissively
licensed Python packages. No other model and no data set went into it.

It loads with `transformers` (`AutoModelForCausalLM`, `AutoTokenizer`) and with vLLM as
`LlamaForCausalLM`. The tokenizer puts `<s>` before every text; the model expects it.

It was not trained on conversations. Its chat template joins the messages with blank lines, and the model
continues the last one, so that `LLM.chat` and `/v1/chat/completions` work.

**Use it** to see steering work within seconds on any CPU: a vector from code to prose, or back, changes
what it writes. **Do not use it** for anything that needs the text to be right. It knows the look of code
and of documentation and almost no facts; its code seldom runs, its prose soon loses the thread, and it
may repeat phrases of its training text, which names real products and services. It has seen English and
Python only.
"""
_TRAINING = """\
{steps} steps of {rows} rows of 1024 tokens ({tokens:.2f} billion tokens, half code and half prose in
every step), AdamW (0.9, 0.95; weight decay 0.1), peak rate {rate}, dropout {dropout}, cosine schedule, bfloat16
autocast, {minutes} minutes on one data-centre GPU. Each row starts with `<s>` and a paragraph or an
unindented line. Steps, dropout and the way rows are drawn were chosen by held-out loss, out of three
runs. To do it again:

```console
$ pip install torch 'transformers>=5' tokenizers safetensors numpy
$ python tests/demo/train/corpus.py --out DIR
$ python tests/demo/train/train.py --data DIR --out demo/model
```

`corpus.py` fetches the pinned packages below with `pip download` (about 300 MB) and needs some ten
minutes. The standard library is the running interpreter's, so another Python version gives a slightly
different corpus. The losses above are those of the saved bfloat16 weights. `training.json` holds the
run's curve.
"""
_CORPUS = """\
Code: {code[documents]} files, {code[characters]:,} characters, {code[tokens]:,} tokens. ASCII sources
only, without tests, vendored trees, data tables and files that mostly repeat others; licence headers are
taken off and docstrings cut to their first line. Prose: {prose[documents]} documents,
{prose[characters]:,} characters, {prose[tokens]:,} tokens. Paragraphs of running English from docstrings,
documentation sources and API descriptions; code blocks, tables and markup are taken off and no paragraph
comes twice. Two documents in a hundred were held out ({held:.2f} million tokens). Every source states a
permissive licence (Apache-2.0, MIT, BSD, ISC or PSF); `sources.py` refuses others.
"""
