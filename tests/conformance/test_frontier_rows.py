# SPDX-License-Identifier: Apache-2.0
"""Settings of the newest models' rows, whose kernels need a GPU; these tests run on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conformance import identities
from tests.conformance.branches import supported_branches
from tests.conformance.edits import KINDS
from tests.conformance.engine import layer_classes, steered_engine
from tests.conformance.frontier_rows import FRONTIER, PACKAGES, POSITIONS, FrontierRow, fill, frontier_weights, save_row
from tests.conformance.identities import check_identities
from tests.conformance.no_reference import register_config
from tests.conformance.proof import Proof, architecture_of
from tests.conformance.shard import EVERYTHING, selected
from tests.wrong_taps import late_layer, late_mid
from vllm_steer.models import install

ROWS = {str(row): row for row in FRONTIER}
LATE = ((install, "_pair_layer", late_layer("pair", "input_layernorm")), (install, "_pair_mid", late_mid("pair")))


@pytest.mark.parametrize("row", FRONTIER, ids=str)
def test_configs_are_valid(row: FrontierRow, tmp_path: Path) -> None:
    """Catches settings that the class of the config refuses, which would only fail on a GPU host."""
    from vllm.transformers_utils.config import get_config

    register_config(row.tiny.config)
    config = get_config(str(save_row(row.tiny, tmp_path)), trust_remote_code=False)
    assert config.get_text_config().max_position_embeddings == POSITIONS
    assert set(row.needs) <= set(PACKAGES)


def test_names_are_distinct() -> None:
    """Catches two rows whose outcomes replace each other."""
    assert len(ROWS) == len(FRONTIER)


@pytest.mark.parametrize("name", ["e_score_correction_bias", "expert_bias"])
def test_routing_biases_are_far_apart(name: str) -> None:
    """Catches biases between which scores decide: rounding then routes tokens to other experts."""
    bias = torch.zeros(8)
    fill(name, bias, torch.Generator().manual_seed(0))
    # Scores are at most 1, or the root of a softplus.
    assert bias.sort().values.diff().min() > torch.nn.functional.softplus(torch.tensor(10.0)).sqrt()


def prove_on_cpu(row: FrontierRow, folder: Path, branches: Sequence[str]) -> Proof:
    """Prove a row with the kernels of a CPU, in bfloat16 and at the row's own sizes."""
    path = save_row(row.tiny, folder)
    with frontier_weights(row.tiny) as weights:
        tiny = replace(row.tiny, engine={**(row.tiny.engine or {}), **weights})
        with steered_engine(tiny, path, "eager", branches) as llm:
            checks = check_identities(tiny, llm)
            return Proof(architecture_of(path), "identities inside vLLM", sorted(layer_classes(llm)), checks)


@pytest.mark.skipif(not (EVERYTHING or selected("deepseek_v3-frontier")), reason="not in this part")
@pytest.mark.parametrize("late", [False, True], ids=["right", "late"])
def test_rounding_routes_no_token_to_other_experts(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches routing on the edge, by which right taps may fail, and criteria that accept taps one sublayer late."""
    row = ROWS["deepseek_v3"]
    if late:
        for owner, name, value in LATE:
            monkeypatch.setattr(owner, name, value)
        # The wrong taps are on the stream, and so are the checks that have to find them.
        monkeypatch.setattr(identities, "supported_branches", lambda tiny: ())
    proof = prove_on_cpu(row, tmp_path, () if late else supported_branches(row.tiny))
    if late:
        places = [(point, layer) for point in ("pre_attn", "post_attn") for layer in (1, 2)]
        names = [f"{kind} at {point} of layer {layer}, by hooks" for point, layer in places for kind in KINDS]
        assert all(any(problem.startswith(name) for problem in proof.problems(row.tiny)) for name in names)
        return
    assert not proof.problems(row.tiny)
    # At every token, not at the median only: no token was routed to other experts.
    assert all(check.error < 0.1 * check.effect for check in proof.checks if check.effect)
