# SPDX-License-Identifier: Apache-2.0
"""The last section of each page in docs/peers lists what is refused; scripts/reference.py runs each listed input."""

from __future__ import annotations

import pytest

from tests.repo.tree import read
from vllm_steer.adapters import FIELDS_OF_OTHERS, problem_of
from vllm_steer.peers.refusals import KEY, REFUSALS

PROJECTS = {"vllm-lens": "vllm-lens", "rhizonymph": "RhizoNymph/vllm"}
"""Projects by page whose request fields are refused without their interface."""
TABLES = {
    **REFUSALS,
    "inspect": {KEY: REFUSALS["vllm-lens"][KEY]},
    "vllm-probe-hook": {},
}


@pytest.mark.parametrize("page", TABLES)
def test_pages_list_every_refusal(page: str) -> None:
    """Catches a refused name that the page does not list, and a section that does not come last."""
    last = read(f"docs/peers/{page}.md").rpartition("\n## ")[2]
    assert last.startswith("Refused\n")
    assert "| input | error |" in last
    for names in TABLES[page].values():
        for name, problem in names.items():
            assert f"{name}: {problem} |" in last
    for name, (owner, _) in FIELDS_OF_OTHERS.items():
        if owner == PROJECTS.get(page):
            assert f"| {name}: {problem_of(name)} |" in last
