# SPDX-License-Identifier: Apache-2.0
"""Rows on their way out of the arena while the next step stores over it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_steer.engine.collect import Departures, Leaving, PendingRows
from vllm_steer.engine.step_rows import Channel, Entries, Plan

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, LATE = 64, 256, 50_000_000
FORMS = {"rows": b"", "some rows": b"", "products": b"products"}


def leave(form: str, *, wait: bool) -> tuple[PendingRows, torch.Tensor, torch.Tensor]:
    """A step's rows start on their way behind much other work, and the next step stores over them; what left, the rows
    and the directions."""
    arena = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    right = arena.clone()
    directions = torch.randn(4, HIDDEN, device="cuda")
    places = np.arange(0, ROWS, 3) if form == "some rows" else None
    departures = Departures(arena.device)
    entries = Entries(("request",), ((0,),), FORMS[form])
    one = np.zeros(1, dtype=np.int64)
    plan = Plan((Channel(entries, one, places),), one, np.array([ROWS]), ROWS)
    forms = (Leaving(FORMS[form], places, directions if form == "products" else None),)
    # A step before: to make pinned memory would wait for the device.
    before = departures.start(arena, None, plan, forms)
    before.event.synchronize()
    before.release()
    torch.cuda.synchronize()
    with torch.cuda.stream(departures._streams.copying):
        torch.cuda._sleep(LATE)  # the copy is late; a step is not
    pending = departures.start(arena, None, plan, forms)
    if wait:
        departures.finish_reading()
    arena.fill_(0)
    chosen = right if places is None else right[torch.from_numpy(places).cuda()]
    return pending, chosen, directions


def agree(form: str, *, wait: bool) -> bool:
    pending, chosen, directions = leave(form, wait=wait)
    right = chosen if form != "products" else chosen.float() @ directions.T
    pending.event.synchronize()
    return torch.equal(pending.rows[FORMS[form]], right.view(torch.uint8).cpu())


@pytest.mark.parametrize("form", FORMS)
def test_the_next_step_waits_until_the_arena_is_read(form: str) -> None:
    """Catches the next step's rows in the place of this one's; without the wait they are there."""
    assert agree(form, wait=True)
    assert not agree(form, wait=False)


def test_memory_is_not_used_again_while_a_product_reads_it() -> None:
    """Catches directions of a request that is gone, replaced while the last product with them waits."""
    pending, chosen, directions = leave("products", wait=True)
    right = (chosen.float() @ directions.T).view(torch.uint8)
    place = directions.data_ptr()
    del directions
    # Of the same size: it takes that memory as soon as the allocator gives it back.
    others = [torch.zeros(4, HIDDEN, device="cuda") for _ in range(8)]
    pending.event.synchronize()
    assert torch.equal(pending.rows[b"products"], right.cpu())
    assert place not in {each.data_ptr() for each in others}
