# SPDX-License-Identifier: Apache-2.0
"""Comparison with the packages of peers in one process; skipped where they are not installed.

Run with ``pip install --no-deps transformer-lens==4.3.0 nnterp==1.3.0 nnsight==0.7.0`` and what these import.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.test_transformer_lens import in_hf
from vllm_steer import SteeringError
from vllm_steer.peers import nnterp as ours
from vllm_steer.peers.transformer_lens import SteeringDriver

pytestmark = pytest.mark.slow
NAME = "blocks.1.hook_resid_post"
PROMPTS = ["one", "two", "six"]
"""Prompts of equal lengths: nnterp shifts positive positions by the padding."""


@pytest.fixture
def bridge(engine: Any, model_path: Path) -> Any:
    """Return TransformerLens' ``RemoteBridge`` on the engine, with logits of all tokens."""
    pytest.importorskip("transformer_lens")
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_path)
    built = build_bridge_config_from_hf(config, "LlamaForCausalLM", str(model_path), torch.float32)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(built)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return RemoteBridge(adapter, tokenizer, SteeringDriver(engine, adapter.cfg, tokenizer, sequence_logits=True))


def test_the_bridge_of_transformer_lens(bridge: Any, hf: Any) -> None:
    """Catches a loss of shifted tokens, an operation with another effect, and hooks that see other rows."""
    tokens = torch.tensor([[5, 9, 17, 33], [8, 3, 21, 60]])
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    for spec, change in (
        (None, lambda rows: rows),
        ({"op": "add", "value": vector}, lambda rows: rows + vector),
        ({"op": "scale", "factor": 0.5, "pos": 0}, lambda rows: torch.cat([rows[:, :1] / 2, rows[:, 1:]], 1)),
        ({"op": "suppress", "pos": -1}, lambda rows: torch.cat([rows[:, :-1], 0 * rows[:, -1:]], 1)),
    ):  # fmt: skip
        extra = {} if spec is None else {"intervene": {NAME: spec}}
        right = in_hf(hf, tokens, 1, change)
        losses = -right[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        logits, cache = bridge.run_with_cache(tokens, names_filter=NAME, **extra)
        torch.testing.assert_close(logits, right, atol=5e-3, rtol=1e-3)
        assert list(cache.keys()) == [NAME]
        loss = bridge.forward(tokens, return_type="loss", **extra)
        torch.testing.assert_close(loss, losses.mean(), atol=1e-3, rtol=1e-3)
        each = bridge.forward(tokens, return_type="loss", loss_per_token=True, **extra)
        torch.testing.assert_close(each, losses, atol=5e-3, rtol=1e-3)
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functions at hooks only read
        bridge.run_with_hooks(tokens, fwd_hooks=[(NAME, lambda rows, hook: seen.append((hook.name, rows)))])
    ((name, rows),) = seen
    assert name == NAME
    torch.testing.assert_close(rows, bridge.run_with_cache(tokens)[1][NAME], atol=1e-3, rtol=1e-3)


def test_patching_of_transformer_lens_is_refused(bridge: Any) -> None:
    """Catches the grid of ``patching`` in which nothing is patched, returned as if it were."""
    pandas = pytest.importorskip("pandas")
    from transformer_lens import patching

    clean, corrupted = torch.tensor([[5, 9, 17, 33]]), torch.tensor([[5, 9, 60, 33]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, cache = bridge.run_with_cache(clean, names_filter=NAME)
        with pytest.raises(SteeringError, match="PatchingStudy"):
            patching.generic_activation_patch(
                bridge, corrupted, cache, lambda logits: logits[0, -1, 3], patching.layer_pos_patch_setter,
                "resid_post", index_df=pandas.DataFrame([{"layer": 1, "pos": 2}]),
            )  # fmt: skip


def test_nnterp(engine: Any, model_path: Path) -> None:
    """Catches values, axes or names of targets that differ from nnterp's."""
    theirs = pytest.importorskip("nnterp")
    from nnterp import interventions, nnsight_utils, prompt_utils

    peer = theirs.StandardizedTransformer(
        str(model_path), dtype=torch.float32, device_map="cpu", check_renaming=False, check_attn_probs_with_trace=False
    )
    peer.tokenizer.pad_token = peer.tokenizer.convert_ids_to_tokens(0)
    model = ours.StandardizedTransformer(engine)
    close = {"atol": 1e-3, "rtol": 1e-2}
    torch.testing.assert_close(
        model.get_token_activations(PROMPTS), nnsight_utils.get_token_activations(peer, PROMPTS), **close
    )
    torch.testing.assert_close(ours.logit_lens(model, PROMPTS), interventions.logit_lens(peer, PROMPTS), **close)
    text, index = "cat cat ?", -1
    torch.testing.assert_close(
        ours.patchscope_lens(model, PROMPTS, ours.TargetPrompt(text, index)),
        interventions.patchscope_lens(peer, PROMPTS, interventions.TargetPrompt(text, index)),
        **close,
    )
    found = ours.run_prompts(model, [ours.Prompt.from_strings(each, {"a": ["x", "y"]}, model) for each in PROMPTS])
    right = prompt_utils.run_prompts(
        peer, [prompt_utils.Prompt.from_strings(each, {"a": ["x", "y"]}, peer.tokenizer) for each in PROMPTS]
    )
    assert found.keys() == right.keys()
    torch.testing.assert_close(found["a"], right["a"], **close)
