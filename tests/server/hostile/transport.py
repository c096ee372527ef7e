# SPDX-License-Identifier: Apache-2.0
"""Requests with hostile media types, encodings, sizes, methods and paths."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from urllib.parse import quote

from tests.server.hostile.case import CLEAR, JSON, MODULES, SET, VALID_BODIES, Case, ErrorForm
from tests.server.hostile.files import GOOD as FILE
from tests.server.hostile.fragments import NAMES, at
from tests.server.hostile.vectors import GOOD

LIMIT = 1 << 20
"""Bytes of a body: the server's ``--steering-max-body-mib 1``."""
BINARY = "application/octet-stream"
_MODULE = f'"name": "calm", {at(GOOD, field="base")}'
# Route that reads a body -> a valid body.
VALID: dict[str, str] = {
    **{route: f"{{{inside}, {at()}}}" for route, inside in VALID_BODIES.items()},
    MODULES: f"{{{_MODULE}}}",
    SET: f"{{{at(GOOD, field='base')}}}",
}
_OWN = (MODULES, SET)


def _error_form(route: str) -> ErrorForm:
    """Return the form of errors for bodies in which steering fields are not recognized."""
    return "named" if route in _OWN else "openai"


def media_types() -> Iterator[Case]:
    """Yield correct bodies with a wrong media type."""
    types = (
        None, "", "text/plain", "text/json", "application/x-www-form-urlencoded", "multipart/form-data", "*/*",
        "multipart/form-data; boundary=x", "application/pickle", "application/x-python-serialize", "application/zip",
        "application/jsonp", "application/json5", "applicatiоn/json", "application/json\u00a0", "image/png",
        "x" * 10_000,
    )  # fmt: skip
    for kind in types:
        sent = None if kind is None else kind.encode("ascii", "replace").decode()
        for route, body in VALID.items():
            yield Case(f"{str(kind)[:40]}", "POST", route, body.encode(), sent, error_form=_error_form(route))
        if sent is not None:
            yield Case(f"a file as {sent[:40]}", "POST", f"{MODULES}?name=calm", FILE, sent)
    for route in _OWN:
        yield Case("a file as JSON", "POST", f"{route}?name=calm", FILE, JSON)
    yield Case("a file for set", "POST", SET, FILE, BINARY)


def encodings() -> Iterator[Case]:
    """Yield bodies with a wrong or truncated encoding."""
    bomb = gzip.compress(bytes(1 << 26))
    for route, body in VALID.items():
        text = body.encode()
        # The HTTP framework refuses bodies of vLLM's routes that cannot be decoded as text.
        undecoded: ErrorForm = (
            "framework" if _error_form(route) == "openai" and route != "/invocations" else _error_form(route)
        )
        for name, data in {"gzip": gzip.compress(text), "deflate": zlib.compress(text), "64 MiB, gzip": bomb}.items():
            coding = (("content-encoding", name.rpartition(" ")[2]),)
            yield Case(name, "POST", route, data, headers=coding, error_form=undecoded)
        for name, data in {
            "cut in the middle": text[: len(text) // 2],
            "cut at the end": text[:-1],
            "two bodies": text + text,
            "a trailing NUL": text + b"\0",
            "a JSON-hijacking prefix": b")]}',\n" + text,
            "no bytes": b"",
            "one space": b" ",
            "a NUL": b"\0",
            "invalid UTF-8": text.replace(b"post_block", b"post\xff\xfeblock"),
            "an overlong slash": text.replace(b"post_block", b"\xc0\xaf"),
            "a surrogate in UTF-8": text.replace(b"post_block", b"\xed\xa0\x80"),
            "single quotes": text.replace(b'"', b"'"),
            "a comment": text[:-1] + b"/* */}",
            "a trailing comma": text[:-1] + b",}",
            "a raw line break in a key": text.replace(b"post_block", b"post\nblock"),
            "a list of bodies": b"[" + text + b"]",
            "a string": json.dumps(body).encode(),
            "a number": b"1",
            "null": b"null",
            "NaN": b"NaN",
            "a form": b"steering=1",
            "XML": b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>',
        }.items():
            yield Case(name, "POST", route, data, error_form=_error_form(route))
        for encoding in ("utf-16", "utf-32"):
            yield Case(encoding, "POST", route, body.replace("post_block", "nowhere").encode(encoding))


def sizes() -> Iterator[Case]:
    """Yield bodies over the limit, with and without a length, and bodies within it with many entries."""
    spaces = b" " * (LIMIT + 1)
    for route, body in VALID.items():
        text = body.encode()
        for chunked in (False, True):
            how = "in chunks" if chunked else "with its length"
            yield Case(f"spaces in front, {how}", "POST", route, spaces + text, chunked=chunked)
            yield Case(f"spaces behind, {how}", "POST", route, text + spaces, chunked=chunked)
            large = text.replace(b'"1": ', b'"2": [' + b"1," * (LIMIT // 2) + b'1], "1": ')
            yield Case(f"a vector of {LIMIT // 2:,} numbers, {how}", "POST", route, large, chunked=chunked)
        for name, extra in {
            "a key of 900,000 letters": '"post_block' + "x" * 900_000 + '": {"1": [1]}, ',
            "100,000 keys": "".join(f'"k{i}": 1, ' for i in range(60_000)),
        }.items():
            yield Case(name, "POST", route, text.replace(b'"post_block"', extra.encode() + b'"post_block"', 1))
    for chunked in (False, True):
        yield Case(f"a file, chunked {chunked}", "POST", f"{MODULES}?name=calm", FILE + spaces, BINARY, chunked=chunked)
        yield Case(f"a body of clear, chunked {chunked}", "POST", CLEAR, spaces, JSON, chunked=chunked)
        yield Case(f"fields for clear, chunked {chunked}", "POST", CLEAR, b'{"name": "x"}', JSON, chunked=chunked)


def paths() -> Iterator[Case]:
    """Yield unknown names, ids, queries and methods."""
    for name, text in NAMES.items():
        raw = text.encode("utf-8", "surrogatepass")
        part = quote(raw, safe="") or "%20"
        if len(part) > 30_000:
            part = part[:30_000]
        for method in ("GET", "DELETE"):
            # A path with a slash, encoded or not, belongs to another route or to none.
            form: ErrorForm = "framework" if "/" in text else "named"
            yield Case(f"module: {name}", method, f"{MODULES}/{part}", content_type=None, error_form=form)
            yield Case(f"capture: {name}", method, f"/v1/captures/{part}", content_type=None, error_form=form)
        good = VALID[MODULES].replace('"calm"', json.dumps(text), 1)
        yield Case(f"to register: {name}", "POST", MODULES, good.encode())
        yield Case(f"in the query: {name}", "POST", f"{MODULES}?name={part}", FILE, BINARY)
        yield Case(f"in body and query: {name}", "POST", f"{MODULES}?name={part}", VALID[MODULES].encode())
    for value in ("maybe", "2", "", "null", "%00", "x" * 1000):
        for route in (SET, f"{MODULES}/calm"):
            yield Case(f"data={value[:20]}", "GET", f"{route}?data={value}", content_type=None, error_form="openai")
    for method in ("PUT", "PATCH", "DELETE", "TRACE", "BREW"):
        for route in (MODULES, SET, CLEAR, "/v1/steering/capabilities"):
            yield Case(f"{method}", method, route, VALID[MODULES].encode(), error_form="framework")
    for target in (
        "/v1/steering/", "/v1/steering/../steering/nothing", "/v1/steering/%2e%2e/set/x",
        "/v1/steering//modules", "/v1/steering/modules/calm/data", "/v1//steering/modules", "/V1/STEERING/MODULES",
        "/v1/captures/", "/v1/captures/a/b", "/v1/captures/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    ):  # fmt: skip
        yield Case("an unknown path", "POST", target, VALID[MODULES].encode(), error_form="framework")
