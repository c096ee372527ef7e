# SPDX-License-Identifier: Apache-2.0
"""Detection of keys that look like our fields."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from vllm_steer.server.http import confusables
from vllm_steer.server.http.confusables import resembles


@pytest.mark.parametrize(
    "name",
    [
        "steering", "steering_vector", "Steering-Vectors", "STEERING", "xsteeringx", "stееring", "steering_vectоrs",
        "stεεring", "ｓｔｅｅｒｉｎｇ", "𝐬𝐭𝐞𝐞𝐫𝐢𝐧𝐠",
        "steer\u200bing", "s\u00adteering", "\u202esteering", "stee\0ring", "stéering", "steerıng",
        "ste\udc00ering", "x" * 100 + "stееring",
        "ﬆeering", "ﷺring\u200bsteerinɡ", "\u200b" * 10_000 + "stееring", "ж" * 10_000 + "steering",
    ],
)  # fmt: skip
def test_detects_confusable_names(name: str) -> None:
    """Catches a name ignored although a reader takes it for ours."""
    assert resembles(name, "steering")


@pytest.mark.parametrize(
    "name",
    ["", "s", "temperature", "steeri", "steersing", "рулевое управление", "本文検索機能追加", "große", "ééééé",
     "ﷺring", "stжжжжжg", "ste\nжжring", "ﷺ" * 10_000, "sжжжж" * 10_000],
)  # fmt: skip
def test_accepts_unrelated_names(name: str) -> None:
    """Catches refusals of unrelated names in any alphabet."""
    assert not resembles(name, "steering")


LONG = {
    "a sentence in a character": "ﷺ" * 20_000,
    "another alphabet": "ж" * 20_000,
    "nothing to be seen": "\u200b" * 20_000,
    "nearly our word": "stжжжжжg" * 2_500,
    "controls": "steerin\n" * 2_500,
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("word", ["steering", "capture"])
def test_long_names_take_few_python_calls(case: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Python calls per character, which would block the event loop."""
    monkeypatch.setattr(confusables, "_SKELETONS", confusables._SkeletonCache())
    resembles("é", word)  # compiles the pattern
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal steps
        steps += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = resembles(LONG[case], word)
    finally:
        sys.setprofile(before)
    assert not found
    assert steps < 500


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that clients can fill without limit, and wrong results after it is cleared."""
    seen = confusables._SkeletonCache()
    monkeypatch.setattr(confusables, "_SKELETONS", seen)
    assert not resembles("".join(map(chr, range(0x80, 0x80 + 2 * seen.MAX_SIZE))), "steering")
    assert 0 < len(seen) <= seen.MAX_SIZE
    assert resembles("ｓｔｅｅｒｉｎｇ", "steering")
