# SPDX-License-Identifier: Apache-2.0
"""Tests of the variants of benchmarks.taps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.taps import LAYERS, VARIANTS, make_tap, use_options
from tests.taps.compiled import Compiled
from vllm_steer.config import SteeringConfig
from vllm_steer.taps import tap_kernel
from vllm_steer.taps.tables import Tables

HIDDEN = 64


@pytest.fixture
def tables() -> Tables:
    config = SteeringConfig(max_rows=1, max_vectors=1, max_instructions=1, capture_rows=1)
    return Tables(
        config, num_sites=3 * LAYERS, hidden_size=HIDDEN, max_tokens=4, max_requests=1, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variants_compile_with_their_options(monkeypatch: pytest.MonkeyPatch, tables: Tables, name: str) -> None:
    """Catches two variants with the same kernel, and options that stay set for later variants."""
    found = Compiled(tap_kernel._tap_kernel, 90)
    monkeypatch.setattr(tap_kernel, "_tap_kernel", found)
    before = tap_kernel._overlaps, tap_kernel._CACHE_HINT
    with use_options(VARIANTS[name]):
        if name == "none":
            assert (tap_kernel._overlaps, tap_kernel._CACHE_HINT) == before
            return
        tap_kernel.launch_tap(
            torch.zeros(4, HIDDEN, dtype=torch.bfloat16), None, tables.head_column(3 * LAYERS - 1), tables
        )
    assert (tap_kernel._overlaps, tap_kernel._CACHE_HINT) == before
    assert ("griddepcontrol.wait" in found.assembly[0]) == ("no overlap" not in name)
    assert ("evict_last" in found.assembly[0]) == ("no hint" not in name)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_launches_each_site_once(monkeypatch: pytest.MonkeyPatch, tables: Tables, name: str) -> None:
    """Catches sites that a joined launch omits or repeats."""
    sites: list[int] = []
    heads = {tables.head_column(site).data_ptr(): site for site in range(3 * LAYERS)}

    def launch(target: object, other: object, head: torch.Tensor, of: Tables, second: torch.Tensor | None) -> None:
        sites.extend(heads[each.data_ptr()] for each in (head, second) if each is not None)

    monkeypatch.setattr(tap_kernel, "launch_tap", launch)
    tap, x = make_tap(VARIANTS[name], tables), torch.zeros(4, HIDDEN)
    for site in range(3 * LAYERS):
        tap(site, x, x)
    assert sites == ([] if name == "none" else list(range(3 * LAYERS)))
