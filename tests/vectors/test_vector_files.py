# SPDX-License-Identifier: Apache-2.0
"""Vector files of other tools: what is read, what is refused with what to say, and what is written."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from typer.testing import CliRunner

from tests.registry.modules import module, registry
from tests.vectors.files import V, control_vector, npy, npz, pt, svec, zip_entry, zipped
from vllm_steer.cli.main import app
from vllm_steer.errors import SteeringError
from vllm_steer.registry.metadata import ModuleMetadata
from vllm_steer.registry.module import Module, parse_module
from vllm_steer.registry.module_files import write_module
from vllm_steer.registry.vector_files import read_vector_file, write_vector_file
from vllm_steer.vectors import Choice, read_vectors
from vllm_steer.vectors.formats import FORMATS

DATA = Path(__file__).parent / "data"
ROWS = np.stack([V + row for row in range(5)])


def sites(found: Module) -> dict[tuple[str, int], list[float]]:
    """Return the vectors of a module that only adds to every token, with their strengths."""
    assert found.all_edits == found.base
    return {(edit.point, edit.layers[0]): (edit.vector * edit.strength).tolist() for edit in found.base}


UPLOAD = {
    "modelId": "gpt2",
    "layerNumber": 3,
    "hookType": "hook_resid_pre",
    "vector": V.tolist(),
    "vectorLabel": "cats",
}
VECTOR = {"modelId": "gpt2", "source": "x", "hookName": "blocks.2.hook_resid_post", "values": V.tolist()}
READ: dict[str, tuple[bytes, Choice, dict[tuple[str, int], Any]]] = {
    "names of TransformerLens": (save({"blocks.3.hook_resid_pre": V}), Choice(), {("pre_attn", 3): V}),
    "names of HF, one row": (
        npz(**{"model.layers.3": V[None], "layers.4": 2 * V}), Choice(),
        {("post_block", 3): V, ("post_block", 4): 2 * V},
    ),
    "our names": (save({"post_block.0": V.astype(np.float16)}), Choice(), {("post_block", 0): V}),
    "one layer of several": (save({"layers.1": V, "layers.2": V + 1}), Choice(layers=(2,)), {("post_block", 2): V + 1}),
    "numbers": (save({"5": V}), Choice(point="mlp_out"), {("mlp_out", 5): V}),
    "one vector": (npy(V.astype(np.float64)), Choice(layers=(7,), point="pre_attn"), {("pre_attn", 7): V}),
    "one named vector": (
        save({"steering_vector": V[None]}), Choice(layers=(7,), point="post_block"), {("post_block", 7): V},
    ),
    "hidden states": (
        npy(ROWS), Choice("hidden-states", (0, 2)), {("post_block", 0): ROWS[1], ("post_block", 2): ROWS[3]},
    ),
    "Fortran order": (
        npy(np.asfortranarray(ROWS)), Choice("rows", (1,), "post_block"), {("post_block", 1): ROWS[1]},
    ),
    "svec where it was computed": (svec(**{"3": V.tolist()}), Choice(point="post_block"), {("post_block", 3): V}),
    "a point by another library's name": (npy(V), Choice(layers=(3,), point="resid_post"), {("post_block", 3): V}),
    "svec with a row": (svec(**{"3": [V.tolist()]}), Choice(point="pre_attn"), {("pre_attn", 3): V}),
    "Neuronpedia's upload": (json.dumps(UPLOAD).encode(), Choice(), {("pre_attn", 3): V}),
    "Neuronpedia's vector": (json.dumps(VECTOR).encode(), Choice(), {("post_block", 2): V}),
    "control vector": (
        control_vector({"direction.1": V, "direction.9": 3 * V}), Choice(),
        {("post_block", 1): V, ("post_block", 9): 3 * V},
    ),
    "half precision": (control_vector({"direction.1": V.astype(np.float16)}), Choice(), {("post_block", 1): V}),
    "a signed count that only one tool writes": (
        control_vector({"direction.3": V}, count=gguf.GGUFValueType.INT64), Choice("cvector-generator"),
        {("post_block", 2): V},
    ),
    "no count": (control_vector({"direction.3": V}, count=None), Choice(), {("post_block", 3): V}),
    "extra fields": (zipped(zip_entry("layers.1.npy", extra=65000)), Choice(), {("post_block", 1): V}),
    "a request body": (
        json.dumps({"name": "x", "base": {"pre_attn": {"1": V.tolist()}}}).encode(), Choice(), {("pre_attn", 1): V},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_reads(case: str) -> None:
    """Catches a vector at another layer or hook point than the format's, or with other numbers."""
    data, choice, expected = READ[case]
    found, _ = read_vector_file(data, choice)
    assert sites(found) == {place: vector.tolist() for place, vector in expected.items()}


def test_the_origin_is_kept() -> None:
    """Catches a module that does not tell of what format and model it was, or drops a default strength."""
    _, about = read_vector_file(json.dumps({**UPLOAD, "vectorDefaultSteerStrength": 10}).encode())
    assert about.model == "gpt2"
    assert about.provenance["format"] == "neuronpedia"
    assert about.provenance["numbering"] == FORMATS["neuronpedia"].numbering
    assert (about.provenance["label"], about.provenance["default_strength"]) == ("cats", "10")
    assert read_vector_file(DATA / "repeng.gguf")[1].model == "llama"


REFUSED: dict[str, tuple[bytes, Choice, str]] = {
    "one vector": (npy(V), Choice(), "--layer N --point"),
    "one vector without a point": (npy(V), Choice(layers=(1,)), "--point"),
    "one vector at two layers": (npy(V), Choice(layers=(1, 2), point="post_block"), "one vector; give one layer"),
    "a matrix": (npy(ROWS), Choice(), "OUT.safetensors --format FORMAT (FORMAT: hidden-states or rows)"),
    "hidden states without a layer": (npy(ROWS), Choice("hidden-states"), "--layer N"),
    "the row after the final norm": (npy(ROWS), Choice("hidden-states", (3,)), "3 is not in the file"),
    "numbers": (save({"5": V, "6": V}), Choice(), "hook point is not in the file"),
    "svec": (svec(**{"3": V.tolist()}), Choice(), "hook point is not in the file"),
    "svec with rows": (svec(**{"3": [V.tolist()] * 2}), Choice(point="pre_attn"), "has 2 rows"),
    "svec with a name": (svec(a=V.tolist()), Choice(point="pre_attn"), "not the number of a layer"),
    "the generator's file": ((DATA / "cvector-generator.gguf").read_bytes(), Choice(), " or cvector-generator)"),
    "hidden_states": (save({"hidden_states.4": V}), Choice(), "final norm"),
    "another point": (save({"layers.4": V}), Choice(point="pre_attn"), "the file has post_block"),
    "another format": (save({"layers.4": V}), Choice("svec"), "has the content of sites"),
    "no format": (save({"layers.4": V}), Choice("gguf"), "not a format"),
    "no point": (npy(V), Choice(layers=(1,), point="resid"), "not a hook point"),
    "no such layer": (save({"layers.4": V}), Choice(layers=(5,)), "5 is not in the file, which has [4]"),
    "a layer twice": (save({"layers.4": V, "resid_post.4": V}), Choice(), "second vector"),
    "a layer beyond all": (npy(V), Choice(layers=(1 << 20,), point="post_block"), "must be 0 to 4095"),
    "a negative layer": (npy(V), Choice(layers=(-1,), point="post_block"), "layer: must be 0 to 4095, not -1"),
    "options so far": (npy(V), Choice("vector", (7,)), "--format vector --layer 7 --point POINT (POINT: pre_attn or"),
    "the row of the embedding": (npy(ROWS), Choice("hidden-states", (-1,)), "layer: must be 0"),
    "unknown names": (save({"foo1": V, "bar2": V}), Choice(), "not the name of a site"),
    "an autoencoder": (save({"W_dec": ROWS, "b_dec": V}), Choice(), "--steering-sae"),
    "three dimensions": (npy(ROWS[None]), Choice(), "shape [1, 5, 8]"),
    "more rows than layers": (npy(np.zeros((5000, 2))), Choice("rows", (1,), "post_block"), "shape [5000, 2]"),
    "integers": (npy(np.arange(8)), Choice(), "int64"),
    "objects": (npy(np.array([None])), Choice(), "object"),
    "a pickle": (b"\x80\x04\x95" + bytes(30), Choice(), "nothing is unpickled"),
    "nothing": (b"", Choice(), "is not a safetensors file"),
    "a text": (b"hello, world", Choice(), "is not a safetensors file"),
    "a JSON list": (b"[0.1, 0.2]", Choice(), 'is a JSON list without a place; write {"hookName"'),
    "JSON of something": (b'{"a": 1}', Choice(), "no format of vectors"),
    "JSON with a key twice": (b'{"directions": {"1": [1], "1": [2]}}', Choice(), "duplicate"),
    "a model": (control_vector({"direction.1": V}, "llama"), Choice(), "only controlvector"),
    "an extension": (control_vector({"direction.1": V}, extra="glp.mode"), Choice(), "glp.mode"),
    "a tensor of something": (control_vector({"token_embd": V}), Choice(), "expected direction.N"),
    "whole numbers in GGUF": (control_vector({"direction.1": np.arange(8, dtype=np.int32)}), Choice(), "dtype 'I32'"),
    "a module with a choice": (write_module(module()), Choice(point="pre_attn"), "names its sites itself"),
    "not finite": (save({"layers.4": V * np.nan}), Choice(), "finite"),
    "unequal widths": (save({"layers.4": V, "layers.5": V[:3]}), Choice(), "width"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    """Catches a guess where a file is ambiguous, and an error without what to do."""
    data, choice, words = REFUSED[case]
    with pytest.raises(SteeringError) as refused:
        read_vector_file(data, choice)
    assert words in str(refused.value)


def test_arguments_of_other_types() -> None:
    """Catches a path or a number that ends in a message about attributes."""
    path: Any = "caa.npy"
    with pytest.raises(SteeringError, match=r"^data: must be the content of a file, as of Path"):
        read_vectors(path)
    layers: Any = 13
    with pytest.raises(SteeringError, match=r"^layers: must be a tuple of layers such as \(13,\), not 13"):
        read_vectors(npy(V), Choice(layers=layers, point="post_block"))


@cache
def valid() -> tuple[bytes, ...]:
    files = [data for data, _, _ in READ.values()]
    return (*files, *((DATA / name).read_bytes() for name in ("repeng.gguf", "layers.safetensors")), pt(torch.ones(8)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_raise_only_steering_errors(data: st.DataObject) -> None:
    """Catches damage, a cut or random bytes behind a known beginning that raise anything else."""
    file = data.draw(st.sampled_from(valid()))
    cut = data.draw(st.integers(0, len(file)))
    noise = data.draw(st.binary(max_size=64))
    layers = data.draw(st.lists(st.integers(0, 5), max_size=1))
    choice = Choice(None, tuple(layers), data.draw(st.sampled_from([None, "post_block"])))
    damaged = file[:cut] + noise + (file[cut + len(noise) :] if data.draw(st.booleans()) else b"")
    try:
        found, _ = read_vector_file(damaged, choice)
    except SteeringError:
        return
    assert found.width


def convert(*words: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["convert", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output


def test_round_trip_with_repeng(tmp_path: Path) -> None:
    """Catches a layer, a number or the model that is lost or moved between repeng's file, ours and a new one."""
    ours, again = tmp_path / "ours.safetensors", tmp_path / "again.gguf"
    shown = convert(DATA / "repeng.gguf", ours, "--layer", 1, "--layer", 2)
    assert "post_block of layer 1, post_block of layer 2" in shown
    convert(ours, again)
    expected = {f"direction.{n}": data for n, data in _directions(DATA / "repeng.gguf").items() if n < 3}
    assert {f"direction.{n}": data for n, data in _directions(again).items()} == expected
    assert read_vector_file(again)[0] == read_vector_file(ours)[0]
    assert read_vector_file(again)[1].model == "llama"


def _directions(path: Path) -> dict[int, list[float]]:
    """Return the directions of a control vector as the library gguf reads them."""
    return {int(tensor.name.split(".")[1]): tensor.data.tolist() for tensor in gguf.GGUFReader(path).tensors}


def test_strength_is_part_of_a_direction(tmp_path: Path) -> None:
    """Catches a strength that a control vector, which has none, drops."""
    content = {"base": {"post_block": {1: {"vector": V, "scale": 2.5}}}}
    write_vector_file(tmp_path / "x.gguf", parse_module(content), ModuleMetadata())
    assert _directions(tmp_path / "x.gguf") == {1: (2.5 * V).tolist()}


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ({"decode": {"post_block": {1: V}}}, "x.gguf", "no place for decode"),
        ({"base": {"pre_attn": {1: V}}}, "x.gguf", "pre_attn of layer 1"),
        ({"base": {"post_block": {0: V}}}, "x.gguf", "post_block of layer 0 .* take those with --layer"),
        ({"base": {"post_block": {1: V}}}, "x.pt", ".safetensors or .gguf"),
    ],
)
def test_what_a_file_cannot_contain_is_not_written(tmp_path: Path, content: Any, name: str, words: str) -> None:
    """Catches a conversion that silently leaves something out."""
    with pytest.raises(SteeringError, match=words):
        write_vector_file(tmp_path / name, parse_module(content), ModuleMetadata())
    assert not (tmp_path / name).exists()


def test_a_module_is_not_read_as_vectors() -> None:
    """Catches advice to rename the tensors of a module's file."""
    with pytest.raises(SteeringError, match="is a tensor of a module's file; register the file as it is"):
        read_vectors(save({"base.post_block.1": V}))


def test_the_options_are_kept() -> None:
    """Catches a module of a bare vector that tells neither the layer nor the point that its user chose."""
    _, about = read_vector_file(npy(V), Choice(layers=(7,), point="pre_attn"))
    assert about.provenance["given"] == "--layer 7 --point pre_attn"
    assert "given" not in read_vector_file(DATA / "repeng.gguf")[1].provenance


def test_command_errors(tmp_path: Path) -> None:
    """Catches a traceback, and an error without the file's name."""
    shown = convert(tmp_path / "none.gguf", tmp_path / "x.gguf", status=1)
    assert "none.gguf" in shown and "No such file" in shown
    (tmp_path / "one.npy").write_bytes(npy(V))
    one, out = tmp_path / "one.npy", tmp_path / "x.gguf"
    shown = convert(one, out, "--layer", 7, status=1).replace("\n", "")
    assert "one.npy: file: has the format vector" in shown
    assert f"vllm-steer convert {one} {out} --layer 7 --point POINT (POINT: pre_attn or" in shown


def test_the_registry_reads_every_file(tmp_path: Path) -> None:
    """Catches a way into the registry that reads our own files only, or two that read a file differently."""
    steering, name = registry(), "foreign.bin"  # recognised by content, not by name
    (tmp_path / name).write_bytes(READ["Neuronpedia's vector"][0])
    by_path = steering.register_file("path", tmp_path / name)
    by_bytes = steering.register_file("bytes", (tmp_path / name).read_bytes())
    steering.ensure_file("flag", tmp_path / name)
    assert by_path.digest == by_bytes.digest == steering.get("flag").digest
