# SPDX-License-Identifier: Apache-2.0
"""Edits of features of an autoencoder, against the formula on captured rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import params, prompt, run
from tests.engine.captures import result
from tests.engine.conftest import opened
from tests.tiny import HIDDEN, direction
from vllm_steer import Edit, SteeringError
from vllm_steer.frontend.context import engine_context

FEATURES, TOKENS = 40, 6
RANDOM = np.random.default_rng(3)
ARRAYS = {
    "W_enc": RANDOM.standard_normal((HIDDEN, FEATURES)).astype("f4"),
    "W_dec": RANDOM.standard_normal((FEATURES, HIDDEN)).astype("f4"),
    "b_enc": RANDOM.standard_normal(FEATURES).astype("f4"),
    "threshold": np.full(FEATURES, 0.2, "f4"),
}
CAPTURE = [{"hooks": {"post_block": [1]}, "positions": "all", "before": before} for before in (True, False)]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sae")
    np.savez(folder / "params.npz", **ARRAYS)
    placed = folder / "gemma-scope-tiny-res" / "layer_1"
    placed.mkdir(parents=True)
    np.savez(placed / "params.npz", **ARRAYS)
    with opened(tiny_llama, steering_config={"saes": {"tiny": str(folder), "placed": str(placed)}}) as engine:
        yield engine


def edit(feature: int = 5, **fields: Any) -> Edit:
    return Edit(**{"kind": "feature", "point": "post_block", "layers": 1, "sae": "tiny", "feature": feature, **fields})


def activations(rows: np.ndarray, feature: int) -> np.ndarray:
    before = rows @ ARRAYS["W_enc"][:, feature] + ARRAYS["b_enc"][feature]
    return np.where(before > ARRAYS["threshold"][feature], np.maximum(before, 0), 0)


CASES: dict[str, tuple[list[Edit], Any]] = {
    "set": ([edit(set=3.0)], lambda x: x + (3.0 - activations(x, 5))[:, None] * ARRAYS["W_dec"][5]),
    "set, half": ([edit(set=0.0, strength=0.5)], lambda x: x - 0.5 * activations(x, 5)[:, None] * ARRAYS["W_dec"][5]),
    "add": ([edit(7, add=2.0, strength=-0.5)], lambda x: x - ARRAYS["W_dec"][7]),
}


def test_edits_equal_their_formula(llm: Any) -> None:
    """Catches another feature, site or formula, and edits of other requests in the batch."""
    names = [*CASES, None]
    prompts = [prompt(i, 8 + i) for i in range(len(names))]
    for before in (True, False):
        spec = {"memory": {"hooks": {"post_block": [1]}, "positions": "all", "before": before}}
        made = [params(TOKENS, steering=CASES[name][0] if name else None, capture=spec) for name in names]
        rows = [result(output).tensor("post_block", 1).float().numpy() for output in run(llm, prompts, made)]
        if before:
            kept = rows
    active = 0
    for name, old, new in zip(names, kept, rows, strict=True):
        expected = CASES[name][1](old) if name else old
        np.testing.assert_allclose(new, expected, atol=2e-3, err_msg=str(name))
        active += int((activations(old, 5) > 0).sum())
    assert active


def test_the_site_of_the_files(llm: Any) -> None:
    """Catches an autoencoder that is read or edited at another site than its files say."""
    placed = {"sae": "placed", "top_k": 4}
    readouts = {"own": placed, "given": {"sae": "tiny", "top_k": 4, "point": "post_block", "layer": 1}}
    own = Edit("feature", sae="placed", feature=5, set=3.0)
    wanted = [params(readouts=readouts), params(steering=[own]), params(steering=[edit(set=3.0)]), params()]
    outputs = [output.outputs[0] for output in run(llm, [prompt(1, 6)] * 4, wanted)]
    found = outputs[0].readouts
    assert found["own"].values.any()
    np.testing.assert_array_equal(found["own"].values, found["given"].values)
    assert outputs[1].token_ids == outputs[2].token_ids != outputs[3].token_ids
    for wrong in ({"point": "post_block", "layer": 2}, {"point": "pre_attn", "layer": 1}):
        with pytest.raises(SteeringError, match="made for resid_post, layer 1"):
            run(llm, [prompt(1, 6)], [params(readouts={"r": {**placed, **wrong}})])


def test_gate_and_live_strength_scale_the_change(llm: Any) -> None:
    """Catches a feature edit that ignores its conditions, or leaves half of its change with a factor of 0."""
    probe = {"probe": direction(1, 0.05), "point": "post_block", "layer": 0, "positions": "all"}
    when = {"readout": "p", "above": 1e9}
    plain, gated = params(TOKENS), params(TOKENS, steering=[edit(set=9.0, when=when)], readouts={"p": probe})
    live = params(TOKENS, steering=[edit(set=9.0, live="x")])
    found = [output.outputs[0].token_ids for output in run(llm, [prompt(1, 9)] * 3, [plain, gated, live])]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_llama_ignores_centring(llm: Any) -> None:
    """Catches a model with RMSNorm whose rows count as centred, or that refuses autoencoders with that setting."""
    context = engine_context(llm.llm_engine)
    assert context is not None and context.capabilities.facts["centring"] == "ignore"


def test_overflow_is_refused(llm: Any) -> None:
    """Catches finite numbers that make the row infinite in the engine."""
    with pytest.raises(SteeringError, match=r"^steering\[0\]: feature at post_block .* overflows float32"):
        run(llm, [prompt(1, 9)], [params(TOKENS, steering=[edit(add=3e38, strength=1e3)])])


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"sae": "tony"}, "steering[0].sae", "this engine has: placed, tiny"),
        ({"feature": FEATURES}, "steering[0].feature", "features 0 to 39"),
    ],
)
def test_refused(llm: Any, given: Any, field: str, words: str) -> None:
    """Catches an unknown autoencoder or feature that fails in the engine."""
    with pytest.raises(SteeringError, match=words) as refused:
        run(llm, [prompt(1, 9)], [params(TOKENS, steering=[edit(**{"set": 1.0, **given})])])
    assert refused.value.field == field
