# SPDX-License-Identifier: Apache-2.0
"""The points on the attention and MLP branches, in engines that have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.engine.test_off import worker_of
from tests.engine.test_self_check import replaced_taps
from tests.tiny import LAYERS, direction
from tests.wrong_taps import after_the_stream, copied_output, other_summand
from vllm_steer import Edit
from vllm_steer.engine.self_check import self_check
from vllm_steer.models import install
from vllm_steer.models.self_check_plan import SelfCheckError
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES

P = prompt(5, 9, 17, 33, 60)
V = direction(3)


@pytest.fixture(scope="module")
def single_point_outputs(tiny_llama: Path) -> Iterator[Any]:
    """Return the outputs of an engine with one of the points. It is closed before other engines start."""
    with opened(tiny_llama, steering_config={"points": ["mlp_out"]}) as llm:
        answers = run(
            llm, [P] * 2, [asking("mlp_out"), asking("pre_attn", "mlp_out", edits=[edit("mlp_out", "ablate")])]
        )
        columns = worker_of(llm).model_runner.steering.tables.num_sites
    return answers, columns


@pytest.fixture(scope="module")
def every(single_point_outputs: Any, tiny_llama: Path) -> Iterator[Any]:
    with opened(tiny_llama, steering_config={"points": list(OPTIONAL_POINTS)}) as llm:
        yield llm


def edit(point: Any, kind: Any = "add", layers: Any = 1, **more: Any) -> Edit:
    return Edit(kind=kind, point=point, layers=layers, vector=V, **more)


def asking(*points: str, edits: list[Edit] | None = None, before: bool = False) -> Any:
    spec = {"hooks": dict.fromkeys(points, "all"), "positions": "all", "before": before}
    return params(steering=edits, capture={"memory": spec})


def rows_of(output: Any, point: Any, layer: int) -> torch.Tensor:
    rows: torch.Tensor = output.capture_results["memory"].tensor(point, layer)
    return rows


def test_stream_grows_by_the_captured_branches(every: Any) -> None:
    """Catches a branch read from the other summand, before its post-norm, or in the wrong layer."""
    (output,) = run(every, [P], [asking(*POINT_NAMES)])
    for layer in range(LAYERS):
        at = {point: rows_of(output, point, layer) for point in POINT_NAMES}
        torch.testing.assert_close(at["post_attn"] - at["pre_attn"], at["attn_out"], atol=1e-4, rtol=0)
        torch.testing.assert_close(at["post_block"] - at["post_attn"], at["mlp_out"], atol=1e-4, rtol=0)
        assert at["attn_out"].abs().mean() > 0.01 < at["mlp_out"].abs().mean()


@pytest.mark.parametrize(("branch", "stream"), [("attn_out", "post_attn"), ("mlp_out", "post_block")])
def test_branch_edits_reach_the_stream_once(every: Any, branch: str, stream: str) -> None:
    """Catches a branch edit that is applied too late, or twice."""
    ours, theirs, plain = run(
        every, [P] * 3, [params(steering=edits) for edits in ([edit(branch)], [edit(stream)], None)]
    )
    np.testing.assert_allclose(logprobs_of(ours), logprobs_of(theirs), atol=1e-3)
    assert np.abs(logprobs_of(ours) - logprobs_of(plain)).max() > 1e-2


@pytest.mark.parametrize("point", OPTIONAL_POINTS)
def test_ablation_acts_on_the_branch_alone(every: Any, point: str) -> None:
    """Catches a component removed from the stream instead of the branch, and captures on the wrong side of the edit."""
    after, before = run(
        every, [P] * 2, [asking(*POINT_NAMES, edits=[edit(point, "ablate")], before=b) for b in (False, True)]
    )
    unit = torch.from_numpy(V / np.linalg.norm(V))
    x = rows_of(before, point, 1)
    torch.testing.assert_close(rows_of(after, point, 1), x - (x @ unit)[:, None] * unit, atol=1e-4, rtol=0)
    assert (x @ unit).abs().max() > 0.01
    assert (rows_of(after, "post_block", 1) @ unit).abs().max() > 0.01


def test_engine_with_one_point_equals_engine_with_all(single_point_outputs: Any, every: Any) -> None:
    """Catches table columns counted as if the engine had all points."""
    answers, columns = single_point_outputs
    assert columns == LAYERS * 4
    again = run(every, [P] * 2, [asking("mlp_out"), asking("pre_attn", "mlp_out", edits=[edit("mlp_out", "ablate")])])
    for ours, theirs in zip(answers, again, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for layer in range(LAYERS):
            torch.testing.assert_close(rows_of(ours, "mlp_out", layer), rows_of(theirs, "mlp_out", layer))


def test_self_check_covers_the_branch_points(every: Any) -> None:
    """Catches points that are served unchecked."""
    (report,) = every.collective_rpc("steering_capabilities")
    found = report["self_check"]
    assert (found["sites"], found["hops"], found["conclusive"]) == (6 * LAYERS, 7 * LAYERS, 7 * LAYERS)


@pytest.mark.parametrize(
    ("maker", "wrong", "said"),
    [
        ("_with_branch", other_summand, "attn_out of layer 0: post_attn of layer 0 must be"),
        ("_with_branch", after_the_stream, "attn_out of layer 0: an edit there does not change post_attn of layer 0"),
        ("_tap_output", copied_output, "mlp_in of layer 0: an edit there does not change mlp_out of layer 0"),
    ],
)
def test_self_check_rejects_wrong_branch_taps(
    maker: str, wrong: Any, said: str, every: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check that passes a branch tap on the other summand, after the stream's tap, or on an unused tensor."""
    monkeypatch.setattr(install, maker, wrong)
    with replaced_taps(every, install.install_taps) as worker:
        monkeypatch.undo()
        with pytest.raises(SelfCheckError, match=said):
            self_check(worker)
