# SPDX-License-Identifier: Apache-2.0
"""GPU: copies of captured rows while the next step overwrites the arena."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.capture.step_plan import CapturePlan, RowStream
from vllm_steer.capture.step_rows import RowIndex
from vllm_steer.engine import device_to_host
from vllm_steer.engine.device_to_host import DeviceToHostCopier, Transfer
from vllm_steer.taps.projection_kernel import launch_products

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, LATE = 64, 256, 200_000_000
FORMS = {"rows": b"", "some rows": b"", "products": b"products"}


def rows_arrive_unchanged(form: str, *, late: str) -> bool:
    """Return whether a step's rows arrive unchanged although one stream is delayed.

    The next step overwrites the arena and reuses all free memory. ``late`` names the delayed stream.
    """
    arena = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    right = arena.clone()
    directions = torch.randn(4, HIDDEN, device="cuda")
    places = np.arange(0, ROWS, 3) if form == "some rows" else None
    copier = DeviceToHostCopier(arena.device, launch_products)
    entries = RowIndex(("request",), ((0,),), FORMS[form])
    one = np.zeros(1, dtype=np.int64)
    plan = CapturePlan((RowStream(entries, one, places),), one, np.array([ROWS]), ROWS)
    forms = (Transfer(FORMS[form], places, directions if form == "products" else None),)
    # An earlier step allocates the pinned memory, which would wait for the device.
    before = copier.start(torch.zeros_like(arena), None, plan, forms)
    before.event.synchronize()
    before.release()
    torch.cuda.synchronize()
    size = len(before.rows[FORMS[form]]) * before.rows[FORMS[form]].shape[1]
    with torch.cuda.stream(copier._stream if late == "copy" else torch.cuda.current_stream()):
        torch.cuda._sleep(LATE)
    pending = copier.start(arena, None, plan, forms)
    arena.fill_(0)
    # Tensors of the same size reuse the memory of the copy's source as soon as the allocator frees it.
    others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range((4 << 20) // size)]
    pending.event.synchronize()
    torch.cuda.synchronize()
    chosen = right if places is None else right[torch.from_numpy(places).cuda()]
    wanted = chosen if form != "products" else launch_products(chosen, None, directions)
    del others
    return torch.equal(pending.rows[FORMS[form]], wanted.view(torch.uint8).cpu())


@pytest.mark.parametrize("form", FORMS)
def test_small_rows_arrive_unchanged(form: str) -> None:
    """Catches a copy on the main stream that the next step overtakes."""
    assert rows_arrive_unchanged(form, late="main")


@pytest.mark.parametrize("form", FORMS)
def test_copy_waits_for_the_step(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy that does not wait for its step. Negative control: without the wait, other rows arrive."""
    monkeypatch.setattr(device_to_host, "SMALL_BYTES", 0)
    assert rows_arrive_unchanged(form, late="main")
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    assert not rows_arrive_unchanged(form, late="main")


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_not_reused_during_the_copy(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches source memory that is reused before its copy. Negative control: without ``record_stream``, it is."""
    monkeypatch.setattr(device_to_host, "SMALL_BYTES", 0)
    assert rows_arrive_unchanged(form, late="copy")

    def forgotten(self: Any, stream: Any) -> None: ...

    monkeypatch.setattr(torch.Tensor, "record_stream", forgotten)
    assert not rows_arrive_unchanged(form, late="copy")


def held_steps_keep_their_rows() -> bool:
    """Return whether the rows of six large steps, held at the same time, have the contents of their own step."""
    device = torch.device("cuda")
    copier = DeviceToHostCopier(device, launch_products)
    entries, one = RowIndex(("request",), ((0,),), b""), np.zeros(1, dtype=np.int64)
    tokens = 2 * device_to_host._LENT_BYTES // (2 * HIDDEN)
    plan = CapturePlan((RowStream(entries, one, None),), one, np.array([tokens]), tokens)
    held, right = [], []
    for step in range(device_to_host._MAX_LENT + 2):
        arena = torch.full((tokens, HIDDEN), float(step), device=device).bfloat16()
        right.append(arena.view(torch.uint8).cpu().numpy())
        held.append(copier.start(arena, None, plan, (Transfer(b"", None, None),)).wait()[0].rows)
    return all(np.array_equal(rows, wanted) for rows, wanted in zip(held, right, strict=True))


def test_held_rows_keep_their_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows whose pinned memory the next step fills. Negative control: memory that is free although held."""
    assert held_steps_keep_their_rows()

    def lend_and_free(self: DeviceToHostCopier, buffers: Any, rows: Any) -> bool:
        self._free.append(buffers)
        return True

    monkeypatch.setattr(DeviceToHostCopier, "_lend", lend_and_free)
    assert not held_steps_keep_their_rows()
