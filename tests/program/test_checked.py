# SPDX-License-Identifier: Apache-2.0
"""What an engine decodes without computing digests again is still a program that it can use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_steer import Edit, SteeringError
from vllm_steer.program import Program, compile_program
from vllm_steer.program.program import CompiledRead

SOUND = compile_program([Edit(kind="add", point="post_block", layers=[1], vector=np.ones(8, "f4"), strength=1.0)])
UNSOUND = {
    "vector": {"edits": (msgspec.structs.replace(SOUND.edits[0], vector=3),)},
    "point": {"edits": (msgspec.structs.replace(SOUND.edits[0], point=77),)},
    "code": {"edits": (msgspec.structs.replace(SOUND.edits[0], code=99),)},
    "layer": {"edits": (msgspec.structs.replace(SOUND.edits[0], layers=(2**40,)),)},
    "layer of a read": {"reads": (CompiledRead(0, (2**40,), False, "all"),)},
    "width": {"width": 9},
    "digests": {"digests": ()},
}


def test_a_sound_program_passes() -> None:
    """Catches a check that refuses what the front end sends."""
    assert Program.from_trusted_bytes(SOUND.to_bytes()) == SOUND


@pytest.mark.parametrize("part", UNSOUND)
def test_parts_that_do_not_fit_are_refused(part: str) -> None:
    """Catches an index that would raise in the scheduler, which ends the engine."""
    for read in (Program.from_trusted_bytes, Program.from_bytes):
        with pytest.raises(SteeringError):
            read(msgspec.structs.replace(SOUND, **UNSOUND[part]).to_bytes())
