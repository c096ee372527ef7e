# SPDX-License-Identifier: Apache-2.0
"""A client of the server: modules, global steering, steered completions, captured rows. It loads nothing of vLLM.

OpenAI's own client works unchanged beside it, with our fields in ``extra_body``.
"""

from vllm_steer.client.answers import CaptureAnswer, Choice, Completion, Piece, Rows, ServerError
from vllm_steer.client.asynchronous import AsyncClient
from vllm_steer.client.synchronous import Client

__all__ = ["AsyncClient", "CaptureAnswer", "Choice", "Client", "Completion", "Piece", "Rows", "ServerError"]
