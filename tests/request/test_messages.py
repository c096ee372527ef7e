# SPDX-License-Identifier: Apache-2.0
"""Plausible mistakes, and the part of the error message that states what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.params import SamplingParams, attach_steering
from vllm_steer.request import CaptureSpec, Edit, parse_capture, parse_fields
from vllm_steer.request.readout import parse_readouts

VECTOR = [1.0, 2.0]
EDIT: dict[str, Any] = {"kind": "add", "point": "post_block", "layers": 1, "vector": VECTOR}
HOOKS = {"post_block": [1]}


def edit(**changed: Any) -> Edit:
    return Edit(**{**EDIT, **changed})


def dict_edit(**changed: Any) -> Any:
    return parse_fields({"steering": [{**EDIT, **changed}]})


def vectors(given: Any) -> Any:
    return parse_fields({"steering_vectors": given})


def capture(**changed: Any) -> Any:
    return parse_capture({"memory": {"hooks": HOOKS, **changed}})


def readout(**changed: Any) -> Any:
    return parse_readouts({"a": {"point": "post_block", "layer": 1, **changed}})


MISTAKES: tuple[tuple[Callable[[], Any], str, str], ...] = (
    (lambda: edit(scale=2), "'scale'", "did you mean strength?"),
    (lambda: edit(coeff=2), "'coeff'", "did you mean strength?"),
    (lambda: edit(layer=1), "'layer'", "did you mean layers?"),
    (lambda: edit(positions=[1]), "'positions'", "did you mean tokens?"),
    (lambda: edit(strenght=2), "'strenght'", "did you mean strength?"),
    (lambda: Edit(kind="add", point="post_block", layers=1), "vector: is missing", "add needs a vector"),
    (lambda: dict_edit(scale=2), "steering[0]: unknown key 'scale'", "did you mean strength?"),
    (lambda: dict_edit(layer=2), "steering[0]: unknown key 'layer'", "did you mean layers?"),
    (lambda: edit(kind="ablation"), "kind: 'ablation' is not valid", "it is ablate here"),
    (lambda: edit(kind="clmap"), "kind: 'clmap' is not valid", "did you mean clamp?"),
    (lambda: edit(point="post_blok"), "point: 'post_blok' is not a hook point", "did you mean post_block?"),
    (
        lambda: edit(point="blocks.1.hook_resid_pst"),
        "point: 'blocks.1.hook_resid_pst' is not a hook point",
        "did you mean blocks.1.hook_resid_post?",
    ),
    (lambda: edit(point="atn_out.1"), "point: 'atn_out.1' is not a hook point", "did you mean attn_out.1?"),
    (lambda: edit(point="POST_BLOCK"), "point: 'POST_BLOCK' is not a hook point", "did you mean post_block?"),
    (lambda: edit(point="ln2.hook_normalized"), "point: 'ln2.hook_normalized'", "the nearest is mlp_in"),
    (lambda: edit(point="blocks.3.hook_mlp_in"), "point: ", "the nearest is post_attn of layer 3"),
    (lambda: edit(point="blocks.3.hook_resid_mid", layers=4), "layers: is 4, but the point names layer 3", "omit one"),
    (lambda: edit(point="resid_post", layers=None), "layers: is missing", "name layers of post_block"),
    (lambda: edit(point="resid_post[-1]"), "point: 'resid_post[-1]'", "layers count from 0"),
    (lambda: edit(point="hidden_states"), "point: ", "hidden_states[i] is post_block of layer i - 1"),
    (
        lambda: edit(point="hidden_states[6]"),
        "point: ",
        "is post_block of layer 5 here",
    ),
    (lambda: edit(point="hook_q"), "point: ", "places inside attention are not hook points; its output is attn_out"),
    (lambda: edit(layers=-1), "layers: must be between 0 and 4095 and below the model's", "count from 0"),
    (lambda: edit(layers="3"), "layers: ", "write 3 without quotes"),
    (lambda: edit(layers="ALL"), "layers: ", "did you mean all?"),
    (lambda: edit(layers=slice(1, 3)), "layers: ", "use range(start, stop)"),
    (lambda: edit(layers={1, 2}), "layers: ", "use list(...)"),
    (lambda: edit(layers=np.ones(3)), "layers: is an array of dtype float64 and shape [3]", "array of integers"),
    (lambda: edit(layers=np.ones((2, 2), int)), "layers: is an array", "one-dimensional array of integers"),
    (lambda: edit(layers=torch.ones(2, dtype=torch.bool)), "layers: is an array of dtype torch.bool", "of integers"),
    (lambda: edit(layers=torch.empty(2, dtype=int, device="meta")), "layers: is an array", "without data"),
    (lambda: edit(layers=[torch.tensor(1)]), "layers[0]: must be a layer number", "convert it with int()"),
    (
        lambda: edit(vector=torch.empty(2, device="meta")),
        "vector: is a tensor on the meta device",
        "load it to the CPU",
    ),
    (lambda: edit(vector=torch.ones(2).to_sparse()), "vector: has the layout torch.sparse_coo", ".to_dense()"),
    (lambda: edit(vector=torch.ones(6, 2)), "vector: has shape [6, 2]", "pass vector[i] for layer i"),
    (lambda: edit(vector=torch.ones(2, 1)), "vector: has shape [2, 1]", "flatten it"),
    (lambda: edit(vector=[torch.ones(())] * 2), "vector[0]: must be a number", "pass one array or tensor"),
    (lambda: edit(vector="v.pt"), "vector: must be", "load a file first"),
    (lambda: edit(strength=torch.ones(())), "strength: must be a number", "convert it with float()"),
    (lambda: edit(tokens="decode"), "tokens: 'decode' is not valid", "it is generated here"),
    (lambda: edit(tokens="last_token"), "tokens: 'last_token' is not valid", "it is last_prompt here"),
    (lambda: edit(tokens="promt"), "tokens: 'promt' is not valid", "did you mean prompt?"),
    (lambda: edit(tokens=slice(1, 3)), "tokens: must be one of", "write [[start, stop]]"),
    (lambda: edit(tokens=0.5), "tokens: must be one of", "thinking, answer, tool_call"),
    (lambda: edit(tokens=0.5), "tokens: must be one of", "or a dict with generated, between or outside"),
    (lambda: edit(tokens={"betwen": [1, 2]}), "tokens: unknown key 'betwen'", "did you mean between?"),
    (lambda: edit(when={"readout": "r", "abov": 1}), "when: unknown key 'abov'", "did you mean above?"),
    (lambda: edit(when={"readout": "r"}), "when.above: is missing", "give above or below"),
    (lambda: edit(when={"readout": "r", "above": 1, "below": 2}), "when.above: cannot be combined", "omit one of them"),
    (lambda: parse_fields({"steering": EDIT}), "steering: must be a list of edits", "put the edit in a list"),
    (lambda: parse_fields({"steering": {"post_block": {1: VECTOR}}}), "steering: ", "belongs in steering_vectors"),
    (lambda: vectors(VECTOR), "steering_vectors: must be", 'such as {"post_block": {"12": vector}}'),
    (lambda: vectors({"post_block": VECTOR}), "steering_vectors.post_block: must be", 'such as {"12": vector}'),
    (
        lambda: vectors({"resid_post.1": {1: VECTOR}}),
        "steering_vectors: 'resid_post.1' names layer 1",
        "use 'post_block'",
    ),
    (
        lambda: vectors({"post_block": {1: VECTOR}, "resid_post": {2: VECTOR}}),
        "steering_vectors: names post_block twice",
        "'resid_post'",
    ),
    (lambda: vectors({"post_block": {-1: VECTOR}}), "steering_vectors.post_block: must be between 0", "count from 0"),
    (
        lambda: vectors({"post_block": {1: {"vector": VECTOR, "coeff": 2}}}),
        "steering_vectors.post_block[1]: must be",
        "did you mean scale?",
    ),
    (
        lambda: vectors({"post_block": {1: torch.empty(2, device="meta")}}),
        "steering_vectors.post_block[1]: is a tensor on the meta device",
        "load it to the CPU",
    ),
    (lambda: SteeringConfig(max_row=8), "'max_row'", "did you mean max_rows?"),
    (lambda: SteeringConfig(8), "argument", "arguments: max_rows, max_vectors"),
    (
        lambda: attach_steering(SamplingParams(steering=[EDIT]), {"steering": [EDIT]}),
        "extra_args.steer: is already set",
        "create new ones",
    ),
    (lambda: CaptureSpec(hooks=HOOKS, position="all"), "'position'", "did you mean positions?"),
    (lambda: CaptureSpec(layers=[1]), "", "arguments: hooks, positions, before, dtype, reduce, options"),
    (lambda: parse_capture({"hooks": HOOKS}), "capture: 'hooks' is not a consumer", '{"memory": {"hooks": ...}}'),
    (
        lambda: parse_capture({"post_block": [1]}),
        "capture: 'post_block' is not a consumer",
        '{"memory": {"hooks": {"post_block": ...}}}',
    ),
    (lambda: parse_capture(CaptureSpec(hooks=HOOKS)), "capture: must be", "under the name of a consumer"),
    (lambda: capture(hooks=["post_block"]), "capture.memory.hooks: must be", 'such as {"post_block": [12]}'),
    (lambda: capture(hooks={"hidden_states": [6]}), "capture.memory.hooks: ", "post_block of layer i - 1"),
    (lambda: parse_capture({"memory": {"layers": [1]}}), "capture.memory.hooks: is missing", "layers is not a field"),
    (lambda: capture(dtype=torch.float32), "capture.memory.dtype: torch.float32 is not valid", "it is float32 here"),
    (lambda: capture(dtype="bf16"), "capture.memory.dtype: 'bf16' is not valid", "it is bfloat16 here"),
    (lambda: capture(positions="last"), "capture.memory.positions: 'last' is not valid", "it is last_prompt here"),
    (lambda: capture(positions="decode"), "capture.memory.positions: ", "it is all_generated here"),
    (
        lambda: capture(positions="thinking"),
        "capture.memory.positions: 'thinking' is a part of the output",
        "use all_prompt or all_generated",
    ),
    (
        lambda: capture(positions={"between": [1, 2]}),
        "capture.memory.positions: {'between': [1, 2]} is a part of the output",
        "use all_prompt or all_generated",
    ),
    (lambda: capture(positions={"foo": 1}), "capture.memory.positions: must be one of last_prompt", "with generated"),
    (lambda: capture(hooks=[]), "capture.memory.hooks: is empty", "name at least one site such as"),
    (lambda: capture(hooks=["resid_post.1"] * 30000), "hooks: has 30000 sites; at most 4096", '{"post_block": "all"}'),
    (lambda: readout(lens={}, bias=0), "readouts.a.bias: is a parameter of probe only", "only; omit it"),
    (lambda: readout(lens={"tokens": [" he"]}), "readouts.a.lens.tokens[0]: must be a token id", "tokenizer gives it"),
    (lambda: readout(lens={"tokens": [3, 3]}), "readouts.a.lens.tokens: [3, 3] names a token id", "name each once"),
    (lambda: readout(lens={}, top_k=3), "readouts.a.top_k: is a parameter of sae only", "give it inside lens"),
    (lambda: readout(lens={}, layer=None), "readouts.a.layer: is missing", "give layer, or layers for a lens"),
    (lambda: readout(probe="x"), "readouts.a.probe: must be a probe of a module", "such as"),
    (
        lambda: edit(kind="replace", vector={"capture": "x"}),
        "vector: names rows or a module of a server",
        "plain dict",
    ),
    (lambda: edit(vector={"capture": "x"}), "vector: refers to rows stored on a server", "only replace takes"),
)


@pytest.mark.parametrize(("mistake", "where", "remedy"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_messages_state_what_to_do(mistake: Callable[[], Any], where: str, remedy: str) -> None:
    """Catches a message that names neither the field and the value nor the valid form."""
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake()
    message = str(caught.value)
    assert where in message
    assert remedy in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "layers",
    [np.array([3, 1]), np.array([3, 1], np.uint8), torch.tensor([3, 1]), [np.int64(3), 1], range(1, 4, 2)],
    ids=["numpy", "uint8", "torch", "numpy integers", "range"],
)
def test_layers_of_arrays(layers: Any) -> None:
    """Catches an array of layers that is refused or read in another order."""
    assert edit(layers=layers).layers == (1, 3)
    assert CaptureSpec(hooks={"post_block": layers}).hooks == (("post_block", (1, 3)),)


@pytest.mark.parametrize("layer", [np.array(3), torch.tensor(3), np.int32(3)])
def test_layer_of_an_array_without_dimensions(layer: Any) -> None:
    """Catches a scalar array read as a list."""
    assert edit(layers=layer).layers == (3,)


def test_correct_arguments_raise_their_own_errors() -> None:
    """Negative control: catches a suggestion for a call whose arguments have valid names."""
    with pytest.raises(ValueError) as caught:
        edit(strength="2")
    assert "arguments" not in str(caught.value)
