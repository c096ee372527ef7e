# SPDX-License-Identifier: Apache-2.0
"""Tests of reading and writing the safetensors files of modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tests.registry.modules import content, module, registry, vector
from vllm_steer.errors import SteeringError
from vllm_steer.registry.directions import save_module
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import parse_module
from vllm_steer.registry.module_files import MAX_HEADER_BYTES, read_module, write_module

V = torch.from_numpy(vector(1))


def test_file_round_trip() -> None:
    """Catches a part of a module that is lost in the file."""
    about = ModuleMetadata("d", "m", {"a": "b"})
    assert read_module(write_module(module(), about)) == (module(), about)


def test_another_suffix_is_refused_with_the_file_that_was_named(tmp_path: Path) -> None:
    """Catches the name of a temporary file in the error, and one that is left behind."""
    with pytest.raises(SteeringError, match=r"out: \S*/x\.pt has an unknown suffix; use \.safetensors or \.gguf"):
        save_module(tmp_path / "x.pt", {"base": {"post_block": {"1": [1.0]}}}, "m", {})
    assert not list(tmp_path.iterdir())


def test_a_registered_module_is_saved_whole(tmp_path: Path) -> None:
    """Catches a part that is lost on the way from a registry to a file and back, such as the bias of a probe."""
    steering, other = registry(), registry()
    steering.register("calm", **content(), description="d", model="m", provenance={"by": "x"})
    with pytest.raises(SteeringError, match="data=True"):
        steering.get("calm").save(tmp_path / "calm.safetensors")
    saved = steering.get("calm", data=True)
    saved.save(tmp_path / "calm.safetensors")
    again = other.register_file("calm", tmp_path / "calm.safetensors")
    assert again.model_dump(exclude={"registered"}) == steering.get("calm").model_dump(exclude={"registered"})
    assert again.content.probes["whole"].model_dump() == {
        "bias": 0.75, "sigmoid": True, "point": "pre_attn", "layer": 2, "hidden": None,
    }  # fmt: skip


def test_reads_the_documented_format() -> None:
    """Catches names, dtypes or metadata that are read differently than documented."""
    tensors = {
        "base.post_block.12": V.to(torch.bfloat16),
        "prefill.pre_attn.0": V.double(),
        "decode.post_attn.3": V.half(),
        "probes.joy": V,
        "mlp_probes.a.b.weights": torch.stack([V, -V]).half(),
        "mlp_probes.a.b.outputs": torch.tensor([1.0, 2.0]),
        "mlp_probes.c.weights": V[None].clone(),
        "mlp_probes.c.outputs": torch.tensor([1.0]),
        "mlp_probes.c.biases": torch.tensor([3.0]),
        "edits.x": V.clone(),
    }
    edits = [{"kind": "ablate", "point": "pre_attn", "layers": "all", "vector": "edits.x"}]
    said = {
        "format": "pt",
        "description": "d",
        "scales": '{"prefill.pre_attn.0": 2}',
        "edits": json.dumps(edits),
        "activations": '{"c": "silu"}',
    }
    found, about = read_module(save(tensors, said))
    content: Any = {
        "base": {"post_block": {12: V.bfloat16()}},
        "prefill": {"pre_attn": {0: {"vector": V, "scale": 2}}},
        "decode": {"post_attn": {3: V.half()}},
        "probes": {
            "joy": V,
            "a.b": {"weights": torch.stack([V, -V]).half(), "outputs": [1.0, 2.0]},
            "c": {"weights": [V], "outputs": [1.0], "biases": [3.0], "activation": "silu"},
        },
        "edits": [{**edits[0], "vector": V}],
    }
    assert found == parse_module(content)
    assert about == ModuleMetadata("d")


def with_header(header: object, data: bytes = b"\0" * 32) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [8], "data_offsets": [0, 32], **changes}


NAME = "base.post_block.1"
MLP = {"mlp_probes.p.weights": V[None].clone(), "mlp_probes.p.outputs": torch.ones(1)}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter"),
    "pickle": (b"\x80\x04\x95" + b"x" * 100, "shorter"),
    "header beyond the file": ((1 << 40).to_bytes(8, "little") + b"{}", "shorter"),
    "header beyond everything": (b"\xff" * 8 + b"{}", "shorter"),
    "header too large": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1), "at most"),
    "no JSON": (with_header(b"{]"), "JSON"),
    "no UTF-8": (with_header(b'{"\xff": 1}'), "JSON"),
    "deep": (with_header(b'{"a":' * 100000 + b"}" * 100000), "JSON"),
    "a list": (with_header([]), "object"),
    "tensor twice": (with_header(b'{"x": {}, "x": {}}'), "duplicate"),
    "entry no object": (with_header({NAME: 1}), "dtype"),
    "dtype": (with_header({NAME: tensor(dtype="I64")}), "dtype 'I64'"),
    "dtype no text": (with_header({NAME: tensor(dtype=["F32"])}), "dtype ['F32']"),
    "more in an entry": (with_header({NAME: tensor(file="x")}), "exactly the keys"),
    "less in an entry": (with_header({NAME: {"dtype": "F32", "shape": [8]}}), "exactly the keys"),
    "a name of nothing": (with_header({"": tensor()}), "'': unknown tensor"),
    "many dimensions": (with_header({NAME: tensor(shape=[1] * 9999 + [8])}), "..."),
    "offsets beyond": (with_header({NAME: tensor(data_offsets=[0, 64], shape=[16])}), "not a valid"),
    "offsets overlap": (with_header({NAME: tensor(), "base.post_block.2": tensor()}), "not a valid"),
    "offsets negative": (with_header({NAME: tensor(data_offsets=[-32, 0])}), "not a valid"),
    "shape lies": (with_header({NAME: tensor(shape=[9])}), "not a valid"),
    "shape overflows": (with_header({NAME: tensor(shape=[1 << 62, 1 << 62])}), "not a valid"),
    "dimensions of an empty tensor": (
        with_header({"mlp_probes.p.weights": tensor(shape=[0, (1 << 64) - 1], data_offsets=[0, 0])}, b""), "has shape",
    ),
    "a number": (with_header({NAME: tensor(shape=[], data_offsets=[0, 4])}, b"\0" * 4), "has shape []"),
    "a text with half of a character": (with_header(b'{"\xed\xa0\x80": 1}'), "JSON"),
    "a hole": (with_header({NAME: tensor()}, b"\0" * 64), "not a valid"),
    "metadata": (with_header({"__metadata__": {"a": 1}, NAME: tensor()}), "metadata"),
    "unknown metadata": (save({NAME: V}, {"sclaes": "{}"}), "sclaes"),
    "scales no JSON": (save({NAME: V}, {"scales": "{"}), "metadata.scales"),
    "scales a list": (save({NAME: V}, {"scales": "[]"}), "metadata.scales"),
    "scale of nothing": (save({NAME: V}, {"scales": '{"x": 1}'}), "names no tensor base"),
    "scale no number": (save({NAME: V}, {"scales": f'{{"{NAME}": "1"}}'}), "number"),
    "scale NaN": (save({NAME: V}, {"scales": f'{{"{NAME}": NaN}}'}), "finite"),
    "NaN": (save({NAME: V * float("nan")}), "finite"),
    "infinite in float32": (save({NAME: V.double() * 1e300}), "finite"),
    "matrix": (save({NAME: V[None]}), "shape [H]"),
    "empty vector": (save({NAME: V[:0]}), "components"),
    "weights no matrix": (save({"mlp_probes.p.weights": V, "mlp_probes.p.outputs": V[:1].clone()}), "shape [n, H]"),
    "outputs a matrix": (save({"mlp_probes.p.outputs": V[None]}), "shape [H]"),
    "no outputs": (save({"mlp_probes.p.weights": V[None]}), "mlp_probes.p.outputs: is missing"),
    "no weights": (save({"mlp_probes.p.outputs": V}), "mlp_probes.p.weights: is missing"),
    "another array": (save({"mlp_probes.p.bias": V}), "unknown tensor name"),
    "no name": (save({"mlp_probes.weights": V[None]}), "unknown tensor name"),
    "a path in a probe": (save({"mlp_probes.../x.weights": V[None], "mlp_probes.../x.outputs": V.clone()}), "ASCII"),
    "activation": (save(MLP, {"activations": '{"p": "swish"}'}), "probes.p.activation"),
    "reading of nothing": (save({NAME: V}, {"probes": '{"q": {"bias": 1}}'}), "names no probe"),
    "reading no object": (save({"probes.p": V}, {"probes": '{"p": 1}'}), "metadata.probes.p"),
    "weights in a reading": (save({"probes.p": V}, {"probes": '{"p": {"weights": [1]}}'}), "bias, sigmoid, point"),
    "bias NaN": (save({"probes.p": V}, {"probes": '{"p": {"bias": NaN}}'}), "finite"),
    "activation no text": (save(MLP, {"activations": '{"p": [1]}'}), "probes.p.activation"),
    "activation of nothing": (save(MLP, {"activations": '{"q": "relu"}'}), "names no probe"),
    "one name twice": (save({**MLP, "probes.p": V}), "probes.p: is also in"),
    "no tier": (save({"post_block.1": V}), "unknown tensor name"),
    "no layer": (save({"base.post_block": V}), "unknown tensor name"),
    "path": (save({"base.../../x.1": V}), "base"),
    "no tensors": (save({}), "empty"),
    "edit of another's vector": (save({NAME: V}, {"edits": '[{"vector": "base.post_block.1"}]'}), "must name a tensor"),
    "edit no object": (save({"edits.0": V}, {"edits": "[1]"}), "must name a tensor"),
    "vector of no edit": (save({NAME: V, "edits.0": V.clone()}), "not used by any edit"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_rejects_hostile_files(case: str) -> None:
    """Catches reads beyond the end of a file, invalid numbers, and tracebacks."""
    data, words = HOSTILE[case]
    with pytest.raises(SteeringError) as refused:
        read_module(data)
    assert words in str(refused.value)


@given(st.binary(max_size=400), st.integers(0, 10_000))
def test_damaged_files_never_crash(noise: bytes, at: int) -> None:
    """Catches damage that causes anything but a rejection or a module with other numbers."""
    data = write_module(module())
    at %= len(data)
    try:
        found, _ = read_module(data[:at] + noise + data[at + len(noise) :])
    except SteeringError:
        return
    assert found.width
