# SPDX-License-Identifier: Apache-2.0
"""All hostile requests by category. The tests send them, and docs/reference/bad-input.md counts them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.server.hostile import fragments, transport, vectors
from tests.server.hostile.case import MODULES, SET, STREAMING, VALID_BODIES, Case, ErrorForm
from tests.server.hostile.files import FILES

# Field of a request -> the corresponding key of a module or of global steering.
_MODULE_KEYS = {
    '"prefill_steering_vectors"': '"prefill"', '"decode_steering_vectors"': '"decode"', '"steering_vectors"': '"base"',
    '"steering"': '"edits"', '"steering_modules"': '"modules"',
}  # fmt: skip
# Valid in a module, because whether they are invalid depends on a prompt.
_NEEDS_PROMPT = frozenset({"tokens: before the prompt", "tokens: more ranges than a request may have"})


def in_bodies(hostile: fragments.Fragments) -> Iterator[Case]:
    """Yield each fragment in a body of every route that supports our fields, and of our own routes where it applies."""
    streams = itertools.cycle((False, True))
    for name, text in hostile.items():
        malformed = _is_malformed(text)  # on /invocations vLLM reports malformed JSON, without a field
        for route, inside in VALID_BODIES.items():
            stream = ', "stream": true' if route in STREAMING and next(streams) else ""
            body = _json(f"{inside}{stream}, {text}")
            error_form: ErrorForm = "openai" if route == "/invocations" and malformed else "named"
            yield Case(name, "POST", route, body, error_form=error_form)
        renamed = text
        for field, key in _MODULE_KEYS.items():
            renamed = renamed.replace(field, key)
        if name not in _NEEDS_PROMPT:
            yield Case(name, "POST", MODULES, _json(f'"name": "calm", {renamed}'))
        yield Case(name, "POST", SET, _json(renamed))


def _json(inside: str) -> bytes:
    return f"{{{inside}}}".encode("utf-8", "surrogatepass")


def _is_malformed(inside: str) -> bool:
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
    """A category of hostile input."""

    description: str
    """Shown in docs/reference/bad-input.md."""
    make: Callable[[], Iterator[Case]]


def _vector_cases(hostile: dict[str, str]) -> Callable[[], Iterator[Case]]:
    return lambda: in_bodies(fragments.holding(hostile))


def _fragment_cases(make: Callable[[], fragments.Fragments]) -> Callable[[], Iterator[Case]]:
    return lambda: in_bodies(make())


CATEGORIES: dict[str, Category] = {
    "shapes": Category("vectors of a wrong shape or type, references, class names", _vector_cases(vectors.SHAPES)),
    "numbers": Category(
        "NaN, infinities, values beyond float32, numbers of 500,000 digits or in non-JSON notation",
        _vector_cases(vectors.NUMBERS),
    ),
    "packed vectors": Category(
        "declared shapes up to 10^300; data that is too long, compressed or in another alphabet",
        _vector_cases(vectors.PACKED),
    ),
    "nesting": Category("up to 400,000 brackets, closed or not", _vector_cases(vectors.NESTING)),
    "whole fields": Category("values of a wrong type for a field", _fragment_cases(fragments.whole_fields)),
    "duplicate keys": Category("a key twice in one object, at every depth", _fragment_cases(fragments.duplicates)),
    "names": Category(
        "paths, look-alike letters, right-to-left text, invisible and control characters, half surrogate pairs, "
        "injections, as names of modules, probes, points, layers, consumers and options",
        _fragment_cases(fragments.names),
    ),
    "look-alike fields": Category(
        "keys that look like steering fields", _fragment_cases(fragments.lookalikes)
    ),
    "wrong places": Category(
        "steering fields in places where they would be ignored, and internal keys", _fragment_cases(fragments.places)
    ),
    "layers and tokens": Category("huge, negative, empty and endless selections", _fragment_cases(fragments.selectors)),
    "parts": Category("other attributes of edits, module references and captures", _fragment_cases(fragments.parts)),
    "files": Category("safetensors files with hostile headers, and files of other formats", _files),
    "media types": Category("valid bodies with a wrong type", transport.media_types),
    "encodings": Category("compressed, truncated, in other encodings, or not JSON", transport.encodings),
    "sizes": Category("bodies over the limit, with a length and in chunks; many or long keys", transport.sizes),
    "paths": Category("names, handles, queries, methods and paths", transport.paths),
}  # fmt: skip


def counts() -> dict[str, int]:
    """Return the number of requests per category."""
    return {name: sum(1 for _ in category.make()) for name, category in CATEGORIES.items()}
