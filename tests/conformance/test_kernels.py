# SPDX-License-Identifier: Apache-2.0
"""Replacements for parts that vLLM's CPU build lacks, checked by hand."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from tests.conformance.kernels import _selective_scan, media_stubs

SOFTPLUS_1 = 1.3132616875182228


def scan(
    u: torch.Tensor, starts: list[int], states: torch.Tensor, known: list[bool], a: float = 0.0, z: bool = False
) -> torch.Tensor:
    """Scan one channel with one state, steps of ``softplus(0 + 1)``, ``b = 2``, ``c = 3``, ``d = 10``."""
    tokens = u.shape[-1]
    delta, gate = torch.zeros(1, tokens), torch.ones(1, tokens) if z else None
    _selective_scan(
        u[None], delta, torch.full((1, 1), a), torch.full((1, 1, tokens), 2.0), torch.full((1, 1, tokens), 3.0),
        torch.tensor([10.0]), gate, torch.ones(1), True, torch.tensor(starts), torch.arange(len(known)),
        torch.tensor(known), states,
    )  # fmt: skip
    return (delta if gate is None else gate)[0]


def test_selective_scan() -> None:
    """Catches a step without its bias or softplus, a state that leaks to the next request, and a forgotten skip."""
    states = torch.full((2, 1, 1), 7.0)
    out = scan(torch.tensor([1.0, 2.0, 5.0]), [0, 2, 3], states, [False, False])
    entered = 2 * SOFTPLUS_1 * torch.tensor([1.0, 3.0, 5.0])
    torch.testing.assert_close(out, 3 * entered + 10 * torch.tensor([1.0, 2.0, 5.0]))
    torch.testing.assert_close(states[:, 0, 0], entered[1:])


@pytest.mark.parametrize("z", [False, True])
def test_selective_scan_in_two_parts(z: bool) -> None:
    """Catches a prompt whose second part starts from a zero state, and a gate that is missing in one part."""
    u = torch.tensor([1.0, -2.0, 0.5, 3.0])
    whole = scan(u, [0, 4], torch.zeros(1, 1, 1), [False], a=-0.4, z=z)
    states = torch.zeros(1, 1, 1)
    parts = [scan(u[:3], [0, 3], states, [False], -0.4, z), scan(u[3:], [0, 1], states, [True], -0.4, z)]
    torch.testing.assert_close(torch.cat(parts), whole)
    forgotten = scan(u[3:], [0, 1], torch.zeros(1, 1, 1), [True], -0.4, z)
    assert (forgotten - whole[3:]).abs() > 0.1


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed, and is used")
def test_media_stubs_are_removed() -> None:
    """Catches a stub that another test would mistake for torchvision."""
    with media_stubs():
        from torchvision.transforms import v2

        assert v2.anything is not None
    assert find_spec("torchvision") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
