# SPDX-License-Identifier: Apache-2.0
"""Readouts of requests, against products of the captured rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import result
from tests.tiny import HIDDEN, direction
from vllm_steer import SteeringError
from vllm_steer.engine.record_copy import RecordCopy

PROBE, DIRECTIONS = direction(3, 0.2), np.stack([direction(i, 0.2) for i in range(3)])
EDIT = [{"kind": "add", "point": "post_block", "layers": 2, "vector": [3.0] * HIDDEN}]
PROMPTS = [prompt(*range(5 * i + 1, 6 * i + 9)) for i in range(6)]


def readouts(number: int) -> dict[str, Any]:
    """Return readouts that differ between requests in their number and tokens."""
    found: dict[str, Any] = {
        "probe": {"probe": PROBE, "bias": 0.5, "sigmoid": number == 4, "point": "post_block", "layer": 2}
    }
    if number == 3:
        found["probe"]["cosine"] = True
    if number % 2:
        found["probe"]["positions"] = "all"
        found["topics"] = {"projections": DIRECTIONS, "point": "pre_attn", "layer": 1, "positions": [[2, 11]]}
    return found


def requests(number: int) -> Any:
    """Return parameters; every third request has no readouts."""
    capture = {"memory": {"hooks": {"post_block": [2], "pre_attn": [1]}, "positions": "all"}}
    own = None if number % 3 == 2 else readouts(number)
    return params(8, logprobs=None, steering=EDIT, capture=capture, readouts=own)


def assert_readouts(llm: Any) -> None:
    """Check a mixed batch against products of the rows of the same requests."""
    for number, output in enumerate(run(llm, PROMPTS, [requests(i) for i in range(len(PROMPTS))])):
        found = output.outputs[0].readouts
        if number % 3 == 2:
            assert found is None
            continue
        prompt_len, forwarded = len(output.prompt_token_ids), len(output.prompt_token_ids) + 7
        rows = {site: result(output).tensor(*site).numpy() for site in result(output).sites}
        scores = rows["post_block", 2] @ PROBE
        if number == 3:
            scores /= np.linalg.norm(rows["post_block", 2], axis=-1) * np.linalg.norm(PROBE)
        scores = scores + 0.5
        expected = 1 / (1 + np.exp(-scores)) if number == 4 else scores
        start = 0 if number % 2 else prompt_len
        assert found["probe"].positions.tolist() == list(range(start, forwarded))
        np.testing.assert_allclose(found["probe"].values, expected[start:], atol=2e-3)
        if number % 2:
            assert found["topics"].positions.tolist() == list(range(2, 11))
            np.testing.assert_allclose(found["topics"].values, (rows["pre_attn", 1] @ DIRECTIONS.T)[2:11], atol=2e-3)


def test_readouts_equal_products_of_rows(llm: Any) -> None:
    """Catches values of another request, site, token or direction, and values ahead of the edits of the site."""
    assert_readouts(llm)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e18])
def test_a_cosine_does_not_depend_on_the_length_of_the_weights(llm: Any, scale: float) -> None:
    """Catches a cosine of 0 because the norm of small weights underflows, and a product with a unit vector."""
    llm.steering.register("scaled", probes={"w": (scale * PROBE).tolist()})
    site = {"point": "post_block", "layer": 2, "positions": "all"}
    probes: dict[str, Any] = {"one": PROBE, "other": scale * PROBE, "named": "scaled/w"}
    read = {f"cosine-{name}": {"probe": each, "cosine": True, **site} for name, each in probes.items()}
    read |= {name: {"probe": each, **site} for name, each in probes.items()}
    wanted = [params(4, readouts=each) for each in (read, {"one": read["one"]})]
    found, alone = (run(llm, PROMPTS[:1], [each])[0].outputs[0].readouts for each in wanted)
    llm.steering.delete("scaled")
    cosine = found["cosine-one"].values
    assert np.abs(cosine).max() > 0.01
    for name in ("other", "named"):
        np.testing.assert_allclose(found[f"cosine-{name}"].values, cosine, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found[name].values, scale * found["one"].values, rtol=1e-4, atol=1e-5 * scale)
    np.testing.assert_array_equal(found["one"].values, alone["one"].values)


def test_comparison_detects_shifted_tokens(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the records of the tokens shifted by one, the comparison must fail."""
    real = RecordCopy.start_copy

    def shifted(self: Any) -> None:
        record = self._store.tables.record
        record.copy_(record.roll(1, 0))
        real(self)

    monkeypatch.setattr(RecordCopy, "start_copy", shifted)
    with pytest.raises(AssertionError):
        assert_readouts(llm)


def test_readouts_change_no_token(llm: Any) -> None:
    """Catches a readout that edits the stream."""
    plain = params(8, logprobs=None)
    read = params(8, logprobs=None, readouts=readouts(1))
    assert [tokens_of(o) for o in run(llm, PROMPTS, [plain] * 6)] == [
        tokens_of(o) for o in run(llm, PROMPTS, [read] * 6)
    ]


def test_cached_prompt_is_read_again(llm: Any) -> None:
    """Catches readouts that lack the tokens of a prefix-cache hit."""
    long = prompt(*(1 + i % 100 for i in range(70)))
    wanted = params(2, logprobs=None, readouts={"p": {**readouts(0)["probe"], "positions": "all"}})
    first, again = (run(llm, [long], [wanted])[0].outputs[0].readouts["p"] for _ in range(2))
    assert again.positions.tolist() == list(range(71))
    np.testing.assert_allclose(again.values, first.values, atol=2e-3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"probe": [1.0] * HIDDEN, "point": "post_block", "layer": 9}, "readouts.p.layer"),
        ({"probe": [1.0] * 3, "point": "post_block", "layer": 1}, "readouts.p"),
        ({"probe": [1.0] * HIDDEN, "point": "mlp_out", "layer": 1}, "readouts.p"),
        ({"probe": "nothing/here", "point": "post_block", "layer": 1}, "readouts.p.probe"),
        ({"projections": np.ones((40, HIDDEN)), "point": "post_block", "layer": 1}, "readouts"),
    ],
)
def test_refused(llm: Any, fields: dict[str, Any], field: str) -> None:
    """Catches a readout that the engine cannot compute."""
    with pytest.raises(SteeringError) as refused:
        run(llm, PROMPTS[:1], [params(2, readouts={"p": fields})])
    assert refused.value.field == field


def test_probe_of_a_module(llm: Any) -> None:
    """Catches a named probe with other weights."""
    llm.steering.register("safety", probes={"refusal": PROBE.tolist()})
    by_value = readouts(0)["probe"]
    found = run(llm, PROMPTS[:1], [params(4, readouts={"a": by_value, "b": {**by_value, "probe": "safety/refusal"}})])
    values = found[0].outputs[0].readouts
    np.testing.assert_array_equal(values["a"].values, values["b"].values)
    llm.steering.delete("safety")
