# SPDX-License-Identifier: Apache-2.0
"""What one request's edits compile to: immutable, content-addressed, the same in every process."""

from vllm_steer.program.compose import join, scaled
from vllm_steer.program.program import Program, compile_program
from vllm_steer.program.resolve import Instruction, Resolved, RowFormat, Segment, TokenProgram, resolve
from vllm_steer.program.table_allocator import PlacedRow, TableAllocator

__all__ = [
    "Instruction",
    "PlacedRow",
    "Program",
    "Resolved",
    "RowFormat",
    "Segment",
    "TableAllocator",
    "TokenProgram",
    "compile_program",
    "join",
    "resolve",
    "scaled",
]
