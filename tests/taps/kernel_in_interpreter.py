# SPDX-License-Identifier: Apache-2.0
"""Script run by test_tap_kernel.py with TRITON_INTERPRET=1: compares the kernels with their definitions on CPU.

With the argument ``first``, it draws one table per shape; with ``others``, three further ones (a minute and a half).
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from tests.taps import random_writes, two_summands
from tests.taps.infinite import wrong_rows
from tests.taps.random_batches import compare_rows
from tests.taps.random_heads import differences
from tests.taps.random_projections import MAX_ERROR, SIZES, max_error
from tests.taps.random_tables import compare, compare_fused
from vllm_steer.taps.projection_kernel import launch_products
from vllm_steer.taps.tap_kernel import launch_tap
from vllm_steer.taps.top_k_kernel import launch_top_k

SHAPES = tuple(product((64, 80), (torch.float32, torch.float16), (False, True)))
"""Width, dtype, and whether the stream has a second summand."""
FUSED = (SHAPES.index((80, torch.float32, False)), SHAPES.index((80, torch.float16, True)))
"""Shapes of which ``first`` also compares launches of two sites, which take most of the time."""


def main() -> None:
    is_first = sys.argv[1] == "first"
    device = torch.device("cpu")
    worst, different = 0.0, []
    for index, (hidden, dtype, with_other) in enumerate(SHAPES):
        for seed in range(4):
            if (seed == index % 4) == is_first:
                worst = max(worst, compare(launch_tap, seed, hidden, dtype, with_other, device))
            if (seed == index % 4 and index in FUSED) == is_first:
                different += filter(None, [compare_fused(launch_tap, seed, hidden, dtype, with_other, device)])
    if is_first:
        different += filter(None, [compare_rows(seed, device, 12, 9) for seed in range(6)])
        different += filter(None, [wrong_rows(launch_tap, with_other, device) for with_other in (False, True)])
        different += filter(None, [two_summands.wrong_rows(launch_tap, torch.float16, device)])
        different += filter(None, [random_writes.wrong_tables(seed) for seed in range(4)])
        different += differences(launch_top_k, device)
        for size, picked in product(SIZES, (False, True)):
            if not (off := max_error(launch_products, size, picked, device)) < MAX_ERROR:
                different.append(f"products {size}, picked {picked}: off by {off:.1e}")
    print(f"worst {worst:.3f}", *different)
    # Another order of summation differs by a few roundings, a wrong formula by thousands.
    sys.exit(0 if worst < 64 and not different else 1)


if __name__ == "__main__":
    main()
