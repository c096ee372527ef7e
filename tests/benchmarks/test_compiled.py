# SPDX-License-Identifier: Apache-2.0
"""Tests of ``benchmarks/compiled.py`` without the compiler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks import compiled
from vllm_steer.config import SteeringConfig


def test_counts_every_model_and_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a count reported for another model or setting."""
    numbers = {"llama": 100, "granite": 200, "gpt2": 300}

    def counted(model: dict[str, Any], settings: dict[str, Any]) -> int:
        return numbers[model["model_type"]] + list(compiled.KINDS.values()).index(settings)

    monkeypatch.setattr(compiled, "counted", counted)
    monkeypatch.setattr(sys, "argv", ["compiled", "--out", str(tmp_path / "found.json")])
    compiled.main()
    found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert {name: list(counts.values()) for name, counts in found.items()} == {
        "Llama": [100, 101, 102], "Granite": [200, 201, 202], "GPT-2": [300, 301, 302],
    }  # fmt: skip
    assert all(list(counts) == list(compiled.KINDS) for counts in found.values())


@pytest.mark.parametrize("name", list(compiled.MODELS))
def test_models_and_settings_are_valid(name: str) -> None:
    """Catches a config that Transformers parses differently, and a missing setting `plain_code`."""
    model = compiled.MODELS[name]
    config = AutoConfig.for_model(**model)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (compiled.LAYERS, 64, 2)
    stock, tapped, both = compiled.KINDS.values()
    assert not stock and tapped["enable_steering"] and both["enable_steering"]
    assert SteeringConfig.parse(both["steering_config"]).plain_code
    assert "steering_config" not in tapped
