# SPDX-License-Identifier: Apache-2.0
"""The tap on the mean of several streams, against the tap on that mean alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.taps.random_tables import random_tables
from vllm_steer.taps import tap as tap_module
from vllm_steer.taps.reference import apply_tap
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY, Tap


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    made = random_tables(4, 64, torch.device("cpu"))
    context = SimpleNamespace(no_compile_layers={CONTEXT_KEY: made})
    monkeypatch.setattr(tap_module, "get_forward_context", lambda: context)
    return made


@pytest.mark.parametrize("site", range(2))
def test_every_stream_changes_by_as_much_as_the_mean(tables: Tables, site: int) -> None:
    """Catches an edit of one stream, of a sum, or with the change divided among the streams."""
    tables.active_sites = [column == site for column in range(tables.num_sites)]
    streams = torch.randn(24, 4, 64)
    before = streams.clone()
    expected = before.mean(1)
    apply_tap(expected, None, tables.head_column(site), tables)
    Tap(tables, site).mean(streams)
    torch.testing.assert_close(streams.mean(1), expected)
    torch.testing.assert_close(streams - before, (expected - before.mean(1)).unsqueeze(1).expand(-1, 4, -1))
    assert not torch.equal(streams, before)


def test_an_idle_site_does_nothing(tables: Tables) -> None:
    """Catches arithmetic, and thus rounding, in steps that ask for nothing."""
    streams = torch.randn(24, 4, 64)
    before = streams.clone()
    Tap(tables, 0).mean(streams)
    assert torch.equal(streams, before)
