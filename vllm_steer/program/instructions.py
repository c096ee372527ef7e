# SPDX-License-Identifier: Apache-2.0
"""The instruction set: the codes under which the edit kinds stand in the device tables.

What a kind means stands in :data:`vllm_steer.spec.KINDS`, its plain-torch definition in
:mod:`vllm_steer.taps.reference`; the Triton kernel (:mod:`vllm_steer.taps.tap_kernel`) is tested against that.
"""

from __future__ import annotations

# "No bound" in a one-sided clamp: the largest float32. An infinity would turn 0 * inf into NaN in a multiply-add.
UNBOUNDED = 3.4028234663852886e38

# Code 0 is nothing; a code never changes its meaning, since programs travel between processes.
CODES: dict[str, int] = {"add": 1, "add_normed": 2, "ablate": 3, "clamp": 4}
CAPTURE = 5
KIND_OF: dict[int, str] = {code: kind for kind, code in CODES.items()}
ADD, ADD_NORMED, ABLATE, CLAMP = (CODES[kind] for kind in ("add", "add_normed", "ablate", "clamp"))
