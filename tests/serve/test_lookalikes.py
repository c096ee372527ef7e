# SPDX-License-Identifier: Apache-2.0
"""Keys that look like ours."""

from __future__ import annotations

import pytest

from vllm_steer.serve.lookalikes import reads_as


@pytest.mark.parametrize(
    "name",
    [
        "steering", "steering_vector", "Steering-Vectors", "STEERING", "xsteeringx", "stееring", "steering_vectоrs",
        "stεεring", "ｓｔｅｅｒｉｎｇ", "𝐬𝐭𝐞𝐞𝐫𝐢𝐧𝐠",
        "steer\u200bing", "s\u00adteering", "\u202esteering", "stee\0ring", "stéering", "steerıng",
        "ste\udc00ering", "x" * 100 + "stееring",
    ],
)  # fmt: skip
def test_what_reads_as_our_word(name: str) -> None:
    """Catches a key that is passed over although somebody has written it to be ours."""
    assert reads_as(name, "steering")


@pytest.mark.parametrize(
    "name",
    ["", "s", "temperature", "steeri", "steersing", "рулевое управление", "本文検索機能追加", "große", "ééééé"],
)  # fmt: skip
def test_what_does_not(name: str) -> None:
    """Catches a check that refuses other people's keys, in whatever alphabet."""
    assert not reads_as(name, "steering")
