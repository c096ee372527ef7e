# SPDX-License-Identifier: Apache-2.0
"""The example package of a custom consumer."""

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
def installed(monkeypatch):
    """Make the package importable and offer its entry point. Returns the consumer's name."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][ENTRY_POINT_GROUP].items()
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(discovery, "entry_points", lambda group, name: [EntryPoint(name, value, group)])
    return name


def test_mean_of_all_rows(installed, tmp_path):
    """Catches means of the last request, and requests without rows counted."""
    consumer = make_consumer(installed, {"out": str(tmp_path / "mean.safetensors")})
    requests = [captured(f"r{i}", seed=i, rows=rows) for i, rows in enumerate((5, 0, 2))]
    reports = [consumer.accept(request) for request in requests]
    consumer.close()
    assert [report["rows"]["post_block.3"] for report in reports] == [5, 5, 7]
    means = load_file(tmp_path / "mean.safetensors")
    for point, layer in requests[0].sites:
        rows = torch.cat([request.tensor(point, layer) for request in requests])
        torch.testing.assert_close(means[f"{point}.{layer}"], rows.mean(0))
