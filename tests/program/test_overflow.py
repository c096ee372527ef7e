# SPDX-License-Identifier: Apache-2.0
"""Edits whose own numbers are too large, at the boundary of each dtype."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from tests.models.test_sae import FEATURES, HIDDEN, LENS_TENSORS, write
from vllm_steer import Edit, Projection, SteeringError
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.models.sae_features import FeatureReader
from vllm_steer.program import Program, compile_program
from vllm_steer.program.bind import bind_names
from vllm_steer.program.feature import FeatureVectors, SaeSite
from vllm_steer.program.overflow import _norm_of_step, _reach, check_overflow
from vllm_steer.request.readout import parse_readouts

AT: dict[str, Any] = {"point": "post_block", "layers": 1}
DTYPES = ("float32", "bfloat16", "float16")
ZEROS = np.zeros(HIDDEN, "f4")


def largest(dtype: str) -> float:
    return 61439.0 if dtype == "float16" else 2.0**64 * (1 - 2.0**-6)


def beyond(dtype: str) -> float:
    """Return a number that is rounded to infinity, or whose square is."""
    number = 65520.0 if dtype == "float16" else 2.0**64
    stored = torch.tensor(number, dtype=torch.float64).to(getattr(torch, dtype))
    assert stored.float().square().isinf()
    return number


def program_of(direction: np.ndarray, bias: float = 0.0, **fields: Any) -> Program:
    """Return the program of an edit of a feature with this decoder direction and bias of the encoder."""
    edit = Edit(kind="feature", sae="x", feature=0, **AT, **fields)
    program = compile_program([edit], edit_paths=["steering[0]"])
    names: Any = SimpleNamespace(
        any_site=False,
        site=lambda *_: SaeSite(),
        feature=lambda *_: FeatureVectors(direction.astype("f4"), ZEROS, bias),
    )
    return bind_names(program, names)


def check(program: Program, dtype: str) -> None:
    Capabilities(4, HIDDEN, 1000, dtype, {}, SteeringConfig()).check(program, None)


def refusal(dtype: str, kind: str) -> Any:
    name = "float32" if dtype == "bfloat16" else dtype
    return pytest.raises(SteeringError, match=rf"^steering\[0\]: {kind} at post_block .* overflows {name}[ ,]")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["add", "set"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_features(dtype: str, form: str, sign: float) -> None:
    """Catches a feature whose change is infinite in the model's dtype, and finite numbers that are refused."""
    direction = ZEROS.copy()
    direction[3] = sign * 8.0
    for number, refused in ((largest(dtype), False), (beyond(dtype), True)):
        with refusal(dtype, "feature") if refused else nullcontext():
            check(program_of(direction, **{form: number / 16}, strength=2.0), dtype)


def test_bias_of_a_feature() -> None:
    """Catches a feature that is set to 0 and thereby adds the encoder's bias, which overflows."""
    check(program_of(np.eye(HIDDEN)[0], 1.5e19, set=0.0), "float32")
    check(program_of(np.eye(HIDDEN)[0], 2e19, add=1.0), "float32")
    with refusal("float32", "feature"):
        check(program_of(np.eye(HIDDEN)[0], -2e19, set=0.0), "float32")


@pytest.mark.parametrize("form", ["add", "set"])
def test_factor_of_a_small_direction(form: str) -> None:
    """Catches a factor that is infinite in float32 although its product with the direction is not."""
    direction = np.full(HIDDEN, 1e-30)
    check(program_of(direction, **{form: 1e20}, strength=1e18), "bfloat16")
    with refusal("float32", "feature"):
        check(program_of(direction, **{form: 1e20}, strength=1e19), "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_subspaces(dtype: str, rows: int) -> None:
    """Catches a component that is infinite with the strength."""
    subspace = np.eye(2, HIDDEN, dtype="f4")
    vector = np.zeros((rows, HIDDEN), "f4")
    fields: dict[str, Any] = {"kind": "replace", "subspace": subspace, **AT}
    if rows > 1:
        fields["tokens"] = [[0, rows]]
    for number, refused in ((largest(dtype), False), (beyond(dtype), True)):
        vector[-1, 1] = number / 2
        edit = Edit(vector=vector if rows > 1 else vector[0], strength=2.0, **fields)
        with refusal(dtype, "replace") if refused else nullcontext():
            check(compile_program([edit], edit_paths=["steering[0]"]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rows"), [("add", 1), ("replace", 1), ("replace", 2)])
def test_vectors(dtype: str, kind: str, rows: int) -> None:
    """Catches an infinite row, after which a chat model answers with an empty text and without an error."""
    vectors = np.zeros((rows, HIDDEN), "f4")
    for number, refused in ((largest(dtype), False), (-beyond(dtype), True)):
        vectors[-1, 1] = number / 2
        given: dict[str, Any] = {"vector": vectors, "tokens": [0, 1]} if rows > 1 else {"vector": vectors[0]}
        with refusal(dtype, kind) if refused else nullcontext():
            edit = Edit(kind=kind, strength=2.0, **AT, **given)
            check(compile_program([edit], edit_paths=["steering[0]"]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds(dtype: str) -> None:
    """Catches a clamp that moves a row beyond the dtype, and a bound that no row reaches which is refused."""
    number = beyond(dtype)
    for bounds, refused in (((number, None), True), ((None, -number), True), ((-number, number), False)):
        edit = Edit(kind="clamp", vector=np.eye(HIDDEN)[0], low=bounds[0], high=bounds[1], **AT)
        with refusal(dtype, "clamp") if refused else nullcontext():
            check(compile_program([edit], edit_paths=["steering[0]"]), dtype)


def test_coordinates_beyond_float32() -> None:
    """Catches a program with infinite coordinates, which the engine calls damaged, of a vector of finite numbers."""
    vector = np.full(HIDDEN, 3e38, "f4")
    edit = Edit(kind="replace", vector=vector, subspace=[[1.0] * HIDDEN], **AT)
    with pytest.raises(SteeringError, match=r"^steering\[0\]\.vector: has a component of 7.35e\+38 in the subspace"):
        compile_program([edit], edit_paths=["steering[0]"])


def test_live_strengths() -> None:
    """Catches a change of a live strength that makes the change of a running request infinite."""
    program = program_of(np.ones(HIDDEN), add=4.0, live="calm")
    check(program, "float16")
    most = 61440 / (4 * HIDDEN**0.5)
    check_overflow(program, "float16", 4, {"calm": 0.99 * most, "other": 1e30})
    with pytest.raises(SteeringError, match=r"^calm: with .*, steering\[0\]: feature at post_block .* float16"):
        check_overflow(program, "float16", 4, {"calm": 1.01 * most})


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ([{"kind": "add", "strength": 1.5e19}], None),
        ([{"kind": "add", "strength": 1.5e19}] * 2, "may add a norm of 3e.19"),
        ([{"kind": "add", "strength": 1.5e19, "layers": [1, 2]}], "may add a norm of 3e.19"),
        ([{"kind": "add", "strength": 1.5e19, "layers": "all"}], "may add a norm of 6e.19"),
        ([{"kind": "clamp", "low": 1.5e19}, {"kind": "add", "strength": 4e18}], "may add a norm of 1.9e.19"),
        ([{"kind": "ablate", "strength": 1e5}], None),
        ([{"kind": "ablate", "strength": 1e3, "layers": [0, 1, 2, 3]}], None),
        ([{"kind": "ablate", "strength": -1e4, "layers": [0, 1, 2, 3]}], r"by a factor of 2\^53"),
        ([{"kind": "ablate", "strength": -1e4, "layers": "all"}], r"by a factor of 2\^53"),
        ([{"kind": "ablate", "strength": 1.0, "layers": "all"}] * 40, None),
        ([{"kind": "add_normed", "strength": 1.0, "layers": "all"}] * 9, None),
        ([{"kind": "add_normed", "strength": 1.0, "layers": "all"}] * 10, r"10 edits of one token may .* 2\^40.0"),
        ([{"kind": "add_normed", "strength": 1100.0, "layers": "all"}], "at 4 layers, use a strength below 1.02e.03"),
        ([{"kind": "ablate", "strength": -1.0, "point": "attn_out", "layers": "all"}] * 39, None),
        ([{"kind": "ablate", "strength": -1.0, "point": "attn_out", "layers": "all"}] * 40, r"2\^40"),
        ([{"kind": "add", "strength": 1e17}, {"kind": "add_normed", "strength": 1e3}], r"to a norm of up to 2\^66"),
        ([{"kind": "add", "strength": 1.6e7, "point": "mlp_in"}], None),
        ([{"kind": "add", "strength": 1.7e7, "point": "mlp_in"}], "norms must stay below 1.6777e.07"),
        ([{"kind": "ablate", "strength": -1e5, "point": "mlp_in"}], "norms must stay below 1.6777e.07"),
        (
            [{"kind": "add", "strength": 1e7, "point": "mlp_in"}, {"kind": "add_normed", "strength": 1e4}],
            r"up to 2\^73",
        ),
        ([{"kind": "add", "strength": 1e7, "point": "mlp_in"}, {"kind": "add_normed", "strength": 1e1}], None),
        ([{"kind": "add", "strength": 1e7, "point": "mlp_in", "tokens": [i]} for i in range(40)], None),
        ([{"kind": "add_normed", "strength": 1e10}] * 2, r"by a factor of 2\^66"),
        ([{"kind": "add_normed", "strength": 1e30}], r"by a factor of 2\^99.7, .*; use a strength below 1.09e.12"),
        ([{"kind": "replace", "strength": 1e13}], r"by a factor of 2\^43"),
    ],
)
def test_edits_together(given: list[dict[str, Any]], refused: str | None) -> None:
    """Catches edits that make rows infinite only together or with the row, and sums of usual ones that are refused."""
    edits = [Edit(**{"vector": np.eye(HIDDEN)[0], **AT, **each}) for each in given]
    program = compile_program(edits, edit_paths=[f"steering[{i}]" for i in range(len(edits))])
    with nullcontext() if refused is None else pytest.raises(SteeringError, match=rf"^steering\[[01]\]: .*{refused}"):
        check_overflow(program, "bfloat16", 4)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"kind": "add", "strength": 10000.0, "layers": [0, 1, 2, 3]}, None),
        ({"kind": "add", "strength": 20000.0, "layers": "all"}, "may add a norm of 80000, .* below 65536"),
        ({"kind": "add", "strength": 65000.0}, r"overflows float16 with the model's own row .*below 61440"),
        ({"kind": "add_normed", "strength": 0.9, "layers": "all"}, None),
        ({"kind": "add_normed", "strength": 1.1, "layers": "all"}, "at 4 layers, use a strength below 1$"),
        ({"kind": "add", "strength": 150.0, "point": "mlp_in"}, None),
        ({"kind": "add", "strength": 300.0, "point": "mlp_in"}, "may add a norm of 300, .* below 256"),
    ],
)
def test_float16(given: dict[str, Any], refused: str | None) -> None:
    """Catches the bounds of float32 in a model that overflows at 65504, and usual edits that are refused there."""
    program = compile_program([Edit(**{"vector": np.eye(HIDDEN)[0], **AT, **given})], edit_paths=["steering[0]"])
    with nullcontext() if refused is None else pytest.raises(SteeringError, match=rf"^steering\[0\]: .*{refused}"):
        check_overflow(program, "float16", 4)
    check_overflow(program, "bfloat16", 4)


def test_an_edit_that_the_request_can_change_is_named() -> None:
    """Catches a refusal at global steering, which the client of a request cannot change."""
    edits = [Edit("add", vector=np.eye(HIDDEN)[0], strength=each, **AT) for each in (1.2e19, 1e19)]
    program = compile_program(edits, edit_paths=["global steering", "steering[0]"])
    with pytest.raises(SteeringError, match=r"^steering\[0\]: 2 edits of one token may add a norm of 2.2e\+19"):
        check_overflow(program, "float32", 4)


HALF: dict[str, Any] = {"kind": "add_normed", "vector": np.eye(HIDDEN)[0], "strength": 2.0**25, **AT}


@pytest.mark.parametrize(
    ("tokens", "refused"),
    [
        (("all", [3]), True),
        (("prompt", "generated"), False),
        (("prompt", [3]), True),
        (("generated", [3]), True),
        (("last_prompt", [3]), True),
        (("last_prompt", "generated"), False),
        (("last_prompt", {"generated": [0]}), False),
        (([3], [4]), False),
        (([[0, 4]], [[4, None]]), False),
        (([[0, 5]], [[4, None]]), True),
        (([[4, None]], [[0, 5]]), True),
        (([3, 9], [4, 9]), True),
        (([3], {"generated": [3]}), True),
        (([-2], [-1]), False),
        (([[-2, None]], [-1]), True),
        (([[-2, None]], {"generated": [7]}), True),
        (([-2], {"generated": [7]}), False),
        (([[2, -1]], [0]), False),
        (([[2, -1]], [7]), True),
        (([[-4, 6]], [3]), True),
        (({"generated": [[0, 4]]}, {"generated": [[4, None]]}), False),
        (({"generated": [[0, 5]]}, {"generated": [[4, None]]}), True),
        (("user", "generated"), False),
        (("assistant", "generated"), True),
        (("thinking", "prompt"), False),
        (("thinking", "answer"), True),
    ],
)
def test_edits_of_other_tokens(tokens: tuple[Any, Any], refused: bool) -> None:
    """Catches edits that are refused although no token has both, and edits of one token that are not."""
    edits = [Edit(tokens=each, **HALF) for each in tokens]
    program = compile_program(edits, edit_paths=["steering[0]", "steering[1]"])
    with pytest.raises(SteeringError, match="2 edits of one token") if refused else nullcontext():
        check_overflow(program, "float32", 4)


def test_one_edit_per_token() -> None:
    """Catches a schedule of strengths, one edit per token, that counts as if one token had all of them."""
    paths = [f"steering[{i}]" for i in range(34)]
    check_overflow(compile_program([Edit(tokens=[i], **HALF) for i in range(34)], edit_paths=paths), "float32", 4)
    one = [Edit(tokens=[i, 40], **HALF) for i in range(34)]
    with pytest.raises(SteeringError, match=r"34 edits of one token may lengthen a row by a factor of 2\^850"):
        check_overflow(compile_program(one, edit_paths=paths), "float32", 4)


def test_many_positions_count_as_one_token() -> None:
    """Catches a check that goes through the positions of a request before their number is bounded."""
    for count, refused in ((4096, False), (4097, True)):
        edits = [Edit(tokens=list(range(first, 8 * count, 8)), **HALF) for first in (0, 4)]
        program = compile_program(edits, edit_paths=["steering[0]", "steering[1]"])
        looked = patch("vllm_steer.program.overflow._reach", side_effect=_reach)
        with looked as reach, pytest.raises(SteeringError, match="2 edits") if refused else nullcontext():
            check_overflow(program, "float32", 4)
        assert reach.called is not refused


def test_features_that_are_switched_off_together() -> None:
    """Catches features of one autoencoder that count as if each one doubled the row."""
    direction = np.eye(HIDDEN)[0].astype("f4")
    names: Any = SimpleNamespace(
        any_site=False, site=lambda *_: SaeSite(), feature=lambda *_: FeatureVectors(direction, direction)
    )
    edits = [Edit(kind="feature", sae="x", feature=number, set=0.0, **AT) for number in range(100)]
    check_overflow(
        bind_names(compile_program(edits, edit_paths=[f"steering[{i}]" for i in range(100)]), names), "float32", 4
    )


def test_growth_of_features() -> None:
    """Catches a bound below the length that a row can reach, and one above it."""
    rng = np.random.default_rng(0)
    for strength in (1.0, 0.5, 2.0, -1.0):
        encoder, decoder = rng.normal(size=(2, HIDDEN))
        step = np.eye(HIDDEN) - strength * np.outer(decoder, encoder)
        assert _norm_of_step(strength, encoder, decoder) == pytest.approx(np.linalg.norm(step, 2))
    unit = np.eye(HIDDEN)[0]
    assert _norm_of_step(1.0, unit, unit) == _norm_of_step(2.0, 0.3 * unit, unit / 0.3) == 1.0
    assert 1e75 < _norm_of_step(3e38, 3e38 * unit, unit) < 1e78


def test_live_strengths_together() -> None:
    """Catches a change that overflows only with other edits, and a refusal at an edit that stays."""
    kinds: list[dict[str, Any]] = [{"kind": "add", "strength": 1e19}, {"kind": "add", "live": "calm"}]
    edits = [Edit(vector=np.eye(HIDDEN)[0], **AT, **each) for each in kinds]
    program = compile_program(edits, edit_paths=["steering[0]", "steering[1]"])
    check(program, "float32")
    check_overflow(program, "float32", 4, {"calm": 5e18})
    with pytest.raises(SteeringError, match=r"^calm: with 9e\+18, steering\[1\]: .* add a norm of 1.9e\+19"):
        check_overflow(program, "float32", 4, {"calm": 9e18})


def test_live_strength_that_overflows_float64() -> None:
    """Catches an infinite growth, whose sums are not numbers, so that no token seems to have the edit."""
    edit = Edit("add_normed", vector=np.eye(HIDDEN)[0], strength=1e10, live="calm", **AT)
    program = compile_program([edit], edit_paths=["steering[0]"])
    with pytest.raises(SteeringError, match=r"^calm: with 1e\+308, steering\[0\]: add_normed .* 2\^1000"):
        check_overflow(program, "float32", 4, {"calm": 1e308})


def test_live_strengths_one_after_another() -> None:
    """Catches changes that overflow only with earlier ones, and a refusal for a strength that has been set to 0."""
    edits = [
        Edit("add", vector=size * np.eye(HIDDEN)[0], live=name, **AT) for name, size in (("a", 1.5e19), ("b", 1.0))
    ]
    program = compile_program(edits, edit_paths=["steering[0]", "steering[1]"])
    check_overflow(program, "float32", 4, {"b": 1e19}, {"a": 0.0})
    for before in ({}, {"a": 1.0}):
        with pytest.raises(SteeringError, match=r"^b: with 1e\+19, steering\[1\]: 2 edits .* norm of 2.5e\+19"):
            check_overflow(program, "float32", 4, {"b": 1e19}, before)


@pytest.mark.parametrize("probe", ["probe", "projections", "mlp"])
def test_readouts(probe: str) -> None:
    """Catches a probe whose value is NaN; a gate with sharpness would make the stream NaN, and the answer token 0."""
    for number, refused in ((1.8e19, False), (1.9e19, True)):
        row = (number * np.eye(HIDDEN)[0]).tolist()
        forms: dict[str, Any] = {
            "probe": {"probe": row},
            "projections": {"projections": [row, [1.0] * HIDDEN]},
            "mlp": {"probe": {"weights": [row], "biases": [0.0], "outputs": [1.0], "activation": "relu"}},
        }
        expected = pytest.raises(SteeringError, match=r"^readouts\.score.*: has products .* overflow float32")
        with expected if refused else nullcontext():
            readouts = parse_readouts({"score": {**forms[probe], "point": "post_block", "layer": 1}})
            check(compile_program([], readouts=readouts), "float32")


def test_probe_of_a_module() -> None:
    """Catches a probe that is filled in when the request is composed, and that no request field has checked."""
    readouts = parse_readouts({"score": {"probe": [1.0] * HIDDEN, "point": "post_block", "layer": 1}})
    program = compile_program([], readouts=readouts)
    check(program, "float32")
    filled = msgspec.structs.replace(program, vectors=((1.9e19 * np.eye(HIDDEN, dtype="f4")[0]).tobytes(),))
    with pytest.raises(SteeringError, match=r"^readouts\.score: has products .* overflow float32"):
        check(filled, "float32")


def test_directions_of_a_capture() -> None:
    """Catches projections that are NaN while the capture is reported as exact."""
    Projection([[1.8e19, 0.0]])
    with pytest.raises(SteeringError, match=r"^directions\[1\]: has products .* float32"):
        Projection([[1.0, 0.0], [1.9e19, -1.9e19]])


def test_constants_of_an_encoder(tmp_path: Path) -> None:
    """Catches an activation that is infinite because constants of the encoder multiply to infinity."""
    tensors = {**LENS_TENSORS, "b_dec": np.full(HIDDEN, 1e38, "f4"), "W_enc": np.full((HIDDEN, FEATURES), 1e3, "f4")}
    folder = write(tmp_path / "sae", "sae_weights.safetensors", tensors, {"architecture": "standard"})
    with pytest.raises(SteeringError, match=r"^steering\[0\]\.feature: the encoder of feature 3 .* float32"):
        FeatureReader({"x": folder}).feature("x", 3, "steering[0]")
