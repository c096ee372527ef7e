# SPDX-License-Identifier: Apache-2.0
"""Examples and prompts, from JSON lines or Python objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import is_integer, parse_json, shown

Text: TypeAlias = "str | list[int] | list[dict[str, Any]]"
"""A text, its token ids, or a conversation: messages with a role and a content."""
Source: TypeAlias = "str | Path | Sequence[Any]"
"""A file of JSON lines, or its objects."""
_FORMS = '{"positive": ..., "negative": ...} or {"text": ..., "label": true or false}'


@dataclass(frozen=True, eq=False)
class Examples:
    """Texts of two classes."""

    texts: tuple[Text, ...]
    labels: npt.NDArray[np.bool_]
    """Whether each text is positive."""
    paired: bool
    """Whether texts ``2 i`` and ``2 i + 1`` are a pair."""

    @property
    def groups(self) -> npt.NDArray[np.int64]:
        """Number of each text's pair, or of each text if there are no pairs."""
        return np.arange(len(self.texts)) // (2 if self.paired else 1)

    @property
    def digest(self) -> str:
        """Hash of the texts and labels."""
        content = json.dumps([self.paired, self.labels.tolist(), self.texts], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def shuffled(self, seed: int = 0) -> Examples:
        """Return the examples with the labels of half of the pairs, or of half of each class, exchanged.

        What the classes have in common cancels out, so that a direction made of them is a control.
        """
        random, labels = np.random.default_rng(seed), self.labels.copy()
        numbers = [np.unique(self.groups)] if self.paired else [np.flatnonzero(self.labels == each) for each in (0, 1)]
        chosen = np.concatenate([random.permutation(each)[: len(each) // 2] for each in numbers])
        labels ^= np.isin(self.groups, chosen)
        return replace(self, labels=labels)


def read_examples(source: Source | Examples) -> Examples:
    """Read pairs, or texts with labels.

    Args:
        source: A file of JSON lines, or a list of their objects: ``{"positive": ..., "negative": ...}`` or
            ``{"text": ..., "label": true}``. A text is a string, a list of token ids, or a conversation, whose key may
            be ``messages``. Other keys are ignored.

    Raises:
        SteeringError: The file cannot be read, an example has another form, the texts of a pair are equal, or there are
            not texts of both classes.
    """
    if isinstance(source, Examples):
        return source
    texts: list[Text] = []
    labels: list[bool] = []
    forms = set()
    name, lines = _objects(source, "examples")
    for where, line in lines:
        keys = ("positive", "negative") if "positive" in line or "negative" in line else ("text", "label")
        if missing := [key for key in keys if key not in line]:
            raise SteeringError(where, f"has no {missing[0]}; an example is {_FORMS}")
        forms.add(keys)
        if keys[0] == "text":
            if line["label"] not in (0, 1):  # False and True are equal to them
                raise SteeringError(f"{where}.label", f"must be true or false, not {shown(line['label'])}")
            texts.append(_text(line["text"], f"{where}.text"))
            labels.append(bool(line["label"]))
        else:
            if line["positive"] == line["negative"]:
                raise SteeringError(where, "has equal texts, which have no difference; change one or remove the pair")
            texts += [_text(line[key], f"{where}.{key}") for key in keys]
            labels += [True, False]
    if len(forms) > 1:
        raise SteeringError(name, "has pairs and labelled texts; use one of the two forms")
    if len(set(labels)) < 2:
        found = f"has labels of one class, {str(labels[0]).lower()}" if labels else "is empty"
        raise SteeringError(name, f"{found}; give texts of both classes as {_FORMS}")
    return Examples(tuple(texts), np.array(labels), "positive" in next(iter(forms)))


def read_prompts(source: Source, *, chat: bool = False) -> list[Text]:
    """Read prompts: strings, ``{"prompt": ...}`` or ``{"messages": [...]}``.

    Args:
        source: A file of JSON lines, or a list of their values.
        chat: Whether to make a conversation of each string.

    Raises:
        SteeringError: The file cannot be read, is empty, or a prompt has another form.
    """
    name, lines = _objects(source, "prompts", "prompt")
    prompts = []
    for where, line in lines:
        key = "messages" if "messages" in line else "prompt"
        if key not in line:
            raise SteeringError(where, 'has no prompt; a line is "...", {"prompt": ...} or {"messages": [...]}')
        text = _text(line[key], f"{where}.{key}")
        prompts.append([{"role": "user", "content": text}] if chat and isinstance(text, str) else text)
    if not prompts:
        raise SteeringError(name, "is empty; give at least one prompt")
    return prompts


class TextLine(NamedTuple):
    """A text with its tag, and its place in errors: file and line, or number."""

    text: Text
    tag: str | None
    place: str


def read_texts(source: Source | Iterable[Any]) -> list[TextLine]:
    """Read texts and their tags.

    Args:
        source: A file of JSON lines (``.jsonl``) or an iterable of their values: strings, token ids, conversations, or
            ``{"text": ..., "tag": "..."}``. A file with another suffix has one text per line. What this function has
            returned is returned as it is.

    Raises:
        SteeringError: The file cannot be read, is empty, or a text has another form.
    """
    if isinstance(source, (str, Path)) and Path(source).suffix != ".jsonl":
        try:
            plain = Path(source).read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeError) as error:
            raise SteeringError("texts", f"{source} cannot be read: {error}; use UTF-8 text or .jsonl") from None
        first = next(filter(str.strip, plain), "")
        if first.lstrip().startswith("{") and _is_json(first):
            raise SteeringError("texts", f"{source} has JSON in its lines; give it the suffix .jsonl")
        name, texts = str(source), [TextLine(t, None, f"{source}:{i}") for i, t in enumerate(plain, 1) if t.strip()]
    else:
        given = source if isinstance(source, (str, Path)) else list(source)
        if given and not isinstance(given, (str, Path)) and all(isinstance(each, TextLine) for each in given):
            return given
        name, objects = _objects(given, "texts", "text")
        texts = []
        for where, line in objects:
            if "text" not in line:
                raise SteeringError(where, 'has no text; a line is "..." or {"text": ..., "tag": "..."}')
            tag = line.get("tag")
            if tag is not None and not isinstance(tag, str):
                raise SteeringError(f"{where}.tag", f"must be a text, not {shown(tag)}")
            texts.append(TextLine(_text(line["text"], f"{where}.text"), tag, where))
    if not texts:
        raise SteeringError(name, "is empty; give at least one text")
    return texts


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _objects(source: Source, field: str, key: str | None = None) -> tuple[str, list[tuple[str, Mapping[str, Any]]]]:
    """Return the name of a source, and its objects with their places. A bare value is the object's ``key``."""
    if isinstance(source, (str, Path)):
        try:
            lines = Path(source).read_bytes().splitlines()
        except OSError as error:
            raise SteeringError(field, f"{source} cannot be read: {error.strerror or error}") from None
        field = str(source)
        try:
            found = [
                (f"{source}:{i}", parse_json(line, f"{source}:{i}")) for i, line in enumerate(lines, 1) if line.strip()
            ]
        except SteeringError as error:
            raise SteeringError(error.field, f"{error.problem}; write one JSON object on each line") from None
    else:
        found = [(f"{field}[{i}]", value) for i, value in enumerate(source)]
    if key is not None:
        found = [(where, value if isinstance(value, Mapping) else {key: value}) for where, value in found]
    for where, value in found:
        if isinstance(value, list):
            raise SteeringError(
                where, f"is a list of {len(value)} values; write each on a line of its own, as {_FORMS}"
            )
        if not isinstance(value, Mapping):
            raise SteeringError(where, f"must be an object, {_FORMS}, not {shown(value)}")
    if key != "prompt":
        found = [(where, {"text": line["messages"], **line} if "messages" in line else line) for where, line in found]
    return field, found


def _text(value: object, field: str) -> Text:
    """Return a text, token ids or a conversation; raise SteeringError for anything else."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, (list, tuple)) and value:
        if all(map(is_integer, value)):
            return [int(token) for token in value]
        if all(isinstance(each, Mapping) and "role" in each and "content" in each for each in value):
            return [dict(each) for each in value]
    problem = "must be a text, token ids, or messages with role and content, and not empty"
    raise SteeringError(field, f"{problem}; not {shown(value)}")
