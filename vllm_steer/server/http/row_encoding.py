# SPDX-License-Identifier: Apache-2.0
"""Captured rows in the forms that an HTTP answer has for them: base64 in JSON, or a file."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from vllm_steer.capture import CapturedRequest
from vllm_steer.capture.files.format import DTYPES, FORMAT, VERSION, SiteEntry, Tokens, raw, request_entry


def inline(captured: CapturedRequest) -> dict[str, dict[str, Any]]:
    """``{point: {layer: {"positions", "dtype", "shape", "data"}}}``.

    ``data`` is base64 of the rows, little-endian and row by row; the packed form of vectors is the same.
    """
    sites: dict[str, dict[str, Any]] = {}
    for (point, layer), site in captured.sites.items():
        sites.setdefault(point, {})[str(layer)] = {
            "positions": site.positions.tolist(),
            "dtype": str(site.rows.dtype).removeprefix("torch."),
            "shape": list(site.rows.shape),
            "data": base64.b64encode(raw(site.rows)).decode("ascii"),
        }
    return sites


def file_of(captured: CapturedRequest) -> bytes:
    """A safetensors file as layout ``per_request`` has them: ``vllm_steer.capture.files.reader`` opens it.

    Rows are in tensors called ``point.layer``; positions and token ids of sites that share them stand once.
    """
    tokens = Tokens(0)
    sites: list[SiteEntry] = []
    tensors: dict[str, torch.Tensor] = {}
    for (point, layer), site in captured.sites.items():
        name = f"{point}.{layer}"
        at = tokens.add(captured, site.positions)
        sites.append(SiteEntry(point, layer, DTYPES[site.rows.dtype], name, (0, site.rows.shape[0]), at))
        tensors[name] = site.rows.contiguous()
    tensors.update((name, torch.from_numpy(values)) for name, values in tokens.arrays().items())
    index = msgspec.json.encode([request_entry(captured, sites, None)]).decode()
    return save(tensors, {"format": FORMAT, "version": VERSION, "requests": index})
