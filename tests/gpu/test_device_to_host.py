# SPDX-License-Identifier: Apache-2.0
"""Rows on their way out of the arena while the next step stores over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import RowIndex
from vllm_steer.engine.device_to_host import DeviceToHostCopier, Transfer
from vllm_steer.taps.projection_kernel import launch_products

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, LATE = 64, 256, 200_000_000
FORMS = {"rows": b"", "some rows": b"", "products": b"products"}


def agree(form: str, *, late: str) -> bool:
    """Whether a step's rows arrive as they were, though the stream ``late`` is and the next step stores over them and
    takes what memory is free."""
    arena = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    right = arena.clone()
    directions = torch.randn(4, HIDDEN, device="cuda")
    places = np.arange(0, ROWS, 3) if form == "some rows" else None
    departures = DeviceToHostCopier(arena.device, launch_products)
    entries = RowIndex(("request",), ((0,),), FORMS[form])
    one = np.zeros(1, dtype=np.int64)
    plan = CapturePlan((RowStream(entries, one, places),), one, np.array([ROWS]), ROWS)
    forms = (Transfer(FORMS[form], places, directions if form == "products" else None),)
    # A step before, of other rows: to make pinned memory would wait for the device.
    before = departures.start(torch.zeros_like(arena), None, plan, forms)
    before.event.synchronize()
    before.release()
    torch.cuda.synchronize()
    size = len(before.rows[FORMS[form]]) * before.rows[FORMS[form]].shape[1]
    with torch.cuda.stream(departures._stream if late == "leaving" else torch.cuda.current_stream()):
        torch.cuda._sleep(LATE)
    pending = departures.start(arena, None, plan, forms)
    arena.fill_(0)
    # Of the same size: they take the memory of what is leaving as soon as the allocator gives it back.
    others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range((4 << 20) // size)]
    pending.event.synchronize()
    torch.cuda.synchronize()
    chosen = right if places is None else right[torch.from_numpy(places).cuda()]
    wanted = chosen if form != "products" else launch_products(chosen, None, directions)
    del others
    return torch.equal(pending.rows[FORMS[form]], wanted.view(torch.uint8).cpu())


@pytest.mark.parametrize("form", FORMS)
def test_rows_leave_when_they_are_there(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a transfer that does not wait for the step whose rows it takes; without the wait others arrive."""
    assert agree(form, late="main")
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    assert not agree(form, late="main")


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_not_used_again_while_rows_leave(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of another step, whose memory was that of rows that waited to leave; as without the note of who
    reads it."""
    assert agree(form, late="leaving")

    def forgotten(self: Any, stream: Any) -> None: ...

    monkeypatch.setattr(torch.Tensor, "record_stream", forgotten)
    assert not agree(form, late="leaving")
