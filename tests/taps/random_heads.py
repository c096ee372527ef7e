# SPDX-License-Identifier: Apache-2.0
"""Random products of heads, and the comparison of what a function records of them with the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch

from vllm_steer.taps.heads import Activation, Places, record_top_k

KINDS = ("logits", "relu", "jumprelu", "gated", "topk")
SIZES = ((40, 5, torch.float32), (9000, 16, torch.float16), (4097, 1, torch.float32), (5000, 7, torch.bfloat16))
"""Number of outputs, ``k`` and dtype of the products."""
CASES = tuple(product(KINDS, SIZES))
ROWS, TOKENS, COLUMNS, BEFORE = 5, 9, 40, 7.0


def activation(kind: str, outputs: int, device: torch.device, seed: int = 0) -> Activation | None:
    """Return a random activation of a kind."""
    generator = torch.Generator().manual_seed(seed)
    bias, threshold, scale, magnitude = torch.randn(4, outputs, generator=generator).to(device)
    return {
        "logits": None,
        "relu": Activation(bias),
        "jumprelu": Activation(bias, threshold.abs()),
        "gated": Activation(bias, None, scale, magnitude),
        "topk": Activation(bias, kept=3),
    }[kind]


def compare(record: Callable[..., None], kind: str, size: tuple[int, int, torch.dtype], device: torch.device) -> str:
    """Return how the records that ``record`` writes differ from the definition's; empty if they do not.

    Products are distinct, since the definition may choose either of two equal ones.
    """
    outputs, k, dtype = size
    generator = torch.Generator().manual_seed(outputs)
    # Every bfloat16 number occurs once at most, and rows do not follow each other without a gap.
    numbers = torch.arange(1 << 15, dtype=torch.int32)[0x2000 : 0x2000 + outputs + 3].to(torch.int16)
    order = torch.stack([torch.randperm(outputs + 3, generator=generator) for _ in range(ROWS)])
    if dtype == torch.float32:
        products = torch.randn(ROWS, outputs + 3, generator=generator)
    else:
        products = numbers.view(dtype)[order]
        products = products * torch.where(torch.rand(products.shape, generator=generator) < 0.5, -1, 1).to(dtype)
    products = products.to(device)[:, :outputs]
    places = Places(
        *(torch.tensor(each, device=device) for each in ([3, 1, 8, 0, 5], [1, 2, 3, 4, 5])),
        torch.tensor([0, 0, 1, 0, 0], device=device).bool(),
    )
    expected = torch.full((TOKENS, COLUMNS), BEFORE, device=device)
    found = expected.clone()
    given = activation(kind, outputs, device)
    record_top_k(expected, places, products, given, k)
    record(found, places, products, given, k)
    off = (found - expected).abs() > 2e-5 * expected.abs().clamp(min=1.0)
    return f"{kind} {size}: {int(off.sum())} numbers differ" if off.any() or found.isnan().any() else ""


def differences(record: Callable[..., None], device: torch.device) -> Iterator[str]:
    """Return the differences of all cases."""
    return filter(None, (compare(record, kind, size, device) for kind, size in CASES))
