# SPDX-License-Identifier: Apache-2.0
"""Models that add features of an image between their first blocks: what ``post_block`` and ``pre_attn`` read there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors

from tests.conformance.kernels import torchvision_in_name

TOKENS, HIDDEN = 4, 8


def test_features_of_an_image_come_between_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches what the README says of deepstack becoming untrue: ``pre_attn`` has the features, the ``post_block``
    before has them not, and where there is no image, nor in later blocks, the two are equal."""
    with torchvision_in_name():
        from vllm.model_executor.models import qwen3_vl

    streams: list[tuple[torch.Tensor, torch.Tensor]] = []

    def block(positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Both summands of the stream as it comes, and as it leaves: one more than that."""
        before = hidden if residual is None else hidden + residual
        streams.append((before, before + 1))
        return torch.ones_like(before), before

    monkeypatch.setattr(qwen3_vl, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    model = SimpleNamespace(
        layers=[block] * 3, start_layer=0, end_layer=3, norm=lambda hidden, residual: (hidden + residual, None),
        _maybe_add_hidden_state=lambda states, *_: states,
    )  # fmt: skip
    features = torch.zeros(TOKENS, HIDDEN)
    features[1] = 10.0
    brought = IntermediateTensors({"deepstack_input_embeds_0": features})
    stream = torch.zeros(TOKENS, HIDDEN)
    qwen3_vl.Qwen3LLMModel.forward(model, None, torch.arange(TOKENS), None, stream, brought)
    (_, first_out), (second_in, second_out), (third_in, _) = streams
    assert torch.equal(second_in, first_out + features)
    assert torch.equal(third_in, second_out)
