# SPDX-License-Identifier: Apache-2.0
"""The interface of nnterp on models with norms behind attention and MLP, and with several streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conformance import model as conformance
from tests.conformance.engine import steered_engine
from tests.conformance.zoo import BY_NAME
from tests.peers.conftest import outputs_of
from vllm_steer import SteeringError
from vllm_steer.peers.nnterp import StandardizedTransformer, logit_lens

pytestmark = pytest.mark.slow
TOKENS = [5, 17, 33, 8, 99]
BRANCHES = ("attn_out", "mlp_out")


def check_site(
    model: StandardizedTransformer, name: str, point: str, module: torch.Tensor, normed: torch.Tensor
) -> None:
    """Check that nnterp's name is refused and that our point is what the norm returns."""
    with pytest.raises(SteeringError, match=f"{name}: is not a hook point in layer 1"):
        model.get_token_activations([TOKENS], [1], name)
    with pytest.raises(SteeringError, match=name), model.trace(TOKENS):
        getattr(model, name)[1].save()
    (row,) = model.get_token_activations([TOKENS], [1], point)[0]
    torch.testing.assert_close(row, normed, atol=1e-3, rtol=1e-3)
    assert (row - module).norm() > 0.1 * module.norm()


@pytest.mark.parametrize(
    ("family", "attention_norm", "mlp_norm"),
    [
        ("gemma2", "post_attention_layernorm", "post_feedforward_layernorm"),
        ("glm4", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ],
)
def test_outputs_ahead_of_a_norm_are_refused(family: str, attention_norm: str, mlp_norm: str, tmp_path: Path) -> None:
    """Catches rows behind the norm, of another scale and direction, returned as the output of attention or MLP."""
    tiny = BY_NAME[family]
    path, hf = conformance.save(tiny, tmp_path), conformance.build(tiny).float()
    block = hf.get_submodule(f"{tiny.blocks}.1")
    modules = [getattr(block, name) for name in ("self_attn", attention_norm, "mlp", mlp_norm)]
    attention, normed_attention, mlp, normed_mlp = (rows[-1] for rows in outputs_of(hf, TOKENS, modules))
    with steered_engine(tiny, path, "eager", BRANCHES) as llm:
        model = StandardizedTransformer(llm)
        check_site(model, "attentions_output", "attn_out", attention, normed_attention)
        check_site(model, "mlps_output", "mlp_out", mlp, normed_mlp)
        assert logit_lens(model, [TOKENS]).shape == (1, conformance.LAYERS, conformance.VOCAB)


def test_lenses_of_one_stream_among_several_are_refused(tmp_path: Path) -> None:
    """Catches a projection of Gemma 3n into which the other streams of the replaced token are mixed."""
    tiny = BY_NAME["gemma3n"]
    with steered_engine(tiny, conformance.save(tiny, tmp_path), "eager") as llm:
        model = StandardizedTransformer(llm)
        for call in (
            lambda: logit_lens(model, [TOKENS]),
            lambda: model.project_on_vocab(torch.ones(model.hidden_size)),
            lambda: model.get_topk_closest_tokens(torch.ones(model.hidden_size)),
        ):
            with pytest.raises(SteeringError, match="project_on_vocab: is not supported on this model"):
                call()
        assert model.next_token_probs([TOKENS]).shape == (1, conformance.VOCAB)
