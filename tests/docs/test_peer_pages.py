# SPDX-License-Identifier: Apache-2.0
"""The last section of each page in docs/peers lists what is refused; scripts/reference.py runs each listed input."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.repo.tree import read
from vllm_steer.peers.nnterp.refused import ATTRIBUTES, FUNCTIONS
from vllm_steer.peers.rhizonymph.fields import REFUSED as RHIZONYMPH
from vllm_steer.peers.transformer_lens.refused import ARGUMENTS, LOADING
from vllm_steer.peers.transformer_lens.refused import REFUSED as TRANSFORMER_LENS
from vllm_steer.peers.vllm_lens.keys import REFUSED_KEYS
from vllm_steer.peers.vllm_lens.refused import CLIENT_ARGUMENTS, LLM_METHODS
from vllm_steer.peers.vllm_lens.refused import NAMES as LENS_NAMES
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS, problem_of


@pytest.mark.parametrize(
    ("page", "table", "project"),
    [
        ("vllm-lens", {**REFUSED_KEYS, **LENS_NAMES, **LLM_METHODS, **CLIENT_ARGUMENTS}, "vllm-lens"),
        ("inspect", REFUSED_KEYS, None),
        ("vllm-probe-hook", {}, None),
        ("nnterp", {**ATTRIBUTES, **FUNCTIONS}, None),
        ("transformer-lens", {**TRANSFORMER_LENS, **ARGUMENTS, **LOADING}, None),
        ("rhizonymph", RHIZONYMPH, "RhizoNymph/vllm"),
    ],
)
def test_pages_list_every_refusal(page: str, table: Mapping[str, str], project: str | None) -> None:
    """Catches a refused name that the page does not list, and a section that does not come last."""
    last = read(f"docs/peers/{page}.md").rpartition("\n## ")[2]
    assert last.startswith("Refused\n")
    assert "| input | error |" in last
    for name, problem in table.items():
        assert f"{name}: {problem} |" in last
    for name, (owner, _) in FIELDS_OF_OTHERS.items():
        if owner == project:
            assert f"| {name}: {problem_of(name)} |" in last
