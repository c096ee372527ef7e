# SPDX-License-Identifier: Apache-2.0
"""Encodings of captured rows in HTTP responses: base64 in JSON, or a capture file."""

from __future__ import annotations

import base64
from typing import Any

from vllm_steer.capture import CapturedRequest
from vllm_steer.capture.files.format import row_bytes
from vllm_steer.capture.files.tensors import encode_request


def encode_inline(captured: CapturedRequest) -> dict[str, dict[str, Any]]:
    """Return the rows as ``{point: {layer: {"positions", "dtype", "shape", "data"}}}``.

    ``data`` is base64 of the rows, little-endian and row-major, like the packed form of vectors in requests.
    """
    sites: dict[str, dict[str, Any]] = {}
    for (point, layer), site in captured.sites.items():
        sites.setdefault(point, {})[str(layer)] = {
            "positions": site.positions.tolist(),
            "dtype": str(site.rows.dtype).removeprefix("torch."),
            "shape": list(site.rows.shape),
            "data": base64.b64encode(row_bytes(site.rows)).decode("ascii"),
        }
    return sites


def encode_file(captured: CapturedRequest) -> bytes:
    """Return the rows as a capture file with one request, which `vllm_steer.capture.files.reader` opens."""
    return b"".join(encode_request(captured))
