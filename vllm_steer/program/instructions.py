# SPDX-License-Identifier: Apache-2.0
"""The instruction set: what one tap can do to one token's row of the residual stream.

The table below is the single list of operations. The plain-torch definition of each is in
:mod:`vllm_steer.taps.reference`; the Triton kernel (:mod:`vllm_steer.taps.kernel`) is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

# No intermediate value of the stream reaches this bound: it stands for "no bound" in a one-sided clamp,
# because float32 infinities would turn 0 * inf into NaN in a fused multiply-add.
UNBOUNDED = 3.0e38


@dataclass(frozen=True)
class Operation:
    """One instruction: its code in the device tables and the edit kind that compiles to it."""

    code: int
    kind: str
    formula: str
    unit_vector: bool


OPERATIONS: tuple[Operation, ...] = (
    Operation(1, "add", "x + s v", unit_vector=False),
    Operation(2, "add_normed", "x + s |x| u", unit_vector=True),
    Operation(3, "ablate", "x - s (x.u) u", unit_vector=True),
    Operation(4, "clamp", "x + s (clip(x.u, low, high) - x.u) u", unit_vector=True),
)
ADD, ADD_NORMED, ABLATE, CLAMP = (operation.code for operation in OPERATIONS)
BY_KIND = {operation.kind: operation for operation in OPERATIONS}
