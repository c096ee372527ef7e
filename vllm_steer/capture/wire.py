# SPDX-License-Identifier: Apache-2.0
"""Reserved request id and keys with which captured rows travel from the scheduler to the front end.

Rows travel as additional ``EngineCoreOutput`` objects ahead of the outputs of the same update. vLLM ignores outputs of
unknown requests, so a front end without steering is not affected.
"""

from __future__ import annotations

ROWS_REQUEST_ID = "steer\0rows"
"""Request id of outputs that carry rows. No request has it: vLLM's ids contain no NUL byte."""
ROWS_KEY = "__steer_rows__"
"""Key of ``[row index, first positions, position counts]`` of a step; the rows are in ``routed_experts``."""
REASON_KEY = "__steer_reason__"
"""Key of ``[request id, reason]`` if rows of a request will be missing."""
