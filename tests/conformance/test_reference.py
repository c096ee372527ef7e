# SPDX-License-Identifier: Apache-2.0
"""The HF reference: its streams are the model's, and each point satisfies its identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.conformance.edits import POINTS, Formula, Vector, positions
from tests.conformance.hf_reference import Array, Intervention, Trace
from tests.conformance.model import HIDDEN, LAYERS, TinyModel
from tests.conformance.parity import MIN_EFFECT, TOLERANCE
from tests.conformance.reference_process import ReferenceProcess
from tests.conformance.selection import PARITY

TOKENS = (5, 9, 17, 33, 60, 2, 11, 90, 41, 7, 28, 66)
LAYER = 1
MIDDLE = tuple(range(4, 9))
ONE_STREAM = [tiny for tiny in PARITY if tiny.recipe != "ALTUP"]
"""Rows whose block passes on one stream, which the next block reads and HF returns."""
SEQUENTIAL = [tiny for tiny in PARITY if tiny.reads_mid is not None]
IN_PARALLEL = [tiny for tiny in PARITY if tiny.recipe == "PARALLEL"]


@dataclass(frozen=True)
class Subject:
    """One row's ``Reference`` in the reference process."""

    tiny: TinyModel
    process: ReferenceProcess

    def run(self, *edits: Intervention) -> Trace:
        trace: Trace = self.process.call(self.tiny.name, "run", TOKENS, edits)
        return trace

    def hidden_states(self) -> list[Array]:
        states: list[Array] = self.process.call(self.tiny.name, "hidden_states", TOKENS)
        return states

    def watch(self, module: str, *edits: Intervention) -> tuple[Array, Array]:
        given, returned = self.process.call(self.tiny.name, "watch", LAYER, module, TOKENS, edits)
        return given, returned

    def push(self, point: str, layer: int) -> Trace:
        """Run with a random vector, as long as the stream, added at one site."""
        stream = self.run().x_mid[LAYER]
        vector = np.random.default_rng(3).standard_normal(HIDDEN).astype(np.float32)
        vector *= np.linalg.norm(stream, axis=-1).mean() / np.linalg.norm(vector)
        return self.run(Intervention(point, layer, MIDDLE, Formula("add", vector)))


def over(rows: Sequence[TinyModel]) -> pytest.MarkDecorator:
    """Run a test on each of these rows."""
    return pytest.mark.parametrize("subject", rows, ids=str, indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest, reference_process: ReferenceProcess) -> Subject:
    return Subject(request.param, reference_process)


def _distance(one: Trace, other: Trace) -> float:
    return float(np.abs(one.logprobs - other.logprobs).max())


@over(ONE_STREAM)
def test_block_input_is_the_previous_output(subject: Subject) -> None:
    """Catches a block output that is not the stream, such as the wrong element of a tuple."""
    trace = subject.run()
    np.testing.assert_array_equal(trace.x_out[:-1], trace.x_in[1:])
    assert np.abs(trace.x_out - trace.x_in).max() > 0.1


@over(ONE_STREAM)
def test_streams_are_the_hidden_states_of_transformers(subject: Subject) -> None:
    """Catches streams off by one layer."""
    trace, returned = subject.run(), subject.hidden_states()
    # HF's Mamba records the stream after each block, all others before it.
    streams = trace.x_out if subject.tiny.blocks == "backbone.layers" else trace.x_in
    for layer in range(LAYERS):
        np.testing.assert_array_equal(streams[layer], returned[layer])


@over(SEQUENTIAL)
def test_input_of_the_second_norm_is_x_mid(subject: Subject) -> None:
    """Catches a branch taken before its post-norm or its multiplier, by an independent read of the edited x_mid."""
    edit = Intervention("post_attn", LAYER, MIDDLE, Formula("add", np.full(HIDDEN, 2.0, np.float32)))
    given, _ = subject.watch(subject.tiny.reads_mid or "", edit)
    np.testing.assert_allclose(given, subject.run(edit).x_mid[LAYER], atol=1e-5)
    assert np.abs(given - subject.run().x_mid[LAYER])[list(MIDDLE)].min() > 1.0


@over(IN_PARALLEL)
def test_parallel_block_sums_input_attention_and_mlp(subject: Subject) -> None:
    """Catches a wrong x_mid in blocks where no module reads it."""
    trace = subject.run()
    _, mlp = subject.watch("mlp")
    np.testing.assert_allclose(trace.x_mid[LAYER] + mlp, trace.x_out[LAYER], atol=1e-5)


@over(ONE_STREAM)
def test_post_block_equals_the_next_pre_attn(subject: Subject) -> None:
    """Catches an output edit that the next block does not read, and an input edit that misses the residual."""
    assert _distance(subject.push("post_block", LAYER), subject.push("pre_attn", LAYER + 1)) == 0.0


@over(PARITY)
def test_same_edit_at_different_points_differs(subject: Subject) -> None:
    """Catches weights with which an edit one sublayer too late looks like one in time."""
    stream_points = [point for point in POINTS if point not in subject.tiny.refused]
    if subject.tiny.one_branch:
        # Its post_attn is its pre_attn or its post_block.
        stream_points.remove("post_attn")
    runs = [subject.push(point, LAYER) for point in stream_points] + [subject.run()]
    for index, one in enumerate(runs):
        for other in runs[:index]:
            assert _distance(one, other) > MIN_EFFECT


@over(PARITY)
def test_edits_change_no_earlier_position(subject: Subject) -> None:
    """Catches edits of the wrong rows."""
    for point in ("pre_attn", "post_block"):
        change = np.abs(subject.push(point, LAYER).logprobs - subject.run().logprobs).max(-1)
        assert change[: MIDDLE[0]].max() < TOLERANCE
        assert change[list(MIDDLE)].min() > MIN_EFFECT


@over(IN_PARALLEL)
def test_refuses_post_attn_edits_of_parallel_blocks(subject: Subject) -> None:
    """Catches a reference that accepts an edit that no engine can make."""
    with pytest.raises(ValueError, match="post_attn"):
        subject.push("post_attn", LAYER)


def _vector(numbers: list[int]) -> Vector:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (Formula("add", _vector([3, 4]), 2.0), [[7.0, 10.0], [6.0, 3.0]]),
        (Formula("add_normed", _vector([0, 5]), 2.0), [[1.0, 2.0 + 2 * 5**0.5], [0.0, 5.0]]),
        (Formula("ablate", _vector([0, 5])), [[1.0, 0.0], [0.0, 0.0]]),
        (Formula("ablate", _vector([0, 5]), 0.5), [[1.0, 1.0], [0.0, -2.5]]),
        (Formula("clamp", _vector([0, 5]), 1.0, -1.0, 1.0), [[1.0, 1.0], [0.0, -1.0]]),
        (Formula("clamp", _vector([0, 5]), 1.0, None, 1.0), [[1.0, 1.0], [0.0, -5.0]]),
        (Formula("clamp", _vector([0, 5]), 0.5, 3.0, None), [[1.0, 2.5], [0.0, -1.0]]),
    ],
)
def test_formulas(formula: Formula, expected: list[list[float]]) -> None:
    """Catches a formula that is not the published one (strength inside the clamp, a vector not of unit length)."""
    rows = torch.tensor([[1.0, 2.0], [0.0, -5.0]])
    np.testing.assert_allclose(formula(rows).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("prompt", [0, 1, 2, 3]),
        ("generated", [4, 5]),
        ("last_prompt", [3]),
        ([0, -1], [0, 3]),
        ([(1, 3), 5], [1, 2, 5]),
        ([(2, None)], [2, 3, 4, 5]),
        ([(3, 99)], [3, 4, 5]),
        ([(-3, -1)], [1, 2]),
        ([(-2, 5)], [2, 3, 4]),
    ],
)
def test_selectors(tokens: object, expected: list[int]) -> None:
    """Catches positions counted from the wrong end."""
    assert positions(tokens, 4, 6) == expected  # type: ignore[arg-type]
