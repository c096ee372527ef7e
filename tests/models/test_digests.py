# SPDX-License-Identifier: Apache-2.0
"""Digests: a recipe holds only for the source on which it was proven."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.model_executor.models import dbrx
from vllm.model_executor.models.llama import LlamaDecoderLayer

from scripts.digests import installed_digests
from vllm_steer.compat import syntax
from vllm_steer.models import digests
from vllm_steer.models.digests import NoSourceError, digest_of, proven_digests
from vllm_steer.models.discovery import UnsupportedModelError, find_decoder
from vllm_steer.models.looped_layers import engram_gaps
from vllm_steer.models.recipes import PROVEN, RECIPES

BLOCK = '''
class Block:
    """A block."""

    def forward(self, x: int, residual=None) -> int:
        """Docstring."""
        # A comment.
        y: int = self.attention(x) + self.scale
        return self._rest(y, f"{residual!r:>{x}}")

    def _rest(self, y, text):
        return self.mlp(y), 1e-6, None, ..., text

    def unused(self):
        return 1
'''
# Digest of BLOCK on every version of Python. Changing it invalidates all recorded digests.
DIGEST = "b9c743450dbb4351be97775c557c5af8dc8b9e5f51f6862cd8b3a4e469a5ad00"


def block(source: str, folder: Path) -> type:
    """Return the class ``Block`` of a module with this source."""
    path = folder / f"block_{abs(hash(source))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found: type = module.Block
    return found


def model_of(layer: type) -> Any:
    """Return a model that consists of two uninitialised layers of a class."""
    model = nn.Module()
    model.layers = nn.ModuleList(layer.__new__(layer) for _ in range(2))  # type: ignore[call-overload]
    for each in model.layers:
        nn.Module.__init__(each)
    return model


TWO_LAYERS = SimpleNamespace(num_hidden_layers=2)


def test_table_matches_the_installed_packages() -> None:
    """Catches a recipe without a digest, whose models would all be refused, and code that changed since the proof."""
    for version, found in installed_digests().items():
        listed = proven_digests().get(version, {})
        assert {name: listed.get(name) for name in found} == found, "run python scripts/digests.py, after the proof"


def test_digests_exist_for_proven_recipes_only() -> None:
    """Catches a class that every engine refuses because its digest is missing, and a digest without a recipe."""
    assert {name for found in proven_digests().values() for name in found} == PROVEN


def test_digest_of_a_known_class(tmp_path: Path) -> None:
    """Catches a normal form that depends on the version of Python (ast.dump does)."""
    assert digest_of(block(BLOCK, tmp_path)) == DIGEST


def other_pythons() -> dict[str, str]:
    """Return the other supported versions of Python that this machine has, on the path or beside the current one."""
    found = {}
    for version in sorted({"3.11", "3.12", "3.13"} - {"{}.{}".format(*sys.version_info)}):
        beside = sorted(Path(sys.base_prefix).parent.glob(f"*{version}*/bin/python{version}"))
        for python in (shutil.which(f"python{version}"), *map(str, beside)):
            if python and not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
                found[version] = python
                break
    return found


@pytest.mark.parametrize("python", [pytest.param(path, id=version) for version, path in other_pythons().items()])
def test_digest_is_the_same_on_another_python(python: str, tmp_path: Path) -> None:
    """Catches a normal form that depends on the version of Python, on the versions that this machine has."""
    source = Path(digests.__file__).read_text()
    # The module alone: the other Python has none of its dependencies.
    source = re.sub(r"^from vllm_steer.compat.(.*)$", r"from \1", source, flags=re.MULTILINE)
    source = re.sub(r"^from vllm_steer.*$", "", source, flags=re.MULTILINE)
    (tmp_path / "syntax.py").write_text(Path(syntax.__file__).read_text())
    (tmp_path / "digests.py").write_text(source)
    (tmp_path / "block.py").write_text(BLOCK)
    code = "import block, digests; print(digests.digest_of(block.Block))"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == DIGEST


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment.", "# Another."),
        ('"""Docstring."""', '"""Another."""'),
        ("x: int, residual=None) -> int", "x, residual=None)"),
        ("y: int = self", "y: object = self"),
        ("self.attention(x) + self.scale", "(\n            self.attention(x)\n            + self.scale\n        )"),
        ("return 1", "return 2"),
    ],
)
def test_digest_ignores_what_does_not_compute(old: str, new: str, tmp_path: Path) -> None:
    """Catches a model that is refused because a comment changed."""
    assert old in BLOCK
    assert digest_of(block(BLOCK.replace(old, new), tmp_path)) == digest_of(block(BLOCK, tmp_path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ self.scale", "- self.scale"),
        ("residual=None", "residual=0"),
        ("self.mlp(y)", "self.mlp(y + 1)"),
        ("1e-6", "1e-5"),
        ("None, ...", "..., None"),
        ("_rest", "_other"),
    ],
)
def test_digest_covers_what_computes(old: str, new: str, tmp_path: Path) -> None:
    """Catches a digest that omits an operand, a default, or a method that forward calls."""
    assert old in BLOCK
    assert digest_of(block(BLOCK.replace(old, new), tmp_path)) != digest_of(block(BLOCK, tmp_path))


def test_digest_of_an_inherited_forward_covers_overridden_methods(tmp_path: Path) -> None:
    """Catches a subclass that replaces a method which the inherited forward calls."""
    base = block(BLOCK, tmp_path)
    same = type("Same", (base,), {"unused": lambda self: 5})
    replaced = block(
        BLOCK + "\nclass Base(Block): pass\nclass Block(Base):\n    def _rest(self, y, t): pass\n", tmp_path
    )
    assert digest_of(same) == digest_of(base)
    assert digest_of(replaced) != digest_of(base)


def test_digest_covers_inner_classes_with_hook_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a changed sum inside DBRX's submodule, and a recipe that taps a module which no digest covers."""
    for recipe in RECIPES.values():
        # The memory of an Engram layer has the tap of pre_attn.
        inside = "." in f"{recipe.post_attn or ''}{recipe.attn_out}{recipe.mlp_out}" or recipe.gaps is engram_gaps
        assert inside == bool(recipe.inner_class), recipe.layer_class
    assert digests.why_unproven(dbrx.DbrxBlock) is None
    monkeypatch.setattr(dbrx, "DbrxFusedNormAttention", block(BLOCK, tmp_path))
    assert "differs from the proven source" in (digests.why_unproven(dbrx.DbrxBlock) or "")
    monkeypatch.delattr(dbrx, "DbrxFusedNormAttention")
    assert "DbrxFusedNormAttention" in (digests.why_unproven(dbrx.DbrxBlock) or "")


def test_class_without_source_is_unproven() -> None:
    """Catches a class without source that is accepted because there is nothing to compare."""
    namespace: dict[str, Any] = {}
    exec("class Block:\n def forward(self): pass\n", namespace)  # noqa: S102
    with pytest.raises(NoSourceError):
        digest_of(namespace["Block"])


def test_changed_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that starts on unproven code."""
    name = "vllm.model_executor.models.llama.LlamaDecoderLayer"
    assert find_decoder(model_of(LlamaDecoderLayer), TWO_LAYERS).unproven == ()
    monkeypatch.setattr(digests, "proven_digests", lambda: {"vllm 0.32.0": {name: "0" * 64}})
    with pytest.raises(
        UnsupportedModelError, match=rf"{name}\.forward differs.*vllm-steer doctor MODEL .*--steering-allow-unproven"
    ):
        find_decoder(model_of(LlamaDecoderLayer), TWO_LAYERS)


def test_allowed_changed_source_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an override that hides which class is unproven."""
    monkeypatch.setattr(digests, "proven_digests", dict)
    decoder = find_decoder(model_of(LlamaDecoderLayer), TWO_LAYERS, allow_unproven=True)
    assert len(decoder.layers) == 2
    (doubt,) = decoder.unproven
    assert "LlamaDecoderLayer are not proven in any version" in doubt


class Derived(LlamaDecoderLayer):
    """A user's variant of a proven class."""


def test_derived_class_is_refused_unless_allowed() -> None:
    """Catches a subclass that is steered by its base's recipe without permission, and an override without effect."""
    with pytest.raises(
        UnsupportedModelError,
        match=r"Derived.*derives from .*LlamaDecoderLayer: .*vllm-steer doctor MODEL .*pass --steering-allow",
    ):
        find_decoder(model_of(Derived), TWO_LAYERS)
    decoder = find_decoder(model_of(Derived), TWO_LAYERS, allow_unproven=True)
    assert decoder.layers[0].recipe.layer_class.endswith("LlamaDecoderLayer")
    assert decoder.unproven


def test_unrelated_class_is_refused_even_if_unproven_is_allowed() -> None:
    """Catches an override that taps a class without any recipe."""
    with pytest.raises(UnsupportedModelError, match="no recipe for its decoder layers"):
        find_decoder(model_of(nn.TransformerEncoderLayer), TWO_LAYERS, allow_unproven=True)
