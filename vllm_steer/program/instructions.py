# SPDX-License-Identifier: Apache-2.0
"""Instruction codes of the edit kinds in programs and device tables.

:data:`vllm_steer.request.KINDS` has the meaning of each kind and :mod:`vllm_steer.taps.reference` its definition in
plain torch. The Triton kernel (:mod:`vllm_steer.taps.tap_kernel`) is tested against that definition.
"""

from __future__ import annotations

from vllm_steer.request import KINDS, KindName

# "No bound" of a one-sided clamp: the largest float32. An infinity would turn 0 * inf into NaN in a multiply-add.
UNBOUNDED = 3.4028234663852886e38

# 0 means "no instruction". A code never changes its meaning, because programs travel between processes.
CODES: dict[str, int] = {kind.name: kind.code for kind in KINDS.values()}
CAPTURE, READ, GATE = 5, 6, 7
"""CAPTURE stores the row, READ records a readout, GATE scales an edit's factor by a condition on a readout."""
REPLACE_AT, SET_AT = 9, 10
"""Forms of `replace` whose operand depends on the position: REPLACE_AT takes a row, SET_AT the component along a
direction. A `replace` of the component along a direction by one row is a CLAMP to one value."""
MEASURE = 12
"""Computes the activation of a feature, ``c = x.v + low`` if it is above ``high`` and 0 otherwise, for the FEATURE that
follows. FEATURE is the kind ``feature`` with ``set``, whose new activation is ``low``; with ``add`` it is an ADD."""
KIND_OF: dict[int, KindName] = {kind.code: kind.name for kind in KINDS.values()}
ADD, ADD_NORMED, ABLATE, CLAMP, REPLACE, FEATURE = (
    CODES[name] for name in ("add", "add_normed", "ablate", "clamp", "replace", "feature")
)
