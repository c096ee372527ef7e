# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/bad-input.md: what a server is sent that it has to refuse, counted from the tests' own corpus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.hostile.corpus import CATEGORIES, counts

MakeTable = Callable[[tuple[str, ...], list[tuple[str, ...]]], str]

HEAD = """# Bad input

`tests/server/hostile` sends a running server what it has to refuse: to every route that carries our fields, whether the
answer would be a stream or not, and to every route of ours. Each request has to end in a status from 400 to 499 with an
error in OpenAI's form, short, with a `message` and with the name of the offending field as `param`; the server has to be
healthy afterwards, to have registered nothing, and to answer a plain greedy request as it did before.

"""

TAIL = """
What no route of ours sees is answered as the server's framework or vLLM does: 404 and 405 for paths and methods that are
not there, and, for bodies of vLLM's own routes that are no JSON, an error whose `param` may be null. Compressed bodies are
not decoded, so they are no JSON.

## Requests from the OpenAPI document

Schemathesis makes requests from the server's own document, right and wrong ones, for every route of ours and for our fields
in completion, chat and responses bodies. None may end in HTTP 500; of our routes, every answer has to be of a status, type
and schema that the document has, and what contradicts the document has to be refused. The tests draw a few with fixed
seeds; as many as one likes are drawn at random by

    python -m pytest tests/server/hostile/test_document.py --hostile 400

## Faults

| fault | where it is tested |
| --- | --- |
| an API server or an engine is killed while modules are registered at all API servers, and the server is started again | `tests/server/test_server_modules.py` |
| writers of a registry's folder are killed at any moment, fifty times | `tests/registry/test_kills.py` |
| a thousand clients vanish in the middle of a capture: rows, vectors, memory and files are all given back | `tests/server/test_api_servers.py` |
| a client has left by the time its answer is made | `tests/server/http/test_capture_results.py` |

Rows that are too large for an answer are the client's from the moment at which the answer is sent: they stay until it
deletes them or they expire. A client that vanishes before is found out when its answer is about to be sent, and its rows
are deleted at once.
"""


def page(table: MakeTable) -> str:
    """The whole page."""
    found = counts()
    rows = [(name, category.what, f"{found[name]:,}") for name, category in CATEGORIES.items()]
    return HEAD + table(("category", "what", "requests"), [*rows, ("all", "", f"{sum(found.values()):,}")]) + TAIL
