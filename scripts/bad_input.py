# SPDX-License-Identifier: Apache-2.0
"""Writer of docs/reference/bad-input.md: the invalid requests that the tests send, counted from their corpus."""

from __future__ import annotations

import sys
from pathlib import Path

from pages import table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.hostile.corpus import CATEGORIES, counts

HEAD = """# Bad input

`tests/server/hostile` sends invalid requests to a running server: to every route that accepts steering fields, streamed
or not, and to every steering route. Each request must end with a status from 400 to 499 and a short error in OpenAI's
form, with a `message` and with the name of the invalid field as `param`. Afterwards the server must be healthy, must have
registered nothing, and must answer a plain greedy request as before.

"""

TAIL = """
The web framework and vLLM answer requests that reach no steering route: 404 and 405 for unknown paths and methods. For
bodies of vLLM's own routes that are not JSON, `param` may be null. Compressed bodies are not decoded, so they count as
invalid JSON.

## Requests from the OpenAPI document

Schemathesis generates valid and invalid requests from the server's OpenAPI document, for every steering route and for the
steering fields of completion, chat and responses bodies. No request may end in HTTP 500. On steering routes, every
response must have a status, type and schema from the document, and requests that contradict the document must be refused.
The tests draw a few requests with fixed seeds. To draw more at random, run

    python -m pytest tests/server/hostile/test_document.py --hostile 400

## Faults

| fault | where it is tested |
| --- | --- |
| an API server or an engine is killed while modules are registered at all API servers, and the server is started again | `tests/server/test_server_modules.py` |
| writers of a registry's folder are killed at any moment, fifty times | `tests/registry/test_kills.py` |
| a thousand clients disconnect during a capture: all rows, vectors, memory and files are released | `tests/server/test_api_servers.py` |
| a client disconnects before its response is made | `tests/server/http/test_capture_results.py` |

Rows that are too large for a response are stored from the moment the response is sent until the client deletes them or
they expire. If the client disconnects earlier, the server notices when it sends the response and deletes the rows.
"""


def page() -> str:
    """Return the page."""
    found = counts()
    rows = [(name, category.description, f"{found[name]:,}") for name, category in CATEGORIES.items()]
    return HEAD + table(("category", "what", "requests"), [*rows, ("all", "", f"{sum(found.values()):,}")]) + TAIL
