# SPDX-License-Identifier: Apache-2.0
"""HTTP client of the server: modules, global steering, steered completions and captured rows. Does not import vLLM.

OpenAI's client works as well, with steering and capture fields in ``extra_body``: :func:`to_json` encodes them, and
:func:`parse_completion` reads the response.
"""

from vllm_steer.client.async_client import AsyncClient
from vllm_steer.client.encoding import to_json
from vllm_steer.client.endpoints import Retry, auth_headers
from vllm_steer.client.responses import (
    CaptureAnswer,
    Choice,
    Completion,
    Piece,
    ReadoutValues,
    Rows,
    ServerError,
    Trace,
    parse_completion,
    parse_error,
    read_capture_file,
)
from vllm_steer.client.sync_client import Client

__all__ = [
    "AsyncClient",
    "CaptureAnswer",
    "Choice",
    "Client",
    "Completion",
    "Piece",
    "ReadoutValues",
    "Retry",
    "Rows",
    "ServerError",
    "Trace",
    "auth_headers",
    "parse_completion",
    "parse_error",
    "read_capture_file",
    "to_json",
]
