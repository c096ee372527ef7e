# SPDX-License-Identifier: Apache-2.0
"""Edits that replace rows, against forward hooks in HF Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.answers import logprobs_of, params, prompt, run, tokens_of
from tests.engine.conftest import opened
from tests.engine.hf import load
from tests.tiny import HIDDEN, LAYERS
from vllm_steer import Edit, SteeringError
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES

LONG = 90
"""More positions than the engine has segments for one request."""
CLEAN = [int(t) for t in np.random.default_rng(1).integers(3, 120, LONG)]
CORRUPT = [int(t) for t in np.random.default_rng(2).integers(3, 120, LONG)]
TOLERANCE = 1e-4
Rows = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    with opened(
        tiny_llama, steering_config={"points": list(OPTIONAL_POINTS)}, max_num_batched_tokens=64, max_num_seqs=32,
        block_size=32, enable_prefix_caching=True,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load(tiny_llama)


def hooked(model: Any, point: str, layer: int, change: Rows) -> list[Any]:
    """Register hooks that apply ``change`` to the rows ``[tokens, hidden]`` of a point of a Llama block."""
    block = model.model.layers[layer]
    first: dict[str, torch.Tensor] = {}

    def of_output(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0][0])[None], *output[1:])
        return change(output[0])[None]

    def of_branch(module: Any, args: Any, output: Any) -> Any:
        branch = output[0] if isinstance(output, tuple) else output
        stream = first["stream"] + branch[0]
        changed = (branch[0] + (change(stream) - stream))[None]
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def keep_input(module: Any, args: Any, kwargs: Any) -> None:
        first["stream"] = (args[0] if args else kwargs["hidden_states"])[0]

    def of_input(module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0][0])[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"][0])[None]}

    match point:
        case "pre_attn":
            return [block.register_forward_pre_hook(of_input, with_kwargs=True)]
        case "post_attn":
            return [
                block.register_forward_pre_hook(keep_input, with_kwargs=True),
                block.self_attn.register_forward_hook(of_branch),
            ]
        case "post_block":
            return [block.register_forward_hook(of_output)]
        case "attn_out":
            return [block.self_attn.register_forward_hook(of_output)]
        case "mlp_in":
            return [block.mlp.register_forward_pre_hook(of_input, with_kwargs=True)]
        case _:
            return [block.mlp.register_forward_hook(of_output)]


def expected(model: Any, output: Any, hooks: list[tuple[str, int, Rows]]) -> np.ndarray:
    """Return HF's log-probabilities of an output's generated tokens with ``hooks``."""
    tokens = [*output.prompt_token_ids, *tokens_of(output)[:-1]]
    handles = [handle for hook in hooks for handle in hooked(model, *hook)]
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    logprobs: np.ndarray = logits.log_softmax(-1).numpy()[len(output.prompt_token_ids) - 1 :]
    return logprobs


def put(positions: list[int], rows: np.ndarray, strength: float = 1.0, basis: np.ndarray | None = None) -> Rows:
    """Return the published formula: ``x + s P (r - x)``, with P the projection on ``basis``, at some positions."""

    def change(stream: torch.Tensor) -> torch.Tensor:
        changed = stream.clone()
        away = torch.from_numpy(np.array(rows)) - stream[positions]
        if basis is not None:
            q = torch.linalg.qr(torch.from_numpy(basis).double().T)[0]
            away = ((away.double() @ q) @ q.T).float()
        changed[positions] = stream[positions] + strength * away
        return changed

    return change


@pytest.fixture(scope="module")
def clean(llm: Any) -> Any:
    """Return the captured rows of the clean prompt at every site."""
    spec = {"hooks": dict.fromkeys(POINT_NAMES, "all"), "positions": "all_prompt"}
    (output,) = run(llm, [prompt(*CLEAN)], [params(1, capture={"memory": spec})])
    return output.capture_results["memory"]


def rows_at(clean: Any, point: str, layer: int) -> np.ndarray:
    rows: np.ndarray = clean.numpy(point, layer)
    return rows


def test_replaced_rows_act_as_in_transformers(llm: Any, model: Any, clean: Any) -> None:
    """Catches a row of another position, a matrix at the wrong site, and a change of the wrong summand.

    Covers each point with one row, a matrix of spans, positions that need more segments than the engine has, and the
    whole prompt, with and without interpolation, in one batch that is prefilled in chunks.
    """
    spread = list(range(1, LONG - 3, 2))
    spans = [[4, 9], [40, 43], -2, -1]
    span_positions = [*range(4, 9), *range(40, 43), LONG - 2, LONG - 1]
    cases: list[tuple[list[Edit], list[tuple[str, int, Rows]]]] = []
    for point in POINT_NAMES:
        rows = rows_at(clean, point, 1)
        cases += [
            (
                [Edit(kind="replace", point=point, layers=1, vector=rows[7], tokens=[7])],
                [(point, 1, put([7], rows[7]))],
            ),
            (
                [Edit(kind="replace", point=point, layers=1, vector=rows[span_positions], tokens=spans, strength=0.3)],
                [(point, 1, put(span_positions, rows[span_positions], 0.3))],
            ),
            (
                [Edit(kind="replace", point=point, layers=1, vector=rows[spread], tokens=spread, strength=0.8)],
                [(point, 1, put(spread, rows[spread], 0.8))],
            ),
        ]
    whole = rows_at(clean, "mlp_out", 2)
    cases.append(
        (
            [Edit(kind="replace", point="mlp_out", layers=2, vector=whole, tokens="prompt")],
            [("mlp_out", 2, put(list(range(LONG)), whole))],
        )
    )
    outputs = run(llm, [prompt(*CORRUPT)] * len(cases), [params(3, steering=edits) for edits, _ in cases])
    plain = expected(model, outputs[0], [])
    for (edits, hooks), output in zip(cases, outputs, strict=True):
        right = expected(model, output, hooks)
        assert np.abs(logprobs_of(output) - right).max() < TOLERANCE, edits
        assert np.abs(right - plain)[0].max() > 10 * TOLERANCE, edits


def test_a_row_one_position_off_is_seen(llm: Any, model: Any, clean: Any) -> None:
    """Negative control: the rows of neighbouring positions are outside of the tolerance of the comparison."""
    rows = rows_at(clean, "post_block", 1)
    wrong = Edit(kind="replace", point="post_block", layers=1, vector=rows[11:41], tokens=[[10, 40]])
    (output,) = run(llm, [prompt(*CORRUPT)], [params(3, steering=[wrong])])
    right = expected(model, output, [("post_block", 1, put(list(range(10, 40)), rows[10:40]))])
    assert np.abs(logprobs_of(output) - right).max() > 10 * TOLERANCE


def test_subspaces_change_only_their_component(llm: Any, model: Any, clean: Any) -> None:
    """Catches a basis that is not orthonormal, the wrong coordinates, and a row that is replaced as a whole."""
    directions = np.random.default_rng(3).standard_normal((5, HIDDEN)).astype("f4")
    directions[1] = directions[0] + 0.3 * directions[1]
    rows = rows_at(clean, "post_block", 1)
    positions = list(range(5, 80))
    spec = {"hooks": {"post_block": [1]}, "positions": "all_prompt"}
    made: list[dict[str, Any]] = [
        {"vector": rows[positions], "tokens": positions, "strength": 0.9},
        {"vector": rows[20], "tokens": "prompt"},
    ]
    edits = [Edit(kind="replace", point="post_block", layers=1, subspace=directions, **each) for each in made]
    outputs = run(llm, [prompt(*CORRUPT)] * 2, [params(3, steering=[each], capture={"memory": spec}) for each in edits])
    hooks = [put(positions, rows[positions], 0.9, directions), put(list(range(LONG)), rows[20], 1.0, directions)]
    for output, change in zip(outputs, hooks, strict=True):
        right = expected(model, output, [("post_block", 1, change)])
        assert np.abs(logprobs_of(output) - right).max() < TOLERANCE
    away = outputs[1].capture_results["memory"].numpy("post_block", 1) - rows[20]
    assert np.abs(away @ np.linalg.qr(directions.T.astype("f8"))[0]).max() < 1e-4 < np.abs(away).max()


def test_edits_apply_in_order(llm: Any, model: Any, clean: Any) -> None:
    """Catches a replacement that runs before, or instead of, the other edits of its site."""
    rows, added = rows_at(clean, "post_block", 1), np.full(HIDDEN, 0.7, "f4")
    tokens = list(range(30, 60))
    put_there = Edit(kind="replace", point="post_block", layers=1, vector=rows[tokens], tokens=tokens)
    add = Edit(kind="add", point="post_block", layers=1, vector=added, tokens=[[50, 70]])
    orders = [[put_there, add], [add, put_there]]
    outputs = run(llm, [prompt(*CORRUPT)] * 2, [params(3, steering=each) for each in orders])

    def adding(stream: torch.Tensor) -> torch.Tensor:
        changed = stream.clone()
        changed[50:70] += torch.from_numpy(added)
        return changed

    changes = [put(tokens, rows[tokens]), adding]
    for output, order in zip(outputs, (changes, changes[::-1]), strict=True):
        right = expected(model, output, [("post_block", 1, lambda x, order=order: order[1](order[0](x)))])
        assert np.abs(logprobs_of(output) - right).max() < TOLERANCE


def test_replaced_rows_are_captured_exactly(llm: Any, clean: Any) -> None:
    """Catches a row that arrives with the rounding of the row that it replaced."""
    rows = np.float32(1e-3) * rows_at(clean, "pre_attn", 2)
    edit = Edit(kind="replace", point="pre_attn", layers=2, vector=rows, tokens="prompt")
    spec = {"hooks": {"pre_attn": [2], "post_block": [1]}, "positions": "all_prompt"}
    (output,) = run(llm, [prompt(*CORRUPT)], [params(1, steering=[edit], capture={"memory": spec})])
    np.testing.assert_array_equal(output.capture_results["memory"].numpy("pre_attn", 2), rows)


def test_cached_blocks_belong_to_their_rows(llm: Any, model: Any, clean: Any) -> None:
    """Catches blocks shared by requests whose rows, or positions of equal rows, differ.

    Runs one after another, so that later requests find the blocks of earlier ones.
    """
    rows = rows_at(clean, "post_block", 0)
    for first in (0, 1, 0, 20):
        for source in (rows[:40], rows[40:80]):
            edit = Edit(kind="replace", point="post_block", layers=0, vector=source, tokens=[[first, first + 40]])
            outputs = run(llm, [prompt(*CORRUPT)] * 2, [params(2, steering=[edit]), params(2)])
            positions = list(range(first, first + 40))
            right = expected(model, outputs[0], [("post_block", 0, put(positions, source))])
            assert np.abs(logprobs_of(outputs[0]) - right).max() < TOLERANCE
            assert np.abs(logprobs_of(outputs[1]) - expected(model, outputs[1], [])).max() < TOLERANCE
    assert LAYERS > 1


def test_matrices_that_do_not_fit_the_prompt_are_refused(llm: Any) -> None:
    """Catches a matrix that is cut or padded to the prompt."""
    matrix = np.ones((LONG, HIDDEN), "f4")
    edit = Edit(kind="replace", point="post_block", layers=1, vector=matrix, tokens="prompt")
    with pytest.raises(SteeringError, match=r"steering\[0\].vector: has 90 rows, but .* 89 positions"):
        run(llm, [prompt(*CORRUPT[:-1])], [params(1, steering=[edit])])
    crossed = Edit(kind="replace", point="post_block", layers=1, vector=matrix[:2], tokens=[40, -30])
    with pytest.raises(SteeringError, match=r"ascending"):
        run(llm, [prompt(*CORRUPT[:50])], [params(1, steering=[crossed])])
    far = Edit(kind="replace", point="post_block", layers=1, vector=matrix[:10], tokens=[[85, 95]])
    with pytest.raises(SteeringError, match="out of reach"):
        run(llm, [prompt(*CORRUPT)], [params(2, steering=[far])])
