# SPDX-License-Identifier: Apache-2.0
"""Cases of speculative decoding with layers for multi-token prediction (MTP): only the target is steered and captured.

An MTP layer is a decoder layer of the target's class that reads the target's last stream, with its edits. Every family
gives the output of the same request without speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.no_reference import register_config
from tests.engine import drafts
from tests.engine.answers import params, prompt, run
from tests.engine.captures import result
from tests.engine.conftest import opened
from tests.engine.drafter_cases import NUM_DRAFTS, PROMPTS, SMALL, check_outputs, check_taps, workload
from tests.engine.mtp_models import MODELS, PROVEN, save
from tests.tiny import LAYERS, VOCAB, direction
from vllm_steer import Edit, SteeringError
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES

ALL_POINTS = {"steering_config": {"points": list(OPTIONAL_POINTS)}}
LAST = {"memory": {"hooks": {"post_block": [LAYERS - 1]}, "positions": "all"}}


def requests() -> tuple[list[Any], list[Any]]:
    """Return the workload and, for each hook point, a request with an edit there and captures at all points."""
    prompts, wanted = workload()
    hooks = {point: [0, 1, LAYERS - 1] for point in POINT_NAMES}
    for i, point in enumerate(POINT_NAMES):
        prompts.append(prompt(*np.random.default_rng(i).integers(1, VOCAB, 9 + i).tolist()))
        edit = Edit(kind="add", point=point, layers=1, vector=direction(i), tokens="all")
        wanted.append(
            params(20, logprobs=None, steering=[edit], capture={"memory": {"hooks": hooks, "positions": "all"}})
        )
    return prompts, wanted


@pytest.mark.parametrize("family", PROVEN)
def test_matches_decoding_without_speculation(tmp_path: Path, family: str) -> None:
    """Catches captures, gates and stops of rejected drafts, and MTP layers that are steered or counted as layers."""
    model = MODELS[family]
    register_config(family)
    folder = save(model, tmp_path / family)
    with opened(folder, **SMALL, **ALL_POINTS) as llm:
        right = run(llm, *requests())
        # MiMo's final norm runs with the logits, so the lens is refused.
        lens = None if family == "mimo" else drafts.run_lens(llm, PROMPTS)
    decided = (*drafts.truth_of(folder / "hf", PROMPTS[:2]), PROMPTS[:2])
    with opened(
        folder, **SMALL, **ALL_POINTS, speculative_config={"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    ) as llm:
        drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model
        draft_config = llm.llm_engine.vllm_config.speculative_config.draft_model_config
        assert draft_config.architectures == [model.drafter]
        assert model.layer in {type(module).__name__ for module in drafter.modules()}
        check_taps(llm)
        check_outputs(llm, requests(), right)
        drafts.check_every_window(llm, decided)
        if lens is not None:
            drafts.check_lens(drafts.run_lens(llm, PROMPTS), lens)
            return
        with pytest.raises(SteeringError, match="final norm"):
            drafts.run_lens(llm, PROMPTS)
        _check_stream(llm, drafter)


def _check_stream(llm: Any, drafter: Any) -> None:
    """Raise unless the MTP layer reads the steered stream, with an edit at the end of the last layer."""
    read: list[torch.Tensor] = []
    original = drafter.forward
    edit = Edit(kind="add", point="post_block", layers=LAYERS - 1, vector=direction(3), tokens="all")

    def forward(*args: Any, **kwargs: Any) -> Any:
        read.append(kwargs["hidden_states"].clone())
        return original(*args, **kwargs)

    for steering in (None, [edit]):
        read.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, "forward", forward)
            output = run(llm, [prompt(*PROMPTS[0])], [params(2, logprobs=None, steering=steering, capture=LAST)])[0]
        rows = result(output).tensor("post_block", LAYERS - 1)[: len(PROMPTS[0])]
        torch.testing.assert_close(read[0][: len(rows)], rows, atol=2e-3, rtol=1e-4)
