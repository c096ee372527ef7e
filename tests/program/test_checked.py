# SPDX-License-Identifier: Apache-2.0
"""Structure checks of programs that an engine decodes without verifying digests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_steer import Edit, SteeringError
from vllm_steer.program import Program, compile_program
from vllm_steer.program.compiled_capture import CompiledCapture

SOUND = compile_program([Edit(kind="add", point="post_block", layers=[1], vector=np.ones(8, "f4"), strength=1.0)])
UNSOUND = {
    "vector": {"edits": (msgspec.structs.replace(SOUND.edits[0], vectors=(3,)),)},
    "no vector": {"edits": (msgspec.structs.replace(SOUND.edits[0], vectors=()),)},
    "two vectors": {"edits": (msgspec.structs.replace(SOUND.edits[0], vectors=(0, 0)),)},
    "rows of a kind without": {"edits": (msgspec.structs.replace(SOUND.edits[0], vectors=(0, 0), num_rows=2),)},
    "coordinates of a kind without": {"edits": (msgspec.structs.replace(SOUND.edits[0], coordinates=b"1234"),)},
    "point": {"edits": (msgspec.structs.replace(SOUND.edits[0], point=77),)},
    "code": {"edits": (msgspec.structs.replace(SOUND.edits[0], code=99),)},
    "layer": {"edits": (msgspec.structs.replace(SOUND.edits[0], layers=(2**40,)),)},
    "layer of a capture": {"captures": (CompiledCapture(0, (2**40,), False, "all"),)},
    "width": {"width": 9},
    "digests": {"digests": ()},
}


def test_accepts_valid_program() -> None:
    """Catches checks that refuse programs from the front end."""
    assert Program.from_trusted_bytes(SOUND.to_bytes()) == SOUND


@pytest.mark.parametrize("part", UNSOUND)
def test_rejects_inconsistent_parts(part: str) -> None:
    """Catches an invalid index that would raise in the scheduler and end the engine."""
    for read in (Program.from_trusted_bytes, Program.from_bytes):
        with pytest.raises(SteeringError):
            read(msgspec.structs.replace(SOUND, **UNSOUND[part]).to_bytes())
