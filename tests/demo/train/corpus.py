# SPDX-License-Identifier: Apache-2.0
"""Build the corpus of the demo model: half Python code, half English documentation, with a manifest.

    python tests/demo/train/corpus.py --out DIR

DIR/downloads holds the packages, DIR/text the cleaned documents as JSON lines, and DIR/tokens what
training reads: the tokenizer, {code,prose}.{train,heldout}.npy (uint16 [tokens], each document
`<s> ... </s>`) and manifest.json.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import prose
import python_code
import sources
import tokenizer as bpe
from tokenizers import Tokenizer

HELD_OUT = 0.02  # share of documents, chosen by the digest of their path
CODE_LIMIT = 2_500_000  # characters per source, so that no single package dominates
API_PROSE_LIMIT = 4_000_000
MIN_DOCUMENT = 200  # characters
Document = dict[str, str]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    documents: dict[str, list[Document]] = {"code": [], "prose": []}
    manifest: list[dict[str, object]] = []
    seen_paragraphs: set[int] = set()
    seen_code = python_code.Repeats()
    for source, files in collect(out / "downloads"):
        ordered = sorted(files, key=lambda file: digest(file.path))
        code = list(code_documents(ordered, seen_code))
        text = list(prose_documents(ordered, seen_paragraphs))
        documents["code"] += code
        documents["prose"] += text
        sizes = {"code_characters": size(code), "prose_characters": size(text)}
        manifest.append({**source.row(), **sizes})
        print(f"{source.name:32} {source.licence:36} {sizes}", flush=True)
    write_text(out / "text", documents)
    write_tokens(out / "tokens", documents, manifest)


def collect(downloads: Path) -> Iterator[tuple[sources.Source, list[sources.File]]]:
    """Yield every source in the manifest's order, with its files."""
    yield sources.standard_library()
    for form, path in sources.download(downloads):
        yield sources.open_archive(form, path)


def code_documents(files: Iterable[sources.File], seen: python_code.Repeats) -> Iterator[Document]:
    """Yield cleaned Python files, up to the limit of one source."""
    total = 0
    for file in files:
        if not file.path.endswith(".py") or total >= CODE_LIMIT:
            continue
        text = python_code.clean(file.data.decode("utf-8", "replace"))
        if text is not None and seen.is_new(text):
            total += len(text)
            yield {"path": file.path, "text": text}


def prose_documents(files: Iterable[sources.File], seen: set[int]) -> Iterator[Document]:
    """Yield one document per file: its English paragraphs that no earlier document contains."""
    api_total = 0
    for file in files:
        is_api = file.path.endswith(sources.API_SUFFIXES)
        if is_api and api_total >= API_PROSE_LIMIT:
            continue
        kept = []
        for part in prose_parts(file):
            for paragraph in prose.paragraphs(part):
                key = hash(paragraph.lower())
                if key not in seen:
                    seen.add(key)
                    kept.append(paragraph)
        text = "\n\n".join(kept)
        if len(text) >= MIN_DOCUMENT:
            api_total += len(text) * is_api
            yield {"path": file.path, "text": text + "\n"}


def prose_parts(file: sources.File) -> Iterator[str]:
    """Return the parts of a file that may be prose: docstrings, the whole document, or an API's descriptions."""
    if file.path.endswith("pydoc_data/topics.py"):
        yield from _strings(_literal(file.data.decode("utf-8")))
    elif file.path.endswith(".py"):
        yield from prose.docstrings(file.data.decode("utf-8", "replace"))
    elif file.path.endswith(sources.API_SUFFIXES):
        data = gzip.decompress(file.data) if file.path.endswith(".gz") else file.data
        yield from _descriptions(json.loads(data))
    else:
        yield file.data.decode("utf-8", "replace")


def _literal(module: str) -> object:
    return ast.literal_eval(module[module.index("{") :])


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (text for text in value.values() if isinstance(text, str))


def _descriptions(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("documentation", "description") and isinstance(value, str):
                yield prose.text_of_html(value)
            else:
                yield from _descriptions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _descriptions(value)


def digest(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def size(documents: list[Document]) -> int:
    return sum(len(document["text"]) for document in documents)


def write_text(folder: Path, documents: dict[str, list[Document]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in documents.items():
        with (folder / f"{kind}.jsonl").open("w") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)


def write_tokens(folder: Path, documents: dict[str, list[Document]], manifest: list[dict[str, object]]) -> None:
    """Train the tokenizer, encode each split in a fixed shuffled order and write the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[str]] = {}
    for kind, rows in documents.items():
        for row in sorted(rows, key=lambda row: digest("order:" + row["path"])):
            held = digest("split:" + row["path"]) < HELD_OUT * 2**64
            splits.setdefault(f"{kind}.{'heldout' if held else 'train'}", []).append(row["text"])
    tokenizer = bpe.train(text for name, texts in splits.items() if name.endswith("train") for text in texts)
    bpe.save(tokenizer, folder)
    totals = {}
    for name, texts in splits.items():
        tokens = encode(tokenizer, texts)
        np.save(folder / f"{name}.npy", tokens)
        totals[name] = {"documents": len(texts), "characters": sum(map(len, texts)), "tokens": len(tokens)}
        print(name, totals[name], flush=True)
    whole = {"totals": totals, "sources": manifest}
    (folder / "manifest.json").write_text(json.dumps(whole, indent=1) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return uint16 [tokens]: each text between BOS and EOS."""
    parts = [
        np.asarray([*row.ids, bpe.EOS_ID], dtype=np.uint16)
        for start in range(0, len(texts), 256)
        for row in tokenizer.encode_batch(texts[start : start + 256])
    ]
    return np.concatenate(parts)


if __name__ == "__main__":
    main()
