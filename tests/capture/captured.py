# SPDX-License-Identifier: Apache-2.0
"""Captured requests with random rows, and their comparison with stored requests."""

from __future__ import annotations

import numpy as np
import torch

from vllm_steer.capture import CapturedRequest, SiteRows
from vllm_steer.capture.files.reader import StoredRequest
from vllm_steer.request import CaptureSpec

SITES = (("pre_attn", 0), ("post_block", 0), ("post_block", 3))


def captured(
    request_id: str = "request",
    *,
    seed: int = 0,
    sample: int = 0,
    rows: int = 5,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    sites: tuple[tuple[str, int], ...] = SITES,
    status: str = "ok",
    error: str | None = None,
    model: str = "tiny",
    reduced: bool = False,
    **spec: object,
) -> CapturedRequest:
    """Return a request with ``rows`` rows per site, at odd positions, so that positions differ from row numbers.

    ``reduced`` leaves one row per site, as a reduction does.
    """
    generator = torch.Generator().manual_seed(seed)
    hooks: dict[str, list[int]] = {}
    for point, layer in sites:
        hooks.setdefault(point, []).append(layer)
    positions = np.arange(1, 2 * rows + 1, 2, dtype=np.int64)
    prompt = tuple(range(100 + seed, 100 + seed + rows))
    count = 1 if reduced else rows
    return CapturedRequest(
        request_id=request_id,
        sample=sample,
        model=model,
        prompt_token_ids=prompt,
        output_token_ids=tuple(range(900 + seed, 902 + seed + rows)),
        spec=CaptureSpec(hooks=hooks or {"pre_attn": [0]}, positions="all", **spec),
        sites={site: SiteRows(positions, torch.randn(count, width, generator=generator).to(dtype)) for site in sites},
        status=status,
        error=error,
    )


def assert_same(stored: StoredRequest, request: CapturedRequest) -> None:
    """Check that all rows, positions, tokens and properties of a request were stored."""
    assert (stored.request_id, stored.sample, stored.model) == (request.request_id, request.sample, request.model)
    assert (stored.status, stored.error) == (request.status, request.error)
    assert stored.num_prompt_tokens == len(request.prompt_token_ids)
    assert stored.num_output_tokens == len(request.output_token_ids)
    assert set(stored.sites) == set(request.sites)
    for site, expected in request.sites.items():
        rows = stored.tensor(*site)
        assert rows.dtype == expected.rows.dtype and rows.shape == expected.rows.shape
        assert torch.equal(rows.view(torch.uint8), expected.rows.contiguous().view(torch.uint8))
        assert stored.positions(*site).tolist() == expected.positions.tolist()
        assert torch.equal(stored.token_ids(*site), request.token_ids(*site))
