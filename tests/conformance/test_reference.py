# SPDX-License-Identifier: Apache-2.0
"""The HF reference itself: its streams are the model's, and each point is where the identities say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.conformance.edits import Formula, positions
from tests.conformance.hf_reference import Intervention, Reference, Trace
from tests.conformance.parity import MIN_EFFECT, TOLERANCE
from tests.conformance.zoo import HIDDEN, LAYERS, ZOO, TinyModel, build

TOKENS = (5, 9, 17, 33, 60, 2, 11, 90, 41, 7, 28, 66)
LAYER = 1
MIDDLE = tuple(range(4, 9))
REFERENCES: dict[str, Reference] = {}


SEQUENTIAL = [tiny for tiny in ZOO if tiny.reads_mid is not None]
IN_PARALLEL = [tiny for tiny in ZOO if tiny.reads_mid is None]


def over(rows: Sequence[TinyModel]) -> pytest.MarkDecorator:
    """Run a test with the reference of each of these rows."""
    return pytest.mark.parametrize("reference", rows, ids=str, indirect=True)


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Models this small only get slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Reference:
    tiny: TinyModel = request.param
    if tiny.name not in REFERENCES:
        REFERENCES[tiny.name] = Reference(tiny, build(tiny))
    return REFERENCES[tiny.name]


def _far(one: Trace, other: Trace) -> float:
    return float(np.abs(one.logprobs - other.logprobs).max())


def _push(reference: Reference, point: str, layer: int, where: tuple[int, ...] = MIDDLE) -> Trace:
    """A run with a random vector, as long as the stream, added at one place."""
    stream = reference.run(TOKENS).x_mid[LAYER]
    vector = np.random.default_rng(3).standard_normal(HIDDEN).astype(np.float32)
    vector *= np.linalg.norm(stream, axis=-1).mean() / np.linalg.norm(vector)
    return reference.run(TOKENS, [Intervention(point, layer, where, Formula("add", vector))])


def _input_of(module: torch.nn.Module, run: Callable[[], object]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).clone()), with_kwargs=True
    )
    run()
    handle.remove()
    return seen[0].reshape(len(TOKENS), -1)


@over(ZOO)
def test_each_block_starts_from_the_stream_that_the_one_before_it_left(reference: Reference) -> None:
    """Catches a block output that is not the stream, as where a tuple holds something else first."""
    trace = reference.run(TOKENS)
    np.testing.assert_array_equal(trace.x_out[:-1], trace.x_in[1:])
    assert np.abs(trace.x_out - trace.x_in).max() > 0.1


@over(ZOO)
def test_the_streams_are_the_hidden_states_that_hf_itself_returns(reference: Reference) -> None:
    """Catches streams off by one layer."""
    trace = reference.run(TOKENS)
    with torch.no_grad():
        returned = reference.model(torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True).hidden_states
    for layer in range(LAYERS):
        np.testing.assert_array_equal(trace.x_in[layer], returned[layer][0].numpy())


@over(SEQUENTIAL)
def test_what_reads_the_stream_after_attention_is_given_that_stream(reference: Reference) -> None:
    """Catches a branch taken before its post-norm or its multiplier: an independent look at x_mid, edited."""
    reads_mid = reference.tiny.reads_mid or ""
    edit = Intervention("post_attn", LAYER, MIDDLE, Formula("add", np.full(HIDDEN, 2.0, np.float32)))
    trace = reference.run(TOKENS, [edit])
    seen = _input_of(reference.blocks[LAYER].get_submodule(reads_mid), lambda: reference.run(TOKENS, [edit]))
    np.testing.assert_allclose(seen.numpy(), trace.x_mid[LAYER], atol=1e-5)


@over(IN_PARALLEL)
def test_a_parallel_block_leaves_input_plus_attention_plus_mlp(reference: Reference) -> None:
    """Catches a wrong x_mid where no module reads it."""
    added: list[torch.Tensor] = []
    mlp = reference.blocks[LAYER].get_submodule("mlp")
    handle = mlp.register_forward_hook(lambda _, args, output: added.append(output[0].clone()))
    trace = reference.run(TOKENS)
    handle.remove()
    np.testing.assert_allclose(trace.x_mid[LAYER] + added[0].numpy(), trace.x_out[LAYER], atol=1e-5)


@over(ZOO)
def test_post_block_and_the_next_pre_attn_are_one_place(reference: Reference) -> None:
    """Catches an output edit that the next block does not see, or an input edit that misses the residual."""
    assert _far(_push(reference, "post_block", LAYER), _push(reference, "pre_attn", LAYER + 1)) == 0.0


@over(ZOO)
def test_one_edit_at_different_points_gives_plainly_different_answers(reference: Reference) -> None:
    """Catches weights under which an edit made one sublayer too late would pass for one made in time."""
    served = [point for point in ("pre_attn", "post_attn", "post_block") if point not in reference.tiny.refused]
    runs = [_push(reference, point, LAYER) for point in served] + [reference.run(TOKENS)]
    for index, one in enumerate(runs):
        for other in runs[:index]:
            assert _far(one, other) > MIN_EFFECT


@over(ZOO)
def test_an_edit_leaves_earlier_positions_alone_and_reaches_its_own(reference: Reference) -> None:
    """Catches edits of the wrong rows."""
    for point in ("pre_attn", "post_block"):
        change = np.abs(_push(reference, point, LAYER).logprobs - reference.run(TOKENS).logprobs).max(-1)
        assert change[: MIDDLE[0]].max() < TOLERANCE
        assert change[list(MIDDLE)].min() > MIN_EFFECT


@over(IN_PARALLEL)
def test_an_edit_between_attention_and_mlp_of_a_parallel_block_is_an_error(reference: Reference) -> None:
    """Catches a reference that would take what no engine can do."""
    with pytest.raises(ValueError, match="post_attn"):
        _push(reference, "post_attn", LAYER)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (Formula("add", np.float32([3, 4]), 2.0), [[7.0, 10.0], [6.0, 3.0]]),
        (Formula("add_normed", np.float32([0, 5]), 2.0), [[1.0, 2.0 + 2 * 5**0.5], [0.0, 5.0]]),
        (Formula("ablate", np.float32([0, 5])), [[1.0, 0.0], [0.0, 0.0]]),
        (Formula("ablate", np.float32([0, 5]), 0.5), [[1.0, 1.0], [0.0, -2.5]]),
        (Formula("clamp", np.float32([0, 5]), 1.0, -1.0, 1.0), [[1.0, 1.0], [0.0, -1.0]]),
        (Formula("clamp", np.float32([0, 5]), 1.0, None, 1.0), [[1.0, 1.0], [0.0, -5.0]]),
        (Formula("clamp", np.float32([0, 5]), 0.5, 3.0, None), [[1.0, 2.5], [0.0, -1.0]]),
    ],
)
def test_formulas_by_hand(formula: Formula, expected: list[list[float]]) -> None:
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
    ],
)
def test_selectors_by_hand(tokens: object, expected: list[int]) -> None:
    """Catches positions counted from the wrong end."""
    assert positions(tokens, 4, 6) == expected  # type: ignore[arg-type]
