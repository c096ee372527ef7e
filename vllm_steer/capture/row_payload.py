# SPDX-License-Identifier: Apache-2.0
"""Payload of captured rows on vLLM's engine outputs, written by the engine's RowSender and read by the RowReceiver.

Rows travel on outputs of a reserved request id, ahead of the outputs of real requests. The array lies in
``routed_experts``, which vLLM sends as a frame of its own without a copy; everything else is in ``kv_transfer_params``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.step_rows import StepRows, decode_row_index

ROWS_REQUEST_ID = "steer\0rows"
"""Reserved request id of outputs that carry rows. vLLM's own ids contain no NUL."""
RECORDS = b"records"
"""Value of ``RowIndex.projection`` for the records of tokens; digests have another length."""
_ROWS_KEY, _REASON_KEY = "__steer_rows__", "__steer_reason__"


def encode_step(step: StepRows) -> dict[str, Any]:
    """Return the parameters that describe ``step.rows``."""
    return {_ROWS_KEY: [step.index.encoded, step.start.tobytes(), step.count.tobytes()]}


def decode_step(parameters: dict[str, Any], rows: npt.NDArray[np.uint8]) -> StepRows:
    """Return the step that :func:`encode_step` described."""
    index, start, count = parameters[_ROWS_KEY]
    return StepRows(decode_row_index(index), np.frombuffer(start, np.int64), np.frombuffer(count, np.int64), rows)


def encode_missing_reason(request_id: str, reason: str) -> dict[str, Any]:
    """Return the parameters that explain why rows of a request are missing."""
    return {_REASON_KEY: [request_id, reason]}


def decode_missing_reason(parameters: dict[str, Any]) -> tuple[str, str]:
    """Return the request id and the reason that :func:`encode_missing_reason` encoded."""
    request_id, reason = parameters[_REASON_KEY]
    return request_id, reason
