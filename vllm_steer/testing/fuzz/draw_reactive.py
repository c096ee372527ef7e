# SPDX-License-Identifier: Apache-2.0
"""Draw edits that react to probes, stops, live strengths, edits of features and edits in parts of the output."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_steer.points import POINT_NAMES
from vllm_steer.request.probe import ACTIVATIONS
from vllm_steer.testing.fuzz.workload import NUM_FEATURES, SAE, Form, ModelFacts, Random, draw_edit, draw_layers, pick

WINDOWS: tuple[dict[str, Any], ...] = (
    {"window": "token"},
    {"window": "token", "sharpness": 1.0},
    {"window": "previous"},
    {"window": "previous", "sharpness": 2.0},
    {"window": "previous", "over": "max"},
    {"window": "previous", "over": "mean", "sharpness": 2.0},
    {"window": "previous", "over": "ema", "alpha": 0.4, "sharpness": 2.0},
    {"window": "previous", "tokens": 2},
    {"window": "latch"},
    {"window": "latch", "release": 0.0},
    {"window": "prompt", "over": "max"},
    {"window": "prompt", "over": "last"},
    {"window": "prompt", "over": "mean", "sharpness": 2.0},
    {"window": "prompt", "over": "mean", "sharpness": 2.0, "positions": [[1, 4]]},
)
"""Hard conditions compare single scores, so that a tie is visible in the scores; averages are soft."""
BOUNDED = ("tanh",)
"""Activations of probes whose values do not grow with the rows."""
NUM_UNITS = 6
"""Hidden units of a probe with a hidden layer."""
TOKENS: tuple[Any, ...] = ("all", "prompt", "generated", [[-2, None]], [[3, 40]])


def draw_part(rng: Random, facts: ModelFacts) -> dict[str, Any]:
    """Return a selector of a part of the output, between two tokens or outside of them.

    Random prompts have most tokens of a small vocabulary. A logit bias would make the tokens more frequent in the
    output, but log-probabilities do not contain it, so that ties could not be told from wrong tokens.
    """
    start, end = rng.choice(np.arange(1, facts.vocab), 2, replace=False).tolist()
    opened = {"opened": True} if rng.random() < 0.3 else {}
    return {"between" if rng.random() < 0.6 else "outside": [int(start), int(end)], **opened}


def draw_reactive(rng: Random, facts: ModelFacts) -> dict[str, Any]:
    """Return readouts, edits and stops to add to a request, mostly none."""
    drawn: dict[str, Any] = {"readouts": {}, "edits": [], "stops": []}
    if facts.layers > 1 and rng.random() < 0.3:
        for number in range(int(rng.integers(1, 3))):
            name, readout = f"p{number}", _draw_probe(rng, facts)
            edits = [_draw_gated_edit(rng, facts, name, readout) for _ in range(int(rng.integers(0, 3)))]
            drawn["edits"] += edits
            # Ties need the scores that conditions use; a prompt whose scores are not returned may be cached.
            prompts = [
                edit for edit in edits if isinstance(edit["tokens"], list) or edit["tokens"] in ("all", "prompt")
            ]
            if not prompts and all(edit["when"][0]["window"] != "prompt" for edit in edits):
                readout["positions"] = [[-1, None]]
            drawn["readouts"][name] = readout
            if rng.random() < 0.4:
                count = int(rng.integers(1, 4))
                stop = _draw_gate(rng, facts, name, readout, {"tokens": count}, 0.7 if count == 1 else 0.2)
                if rng.random() < 0.3:
                    stop["positions"] = draw_part(rng, facts)
                drawn["stops"].append(stop)
    if rng.random() < 0.1:
        edit = draw_edit(rng, facts, "steering", "add", tokens="all")
        drawn["edits"].append({**edit, "live": float(rng.uniform(-1, 1))})
    if rng.random() < 0.1:
        drawn["edits"].append(_draw_feature_edit(rng, facts))
    if rng.random() < 0.08:
        drawn["edits"].append(draw_edit(rng, facts, "steering", "add", tokens=draw_part(rng, facts)))
    return drawn


def probe_form(form: str, seed: int) -> Form:
    """Return the fields of a probe: plain, with ``sigmoid`` or ``cosine``, or with a hidden layer of an activation."""
    weights = {"seed": seed, "length": 1.0}
    if form not in ACTIVATIONS:
        return {"probe": weights, **({form: True} if form else {})}
    outputs = {"seed": seed, "length": NUM_UNITS**0.5, "width": NUM_UNITS}
    biases = {"seed": seed + 1, "length": 0.1 * NUM_UNITS**0.5, "width": NUM_UNITS}
    layer = {"weights": {**weights, "rows": NUM_UNITS}, "outputs": outputs, "biases": biases, "activation": form}
    return {"probe": layer}


def activation_of(readout: Form) -> str | None:
    """Return the activation of a probe with a hidden layer; None for other probes."""
    activation: str | None = readout["probe"].get("activation")
    return activation


def _draw_probe(rng: Random, facts: ModelFacts) -> Form:
    # The last layer has no edits behind it.
    layer = int(rng.integers(facts.layers - 1))
    form = str(rng.choice(["", "", "cosine", *ACTIVATIONS]))
    return {**probe_form(form, int(rng.integers(1 << 30))), "point": "post_block", "layer": layer, "positions": "all"}


def _spread(facts: ModelFacts, readout: Form) -> float:
    """Return the typical size of a readout's values."""
    if "cosine" in readout:
        return float(facts.hidden**-0.5)
    # Outputs have norm sqrt(NUM_UNITS), and about half of the units are active.
    place = len(POINT_NAMES) * readout["layer"] + POINT_NAMES.index("post_block")
    return 1.0 if activation_of(readout) in BOUNDED else float(facts.scale[place] * facts.hidden**-0.5)


def _draw_gate(
    rng: Random, facts: ModelFacts, name: str, readout: Form, window: dict[str, Any], shift: float = 0.0
) -> Form:
    spread = _spread(facts, readout)
    above = bool(rng.random() < 0.6)
    sign = 1 if above else -1
    direction, other = ("above", "below") if above else ("below", "above")
    given = dict(window)
    bound = spread * sign * (shift + float(rng.normal()) * 0.4)
    if "sharpness" in given:
        given["sharpness"] /= spread
    if "release" in given:
        given["release"] = {other: bound - sign * spread * float(rng.uniform(0.2, 0.8))}
    return {"readout": name, direction: bound, **given}


def _draw_gated_edit(rng: Random, facts: ModelFacts, name: str, readout: Form) -> Form:
    window = pick(rng, WINDOWS)
    while activation_of(readout) and window["window"] == "token":
        # Its value comes after the forward pass.
        window = pick(rng, WINDOWS)
    in_parts = window["window"] in ("previous", "latch") and window.get("over") != "mean"
    if in_parts and rng.random() < 0.3:
        window = {**window, "positions": draw_part(rng, facts)}
    kind = str(rng.choice(["add", "add", "add_normed", "ablate"]))
    tokens = pick(rng, TOKENS) if window["window"] == "token" else "generated"
    if tokens == "generated" and rng.random() < 0.25:
        tokens = draw_part(rng, facts)
    edit = draw_edit(rng, facts, "steering", kind, tokens=tokens)
    if window["window"] == "token":
        edit["layers"] = sorted({int(rng.integers(readout["layer"] + 1, facts.layers)) for _ in range(2)})
    return {**edit, "when": [_draw_gate(rng, facts, name, readout, window)]}


def _draw_feature_edit(rng: Random, facts: ModelFacts) -> Form:
    layers = draw_layers(rng, facts, 2)
    point = str(rng.choice([each for each in ("pre_attn", "post_attn", "post_block") if each in facts.points]))
    scale = facts.scale[len(POINT_NAMES) * layers[0] + POINT_NAMES.index(point)]
    change: dict[str, Any] = {"set" if rng.random() < 0.5 else "add": scale * float(rng.uniform(-0.5, 1.0))}
    tokens = str(rng.choice(["all", "generated"]))
    return {
        "field": "steering", "kind": "feature", "point": point, "layers": layers, "tokens": tokens, "sae": SAE,
        "feature": int(rng.integers(NUM_FEATURES)), **change,
    }  # fmt: skip
