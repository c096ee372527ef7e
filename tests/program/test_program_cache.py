# SPDX-License-Identifier: Apache-2.0
"""Program cache: which programs are decoded and verified again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.program import Program, compile_program, program, program_cache, resolve
from vllm_steer.program.program_cache import ProgramCache
from vllm_steer.request import CaptureSpec, Edit, content_digest


def made(seed: int) -> Program:
    vector = np.random.default_rng(seed).standard_normal(64)
    return compile_program([Edit(kind="add", point="post_block", layers=1, vector=vector)])


def _decoded(data: bytes) -> tuple[Program, bytes]:
    return Program.from_trusted_bytes(data), data


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PROGRAM_CACHE", ProgramCache(1 << 16))


def test_compiled_program_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a front end that decodes and verifies a program that it has just compiled."""
    one = made(1)
    data = one.encode_cached()
    decoded, checked = [], []
    monkeypatch.setattr(program, "_decode", lambda data: decoded.append(data))
    monkeypatch.setattr(Program, "_verify_content", lambda self: checked.append(self))
    there = Program.from_bytes(data)
    assert there == one and Program.from_bytes(data) is there
    assert Program.from_bytes(one.to_bytes()) is there  # equal bytes from any sender
    assert not decoded and not checked


def test_vectors_are_views_of_the_encoded_bytes() -> None:
    """Catches a process that holds each vector twice: as given and in the encoded bytes."""
    for there, data in (
        (Program.from_bytes(made(1).encode_cached()), made(1).encode_cached()),
        _decoded(made(2).to_bytes()),
    ):
        assert there.vectors and all(vector.obj is data for vector in there.vectors)


def test_equal_programs_share_their_bytes() -> None:
    """Catches comparisons of all bytes for every equal program."""
    first = made(1).encode_cached()
    there = Program.from_bytes(first)
    second = made(1).encode_cached()
    assert second is first
    assert Program.from_bytes(second) is there  # with what has been made of it
    assert made(2).encode_cached() != first


def test_programs_with_equal_cache_keys_are_distinguished() -> None:
    """Catches a program that is mistaken for another with the same digests, such as a forged one."""
    wide = compile_program(
        [Edit(kind="add", point="post_block", layers=1, vector=np.random.default_rng(3).standard_normal(8192))]
    )
    data = wide.encode_cached()
    forged = bytearray(data)
    forged[len(data) * 3 // 4] ^= 1
    assert program.PROGRAM_CACHE.get(bytes(forged)) is None
    with pytest.raises(SteeringError, match="do not fit together"):
        Program.from_bytes(bytes(forged))
    assert Program.from_trusted_bytes(bytes(forged)).vectors != wide.vectors
    assert Program.from_bytes(data).vectors == wide.vectors


def test_programs_that_differ_in_a_late_site_are_both_cached() -> None:
    """Catches requests with much in common, such as global steering, that evict each other."""
    vectors = [np.full(8, layer + 1.0) for layer in range(96)]
    both = []
    for vector in (-1.0, -2.0):
        vectors[80] = np.full(8, vector)
        edits = [Edit(kind="add", point="post_block", layers=i, vector=v) for i, v in enumerate(vectors)]
        both.append(compile_program(edits))
    data = [each.encode_cached() for each in both]
    assert [Program.from_bytes(bytes(bytearray(each))) for each in data] == both
    found = [program.PROGRAM_CACHE.get(each) for each in data]
    assert [(each.program, each.verified) for each in found if each] == [(one, True) for one in both]


def test_untrusted_bytes_are_verified_after_a_trusted_decode() -> None:
    """Catches a program that counts as verified because it was decoded."""
    forged = msgspec.structs.replace(made(2), digests=(b"x" * 16,)).to_bytes()
    assert Program.from_trusted_bytes(forged).digests == (b"x" * 16,)
    for _ in range(2):
        with pytest.raises(SteeringError, match="do not fit together"):
            Program.from_bytes(forged)


def test_cache_size_is_bounded() -> None:
    """Catches a cache without limit."""
    kept = program.PROGRAM_CACHE
    for seed in range(40):
        made(seed).encode_cached()
    assert 0 < len(kept._programs) < 16
    assert kept.get(made(39).to_bytes()) is not None
    assert kept.get(made(0).to_bytes()) is None


def test_resolutions_are_cached_per_length_and_stage() -> None:
    """Catches segments of another prompt length or of another stage."""
    read = compile_program([], [CaptureSpec(hooks={"post_block": "all"}, positions="last_prompt")])
    assert [resolve(read, length, 4).first_captured_position for length in (5, 9, 5)] == [4, 8, 4]
    assert resolve(read, 5, 4) is resolve(read, 5, 4)
    assert [resolve(read, 5, 4, own).max_captures for own in (None, range(1), range(1, 4))] == [4, 1, 3]
    for length in range(200):
        resolve(read, length + 1, 4)
    assert len(read.resolve_cache) <= 64


def test_cache_keys_are_remembered_by_object() -> None:
    """Catches keys of other bytes at a reused address, and a process that holds all bytes it has seen."""
    keys = program_cache._CacheKeys()
    for i in range(5000):
        data = i.to_bytes(8, "little") * 4096
        assert keys.get(data) == (
            len(data),
            content_digest(data[: program_cache._HEAD_BYTES]),
            data[-program_cache._TAIL_BYTES :],
        )
        assert keys.get(data) is keys.get(data)
        other = bytes(bytearray(data))
        assert other is not data
        assert keys.get(other) == keys.get(data)
    held = sum(len(data) for data, _ in keys._known.values())
    assert 0 < held <= program_cache._MAX_KEYED_BYTES + len(data)
