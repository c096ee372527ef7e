# SPDX-License-Identifier: Apache-2.0
"""All hostile requests by category. The tests send them, and docs/reference/bad-input.md counts them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.server.hostile import fragments, transport, vectors
from tests.server.hostile.case import CARRYING, MODULES, SET, STREAMING, Case
from tests.server.hostile.files import FILES

# A field of requests -> what the same is called in a module, or in global steering.
_OWN_NAMES = {
    '"prefill_steering_vectors"': '"prefill"', '"decode_steering_vectors"': '"decode"', '"steering_vectors"': '"base"',
    '"steering"': '"edits"', '"steering_modules"': '"modules"',
}  # fmt: skip
# A module is made without a prompt, so what only a prompt decides is right in it.
_NEEDS_A_PROMPT = frozenset({"tokens: before the prompt", "tokens: more stretches than a request may have"})


def in_bodies(hostile: fragments.Fragments) -> Iterator[Case]:
    """Yield each fragment in a body of every route that supports our fields, and of our own routes where it applies."""
    streams = itertools.cycle((False, True))
    for name, text in hostile.items():
        broken = _is_broken(text)  # vLLM's own error, for a route that reads its body itself, names no field
        for route, inside in CARRYING.items():
            stream = ', "stream": true' if route in STREAMING and next(streams) else ""
            body = _json(f"{inside}{stream}, {text}")
            yield Case(name, "POST", route, body, answer="openai" if route == "/invocations" and broken else "named")
        own = text
        for field, key in _OWN_NAMES.items():
            own = own.replace(field, key)
        if name not in _NEEDS_A_PROMPT:
            yield Case(name, "POST", MODULES, _json(f'"name": "calm", {own}'))
        yield Case(name, "POST", SET, _json(own))


def _json(inside: str) -> bytes:
    return f"{{{inside}}}".encode("utf-8", "surrogatepass")


def _is_broken(inside: str) -> bool:
    try:
        "".join(json.loads(f"{{{inside}}}")).encode()
    except (json.JSONDecodeError, UnicodeEncodeError):
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _files() -> Iterator[Case]:
    for i, (name, data) in enumerate(FILES.items()):
        kind = ("application/octet-stream", "application/safetensors")[i % 2]
        yield Case(name, "POST", f"{MODULES}?name=calm", data, kind)


@dataclass(frozen=True)
class Category:
    """One kind of hostile input."""

    what: str
    """For the page."""
    make: Callable[[], Iterator[Case]]


def _of_vectors(hostile: dict[str, str]) -> Callable[[], Iterator[Case]]:
    return lambda: in_bodies(fragments.holding(hostile))


def _of_fragments(make: Callable[[], fragments.Fragments]) -> Callable[[], Iterator[Case]]:
    return lambda: in_bodies(make())


CATEGORIES: dict[str, Category] = {
    "shapes": Category("vectors of another shape or type, references, class names", _of_vectors(vectors.SHAPES)),
    "numbers": Category(
        "NaN, infinities, numbers beyond float32, of 500,000 digits, or written otherwise than JSON does",
        _of_vectors(vectors.NUMBERS),
    ),
    "packed vectors": Category(
        "declared shapes up to 10^300, data that is far too long, compressed, or in another alphabet",
        _of_vectors(vectors.PACKED),
    ),
    "nesting": Category("up to 400,000 brackets, closed or not", _of_vectors(vectors.NESTING)),
    "whole fields": Category("values of another type in the place of a field", _of_fragments(fragments.whole_fields)),
    "duplicate keys": Category("a key twice in one object, at every depth", _of_fragments(fragments.duplicates)),
    "names": Category(
        "paths, look-alike letters, text that runs backwards, invisible and control characters, half surrogate pairs, "
        "injections, where names of modules, probes, points, layers, consumers and options stand",
        _of_fragments(fragments.names),
    ),
    "look-alike fields": Category(
        "keys that a reader takes for one of ours", _of_fragments(fragments.lookalikes)
    ),
    "wrong places": Category(
        "our fields where they would be ignored, and keys of our own", _of_fragments(fragments.places)
    ),
    "layers and tokens": Category("huge, negative, empty and endless selections", _of_fragments(fragments.selectors)),
    "parts": Category("other parts of edits, references and captures", _of_fragments(fragments.parts)),
    "files": Category("safetensors files with hostile headers, and files of other formats", _files),
    "media types": Category("a right body under a wrong type", transport.media_types),
    "encodings": Category("compressed, truncated, in other encodings, or no JSON", transport.encodings),
    "sizes": Category("bodies over the limit, with a length and in chunks; many or long keys", transport.sizes),
    "paths": Category("names, handles, queries, methods and paths", transport.paths),
}  # fmt: skip


def counts() -> dict[str, int]:
    """Return the number of requests per category."""
    return {name: sum(1 for _ in category.make()) for name, category in CATEGORIES.items()}
