# SPDX-License-Identifier: Apache-2.0
"""Validation of engine settings."""

import pytest

from vllm_steer.config import SteeringConfig, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS

ROWS = f"must be 1 to {ENGINE_LIMITS['max_rows'].high}"

INVALID = [
    ({"max_rows": 0}, f"steering_config.max_rows: {ROWS}, not 0"),
    ({"max_rows": "12"}, f"steering_config.max_rows: {ROWS}, not '12'"),
    ({"max_rows": True}, f"steering_config.max_rows: {ROWS}, not True"),
    ({"capture_policy": "drop"}, "steering_config.capture_policy: 'drop' is not valid; use one of wait, fail"),
    ({"self_check": 0}, "steering_config.self_check: must be true or false, not 0"),
]


@pytest.mark.parametrize(("settings", "message"), INVALID)
def test_rejects_invalid_values(settings, message):
    """Catches a value accepted by one of the three ways to give settings, and a message with a doubled path."""
    for create in (lambda: SteeringConfig(**settings), lambda: SteeringConfig.parse(settings),
                   lambda: engine_kwargs(settings)):  # fmt: skip
        with pytest.raises(SteeringError) as caught:
            create()
        assert str(caught.value) == message


def test_lists_settings_only_for_unknown_names():
    """Catches a misspelt setting that is ignored, and an error that does not list the valid names."""
    with pytest.raises(SteeringError) as caught:
        SteeringConfig.parse({"rows": 5})
    names = ", ".join(SteeringConfig.__struct_fields__)
    assert str(caught.value) == f"steering_config: 'rows' is not a setting; known settings: {names}"


@pytest.mark.parametrize("value", [3, "max_rows=5", ["max_rows"]])
def test_rejects_other_types(value):
    """Catches a value without settings that counts as the defaults."""
    with pytest.raises(SteeringError, match="must be a SteeringConfig or a dict of settings"):
        SteeringConfig.parse(value)


def test_parsed_settings_equal_constructed_ones():
    """Catches a setting that is lost, and lists from JSON that make equal settings differ."""
    assert SteeringConfig.parse({"max_rows": 5, "points": ["mlp_out"]}) == SteeringConfig(
        max_rows=5, points=("mlp_out",)
    )
    assert SteeringConfig.parse(None) == SteeringConfig.parse({}) == SteeringConfig()
