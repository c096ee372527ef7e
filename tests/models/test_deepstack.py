# SPDX-License-Identifier: Apache-2.0
"""Values at ``post_block`` and ``pre_attn`` in models that add image features between their first blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors

from tests.conformance.kernels import media_stubs

TOKENS, HIDDEN = 4, 8


def test_image_features_are_added_between_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches documentation of deepstack that is no longer true.

    ``pre_attn`` includes the features and the preceding ``post_block`` does not; without an image, and in later blocks,
    the two are equal.
    """
    with media_stubs():
        from vllm.model_executor.models import qwen3_vl

    streams: list[tuple[torch.Tensor, torch.Tensor]] = []

    def block(positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Record the stream before and after the block, which adds one."""
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
    tensors = IntermediateTensors({"deepstack_input_embeds_0": features})
    stream = torch.zeros(TOKENS, HIDDEN)
    qwen3_vl.Qwen3LLMModel.forward(model, None, torch.arange(TOKENS), None, stream, tensors)
    (_, first_out), (second_in, second_out), (third_in, _) = streams
    assert torch.equal(second_in, first_out + features)
    assert torch.equal(third_in, second_out)
