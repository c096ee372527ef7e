# SPDX-License-Identifier: Apache-2.0
"""Script run by test_tap_kernel.py with TRITON_INTERPRET=1: compares the kernels with their definitions on CPU."""

from __future__ import annotations

import sys

import torch

from tests.taps.random_batches import compare_rows
from tests.taps.random_projections import MAX_ERROR, SIZES, max_error
from tests.taps.random_tables import compare, compare_fused
from vllm_steer.taps.projection_kernel import launch_products
from vllm_steer.taps.tap_kernel import launch_tap


def main() -> None:
    worst, different = 0.0, []
    for seed in range(4):
        for hidden in (64, 80):
            for dtype in (torch.float32, torch.float16):
                for with_other in (False, True):
                    drawn = (seed, hidden, dtype, with_other, torch.device("cpu"))
                    worst = max(worst, compare(launch_tap, *drawn))
                    different += [problem for problem in (compare_fused(launch_tap, *drawn),) if problem]
    different += [said for seed in range(6) if (said := compare_rows(seed, torch.device("cpu"), 12, 9))]
    for size in SIZES:
        for picked in (False, True):
            if not (off := max_error(launch_products, size, picked, torch.device("cpu"))) < MAX_ERROR:
                different.append(f"products {size}, picked {picked}: off by {off:.1e}")
    print(f"worst {worst:.3f}", *different)
    # Another order of summation differs by a few roundings, a wrong formula by thousands.
    sys.exit(0 if worst < 64 and not different else 1)


if __name__ == "__main__":
    main()
