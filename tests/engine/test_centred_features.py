# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of TransformerLens' centred GPT-2, against HF Transformers with centred weights.

The engine has the weights of the checkpoint. The reference has the weights that ``center_writing_weights`` makes of
them, reads centred rows with the autoencoder's own formula, and adds decoder directions in a hook.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.model import build
from tests.conformance.zoo import BY_NAME
from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.models.test_sae import CENTRED
from vllm_steer import Edit

FEATURES, LAYER, TOKENS = 24, 1, 4
RANDOM = torch.Generator().manual_seed(8)
PROMPT = [3, 17, 40, 9, 22, 5, 31]
POINTS = {"post_block": "hook_resid_post", "mlp_out": "hook_mlp_out"}


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a GPT-2 that writes large means to its stream; its head is not tied to the embedding."""
    made = build(BY_NAME["gpt2_untied"])
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight")):
                weight += 0.3 * torch.randn(weight.shape[0], 1, generator=RANDOM)
            elif name.endswith("c_proj.bias"):
                weight += 0.5
    return made


@pytest.fixture(scope="module")
def sae(model: Any) -> dict[str, torch.Tensor]:
    hidden = model.config.n_embd
    shapes = {"W_enc": (hidden, FEATURES), "W_dec": (FEATURES, hidden), "b_enc": (FEATURES,), "b_dec": (hidden,)}
    arrays = {name: torch.randn(shape, generator=RANDOM) for name, shape in shapes.items()}
    # Directions and columns with means, so that they matter.
    return arrays | {"W_enc": arrays["W_enc"] + 0.5, "W_dec": arrays["W_dec"] + 0.5}


@pytest.fixture(scope="module")
def llm(model: Any, sae: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("centred")
    model.save_pretrained(root / "model")
    saes: dict[str, str] = {}
    for point, hook in POINTS.items():
        folder = root / point
        folder.mkdir()
        save_file(sae, folder / "sae_weights.safetensors")
        metadata = {"hook_name": f"blocks.{LAYER}.{hook}", "model_from_pretrained_kwargs": CENTRED}
        (folder / "cfg.json").write_text(json.dumps({"architecture": "standard", "metadata": metadata}))
        saes[point] = str(folder)
    config = {"saes": saes, "points": ["mlp_out"], "record_columns": 4 * FEATURES + 8}
    with opened(root / "model", max_model_len=64, steering_config=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(model: Any) -> Any:
    """Return a copy of the model as TransformerLens centres it."""
    centred = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in centred.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")):
                weight -= weight.mean(-1, keepdim=True)
    return centred


def activations(rows: torch.Tensor, sae: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.relu((rows - sae["b_dec"]) @ sae["W_enc"] + sae["b_enc"])


class Run:
    """A forward pass of the reference with an edit of features: centred rows in front of it, and log-probabilities."""

    def __init__(
        self, model: Any, tokens: Sequence[int], point: str, sae: dict[str, torch.Tensor], edits: Sequence[Edit] = ()
    ) -> None:
        block = model.transformer.h[LAYER]
        handle = (block if point == "post_block" else block.mlp).register_forward_hook(self._hook)
        self._sae, self._edits = sae, edits
        with torch.inference_mode():
            self.logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
        handle.remove()

    def _hook(self, module: Any, args: Any, output: Any) -> Any:
        whole = output[0] if isinstance(output, tuple) else output
        self.rows = rows = whole[0].clone()
        for edit in self._edits:
            if edit.feature is None:
                raise ValueError(f"{edit} changes no feature")
            old = activations(rows, self._sae)[:, edit.feature, None]
            change = edit.add if edit.set is None else edit.set - old
            rows = rows + edit.strength * change * self._sae["W_dec"][edit.feature]
        return (rows[None], *output[1:]) if isinstance(output, tuple) else rows[None]


def readout(point: str) -> dict[str, Any]:
    return {"x": {"sae": point, "top_k": FEATURES, "point": point, "layer": LAYER, "positions": "all"}}


@pytest.mark.parametrize("point", POINTS)
def test_readouts_equal_the_reference(llm: Any, reference: Any, sae: dict[str, torch.Tensor], point: str) -> None:
    """Catches rows whose mean counts; without its removal, activations are others, as the last line shows."""
    output = run(llm, [prompt(*PROMPT)], [params(1, readouts=readout(point))])[0]
    found = output.outputs[0].readouts["x"]
    rows = Run(reference, PROMPT, point, sae).rows
    expected = activations(rows, sae).numpy()
    got = np.zeros_like(expected)
    for row, indices, values in zip(got, found.indices, found.values, strict=True):
        active = indices.ravel() >= 0
        row[indices.ravel()[active]] = values.ravel()[active]
    np.testing.assert_allclose(got, expected, atol=2e-3)
    assert (expected > 0).any(axis=1).all()
    assert abs(activations(rows + 0.5, sae).numpy() - expected).max() > 1


def edit(point: str, feature: int, **fields: Any) -> Edit:
    return Edit(kind="feature", point=point, layers=LAYER, sae=point, feature=feature, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "changes", [{"set": 6.0}, {"set": 0.0, "strength": 0.5}, {"add": 3.0, "strength": -1.5}], ids=str
)
def test_edits_equal_the_reference(
    llm: Any, reference: Any, sae: dict[str, torch.Tensor], point: str, changes: dict[str, float]
) -> None:
    """Catches an edit that reads another activation, and a direction whose mean reaches the logits."""
    with torch.inference_mode():
        active = activations(Run(reference, PROMPT, point, sae).rows, sae).sum(0)
    made = edit(point, int(active.argmax()), **changes)
    edited, plain = run(llm, [prompt(*PROMPT)] * 2, [params(TOKENS, steering=[made]), params(TOKENS)])
    for output, edits in ((edited, [made]), (plain, [])):
        tokens = [*PROMPT, *tokens_of(output)]
        expected = Run(reference, tokens, point, sae, edits).logprobs[len(PROMPT) - 1 : -1]
        np.testing.assert_allclose(logprobs_of(output), expected, atol=2e-3)
    assert abs(logprobs_of(edited)[0] - logprobs_of(plain)[0]).max() > 0.05
