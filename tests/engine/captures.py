# SPDX-License-Identifier: Apache-2.0
"""Helpers that request captures and compare them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

EVERYTHING = {"hooks": {"pre_attn": "all", "post_attn": "all", "post_block": "all"}, "positions": "all"}


def capture(**spec: Any) -> dict[str, Any]:
    return {"memory": {**EVERYTHING, **spec}}


def result(output: Any, sample: int = 0) -> Any:
    found = output.outputs[sample].capture_results["memory"]
    assert found.status == "ok", found.error
    return found


def close_to(got: Any, right: Any, name: Any = "", atol: float = 2e-3) -> None:
    """Return whether two results have the same sites, positions and rows."""
    assert list(got.sites) == list(right.sites), name
    for site in got.sites:
        np.testing.assert_array_equal(got.positions(*site), right.positions(*site), err_msg=f"{name} {site}")
        torch.testing.assert_close(got.tensor(*site), right.tensor(*site), atol=atol, rtol=1e-4, msg=f"{name} {site}")
