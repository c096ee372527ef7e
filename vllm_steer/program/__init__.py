# SPDX-License-Identifier: Apache-2.0
"""What one request's edits compile to: immutable, content-addressed, the same in every process."""

from vllm_steer.program.compose import join, scaled
from vllm_steer.program.ledger import Ledger, PlacedRow
from vllm_steer.program.program import Program, compile_program
from vllm_steer.program.resolve import Form, Instruction, Resolved, Row, Segment, resolve

__all__ = [
    "Form",
    "Instruction",
    "Ledger",
    "PlacedRow",
    "Program",
    "Resolved",
    "Row",
    "Segment",
    "compile_program",
    "join",
    "resolve",
    "scaled",
]
