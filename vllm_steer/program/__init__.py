# SPDX-License-Identifier: Apache-2.0
"""The compiled form of a request: immutable, content-addressed, the same in every process."""

from vllm_steer.program.compiler import compile_program
from vllm_steer.program.compose import join, scaled, with_source
from vllm_steer.program.program import Program
from vllm_steer.program.resolve import Resolved, Segment, resolve
from vllm_steer.program.table_allocator import PlacedTokenProgram, TableAllocator
from vllm_steer.program.token_program import CaptureSite, Instruction, RowFormat, TokenProgram

__all__ = [
    "CaptureSite",
    "Instruction",
    "PlacedTokenProgram",
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
    "with_source",
]
