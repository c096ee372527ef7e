# SPDX-License-Identifier: Apache-2.0
"""Tests of finding decoder-layer classes in source and comparing them with the proven ones."""

from __future__ import annotations

import pytest

from scripts.releases.layers import LayerChange, digest_of_layer, layer_changes
from vllm_steer.compat.sources import SourceTree, installed_source, installed_version
from vllm_steer.models.digests import proven_digests
from vllm_steer.models.recipes import RECIPES

LLAMA = "vllm.model_executor.models.llama.LlamaDecoderLayer"
FORWARD = "    def forward(self, x):\n        return self.attn(x) + {}\n    def attn(self, x):\n        return x\n"


def tree(llama: str = "1", others: str = "") -> SourceTree:
    """Return a version with a Llama layer that adds ``llama``, and other classes in its module."""
    text = f"class LlamaDecoderLayer(nn.Module):\n{FORWARD.format(llama)}{others}"
    return SourceTree({"vllm/model_executor/models/llama.py": text}, "9.9.9")


def test_digests_are_those_of_the_imported_classes() -> None:
    """Catches a digest from source that differs from the digest of the imported class, for all proven classes."""
    source = installed_source()
    proven = proven_digests().get(f"vllm {installed_version()}")
    if proven is None:
        pytest.skip("no digests are recorded for this version")
    found = {name: digest_of_layer(source, name, RECIPES[name].inner_class) for name in proven}
    assert found == proven


def test_finds_changed_new_and_gone_layers() -> None:
    """Catches a changed ``forward`` that is not listed, and a subclass without its recipe."""
    child = "class ChildDecoderLayer(LlamaDecoderLayer):\n    pass\n"
    other = "class OtherDecoderLayer(LlamaDecoderLayer):\n    def forward(self, x):\n        return x\n"
    assert layer_changes(tree(), tree()) == []
    module = LLAMA.rpartition(".")[0]
    assert layer_changes(tree(), tree("2", child + other)) == [
        LayerChange(f"{module}.ChildDecoderLayer", "new", LLAMA, "add a recipe and prove it"),
        LayerChange(LLAMA, "changed", LLAMA, "prove again"),
        LayerChange(f"{module}.OtherDecoderLayer", "new", "", "add a recipe and prove it"),
    ]
    assert layer_changes(tree(others=child), tree()) == [LayerChange(f"{module}.ChildDecoderLayer", "gone")]


def test_methods_that_forward_calls_count() -> None:
    """Catches a change in a method that ``forward`` reaches through ``self``, and a change elsewhere that counts."""
    name = LLAMA
    same = tree(others="    def load(self):\n        return 1\n")
    text = f"class LlamaDecoderLayer(nn.Module):\n{FORWARD.format(1)}".replace("return x\n", "return 2 * x\n")
    changed = SourceTree({"vllm/model_executor/models/llama.py": text}, "9.9.9")
    assert digest_of_layer(tree(), name) == digest_of_layer(same, name)
    assert digest_of_layer(tree(), name) != digest_of_layer(changed, name)
