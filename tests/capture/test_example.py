# SPDX-License-Identifier: Apache-2.0
"""The example of a third party's consumer: its package names it rightly, and it does what it says."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.capture.captured import captured
from vllm_steer.capture.consumers import ENTRY_POINT_GROUP, discovery, make_consumer

FOLDER = Path(__file__).parents[2] / "examples" / "capture_consumer"


@pytest.fixture
def as_installed(monkeypatch):
    """The entry point of its pyproject, as `importlib.metadata` would show it, and its module on the path."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][ENTRY_POINT_GROUP].items()
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(discovery, "entry_points", lambda group, name: [EntryPoint(name, value, group)])
    return name


def test_it_keeps_the_mean_of_all_rows(as_installed, tmp_path):
    consumer = make_consumer(as_installed, {"out": str(tmp_path / "mean.safetensors")})
    requests = [captured(f"r{i}", seed=i, rows=rows) for i, rows in enumerate((5, 0, 2))]
    reports = [consumer.accept(request) for request in requests]
    consumer.close()
    assert [report["rows"]["post_block.3"] for report in reports] == [5, 5, 7]
    means = load_file(tmp_path / "mean.safetensors")
    for point, layer in requests[0].sites:
        rows = torch.cat([request.tensor(point, layer) for request in requests])
        torch.testing.assert_close(means[f"{point}.{layer}"], rows.mean(0))
