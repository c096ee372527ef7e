# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``vllm_steer.SamplingParams``."""

import pytest

from vllm_steer.params import SamplingParams


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steer_vectors", "steering_vectors"),
        ("steering_module", "steering_modules"),
        ("captures", "capture"),
        ("vectors", "steering_vectors"),
        ("edits", "steering"),
        ("hooks", "capture"),
        ("max_token", "max_tokens"),
    ],
)
def test_suggests_the_argument_that_was_meant(name, meant):
    """Catches a misspelt steering argument reported without the valid name."""
    with pytest.raises(TypeError, match=f"'{name}'; did you mean {meant}\\?"):
        SamplingParams(max_tokens=1, **{name: {}})


def test_other_errors_stay_as_they_are():
    """Catches a suggestion for an argument that resembles none."""
    with pytest.raises(TypeError) as caught:
        SamplingParams(colour=1)
    assert "did you mean" not in str(caught.value)
