# SPDX-License-Identifier: Apache-2.0
"""Requests with readouts, gates and stops, and their comparison with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.record_reference import Expected, Reference
from tests.tiny import direction
from vllm_steer import Edit

GENERATED = 14
PROMPTS = [np.random.default_rng(i).integers(1, 120, 7 + 9 * i).tolist() for i in range(6)]
READOUTS: dict[str, Any] = {
    "early": {"probe": direction(1, 0.05), "point": "post_block", "layer": 0},
    "late": {"probe": direction(2, 0.05), "bias": 0.1, "sigmoid": True, "point": "post_block", "layer": 2},
}


def add(layer: Any = 2, seed: int = 5, **fields: Any) -> Edit:
    """Return an edit that changes the tokens that the tiny models generate."""
    return Edit(**{"kind": "add", "point": "post_block", "layers": layer, "vector": direction(seed, 1.0), **fields})


def cases(bounds: dict[str, tuple[float, float]]) -> dict[str, dict[str, Any]]:
    """Return edits and stops by name; ``bounds`` has a low and a high bound by readout or fold."""
    early, late = bounds["early"], bounds["late"]
    high = {"readout": "early", "above": early[1]}
    return {
        "token": {"edits": [add(when=high)]},
        "token, below, of the prompt": {"edits": [add(when={"readout": "early", "below": early[0]}, tokens="prompt")]},
        "token, soft": {"edits": [add(when={**high, "sharpness": 2.0})]},
        "token, adjacent site": {"edits": [Edit(
            kind="add", point="pre_attn", layers=1, vector=direction(5, 1.0), when=high)]},
        "previous": {"edits": [add(layer=0, when={"readout": "late", "above": late[1], "window": "previous"})]},
        "previous, soft": {"edits": [
            add(layer="all", strength=0.3, when={"readout": "late", "above": late[1], "window": "previous",
                                                 "sharpness": 9.0})]},
        **{f"previous, {name}": {"edits": [
            add(layer=0, when={"readout": "late", "above": bound, "window": "previous", **fold})]}
           for name, bound, fold in (
               ("mean", bounds["running"][0], {"over": "mean"}),
               ("max", late[1], {"over": "max"}),
               ("ema", bounds["running"][1], {"over": "ema", "alpha": 0.6}),
               ("in a row", late[0], {"tokens": 2}))},
        "latch": {"edits": [add(layer=1, when={"readout": "late", "above": late[1], "window": "latch"})]},
        "latch, release": {"edits": [
            add(layer=1, when={"readout": "late", "above": late[1], "window": "latch",
                               "release": {"below": late[0]}})]},
        **{f"prompt, {over}": {"edits": [
            add(layer=1, when={"readout": "early", "above": bounds[over][0], "window": "prompt", "over": over})]}
           for over in ("mean", "max", "last")},
        "prompt, range": {"edits": [
            add(layer=1, when={"readout": "early", "above": bounds["range"][0], "window": "prompt",
                               "positions": [[2, 5]]})]},
        "several": {"edits": [
            add(when=[high, {"readout": "late", "below": late[1], "window": "previous"}]),
            add(layer=3, seed=8, kind="ablate", when={"readout": "late", "above": late[0]}),
            add(layer=3, seed=9, strength=0.5),
            add(layer=1, seed=7, when={"readout": "late", "above": late[0], "window": "latch"}),
        ]},
        "stop": {"stops": [{"readout": "early", "above": early[1]}]},
        "stop, two in a row": {"stops": [{"readout": "early", "above": (early[0] + early[1]) / 2, "tokens": 2}]},
        "stop, gated": {
            "edits": [add(when=high)],
            "stops": [{"readout": "late", "above": 2.0}, {"readout": "late", "below": late[0]}],
        },
    }  # fmt: skip


def bounds_of(reference: Reference, texts: Sequence[list[int]] = PROMPTS) -> dict[str, tuple[float, float]]:
    """Return bounds that about a third of the tokens exceed, in the widest gaps between scores."""
    runs = [reference.run(tokens, GENERATED, READOUTS) for tokens in texts]
    found = {
        name: (_gap(values, 0.35), _gap(values, 0.65))
        for name in READOUTS
        for values in (np.sort(np.concatenate([each.scores[name] for each in runs])),)
    }
    runs_of_late = [each.scores["late"][len(tokens) - 1 :] for each, tokens in zip(runs, texts, strict=True)]
    means = np.sort(np.concatenate([np.cumsum(each) / np.arange(1, len(each) + 1) for each in runs_of_late]))
    averages = np.sort(np.concatenate([[_ema(each[: n + 1], 0.6) for n in range(len(each))] for each in runs_of_late]))
    found["running"] = (_gap(means, 0.5), _gap(averages, 0.5))
    prompts = [each.scores["early"][: len(tokens)] for each, tokens in zip(runs, texts, strict=True)]
    for over, fold in FOLDS.items():
        # Half of the prompts exceed it.
        low, high = np.sort([fold(values) for values in prompts])[len(texts) // 2 - 1 :][:2]
        found[over] = (float(low + high) / 2,) * 2
    return found


FOLDS: dict[str, Any] = {
    "mean": np.mean, "max": np.max, "last": lambda values: values[-1], "range": lambda values: np.mean(values[2:5]),
}  # fmt: skip


def _ema(values: Any, alpha: float) -> float:
    average = values[0]
    for value in values[1:]:
        average = (1 - alpha) * average + alpha * value
    return float(average)


def _gap(values: np.ndarray, quantile: float) -> float:
    """Return the middle of the widest gap near a quantile of sorted values."""
    start = int(len(values) * quantile) - 4
    gaps = np.diff(values[start : start + 9])
    place = start + int(gaps.argmax())
    return float((values[place] + values[place + 1]) / 2)


def request(
    case: dict[str, Any], *, positions: Any = "all", readouts: Any = None, generated: int = GENERATED, **fields: Any
) -> Any:
    readouts = {name: {**each, "positions": positions} for name, each in (readouts or READOUTS).items()}
    return params(
        generated, logprobs=None, readouts=readouts, steering=case.get("edits"), stop_on=case.get("stops"), **fields
    )  # fmt: skip


def check(output: Any, expected: Expected, prompt_len: int, name: str = "") -> None:
    """Compare an output with the reference."""
    assert tokens_of(output) == expected.tokens, name
    first = output.outputs[0]
    forwarded = prompt_len + len(expected.tokens) - (expected.stop is None)
    for readout, values in expected.scores.items():
        assert first.readouts[readout].positions.tolist() == list(range(forwarded)), (name, readout)
        np.testing.assert_allclose(first.readouts[readout].values, values[:forwarded], atol=5e-3, err_msg=name)
    if expected.factors.size:
        trace = first.steering_trace
        assert trace.positions.tolist() == list(range(prompt_len, forwarded)), name
        np.testing.assert_allclose(trace.gates, expected.factors[prompt_len:forwarded], atol=2e-2, err_msg=name)
    if expected.stop is not None:
        assert first.finish_reason == "stop"
        assert first.stop_reason.startswith(f"readout {expected.stop[0]} is ")
        assert first.stop_reason.endswith(f"at position {expected.stop[1]}")


def expect(
    reference: Reference,
    made: dict[str, dict[str, Any]],
    texts: Sequence[list[int]] = PROMPTS,
    readouts: Any = None,
    generated: int = GENERATED,
    **fields: Any,
) -> dict[tuple[str, int], Expected]:
    """Return what the reference does with each case and prompt."""
    read = readouts or READOUTS
    return {
        (name, number): reference.run(tokens, generated, read, case.get("edits", ()), case.get("stops", ()), **fields)
        for name, case in made.items()
        for number, tokens in enumerate(texts)
    }


def check_all(
    outputs: dict[tuple[str, int], Any],
    expected: dict[tuple[str, int], Expected],
    texts: Sequence[list[int]] = PROMPTS,
) -> None:
    """Compare the outputs of :func:`run_all` with those of :func:`expect`."""
    for (name, number), output in outputs.items():
        check(output, expected[name, number], len(texts[number]), f"{name}, prompt {number}")


def run_all(
    llm: Any, made: dict[str, dict[str, Any]], texts: Sequence[list[int]] = PROMPTS, **fields: Any
) -> dict[tuple[str, int], Any]:
    """Run every case with every prompt in one batch and return the outputs."""
    keys = [(name, number) for name in made for number in range(len(texts))]
    prompts = [prompt(*texts[number]) for _, number in keys]
    return dict(zip(keys, run(llm, prompts, [request(made[name], **fields) for name, _ in keys]), strict=True))


def reacting(bound: float = 0.5) -> dict[str, Any]:
    """Return fields of a request whose gates, latch and stop depend on the text that it generates."""
    late = {"readout": "late", "above": bound}
    return {
        "readouts": {name: {**each, "positions": "all"} for name, each in READOUTS.items()},
        "steering": [
            add(layer=3, when={"readout": "early", "above": 0.0}),
            add(layer=0, seed=6, when={**late, "window": "previous"}),
            add(layer=1, seed=7, strength=0.5, when={**late, "window": "latch", "release": {"below": 0.4}}),
        ],
        "stop_on": [{**late, "tokens": 6}],
    }


def check_consistent(sample: Any, prompt_len: int, bound: float = 0.5) -> None:
    """Compare the trace and the end of a sample of :func:`reacting` with the readouts that it returns."""
    early, late = (sample.readouts[name].values for name in ("early", "late"))
    trace = sample.steering_trace
    latched, run = 0.0, 0
    for place, position in enumerate(trace.positions.tolist()):
        before = late[position - 1]
        latched = 1.0 if before > bound else 0.0 if before < 0.4 else latched
        assert trace.gates[place].tolist() == [early[position] > 0, before > bound, latched], position
        assert run < 6, "generation went on behind a stop"
        run = run + 1 if late[position] > bound else 0
    assert trace.positions.tolist() == list(range(prompt_len, prompt_len + len(trace.positions)))
    assert (run == 6) == (sample.finish_reason == "stop")
    assert len(trace.positions) == len(sample.token_ids) - (run < 6)
