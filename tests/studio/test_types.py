# SPDX-License-Identifier: Apache-2.0
"""TypeScript's compiler finds no error in the page's modules."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.repo.tree import ROOT
from tests.studio.npm import unpack

PAGE = ROOT / "vllm_steer" / "studio" / "page"
OPTIONS = [
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--noImplicitAny", "false", "--skipLibCheck"),
    *("--useUnknownInCatchVariables", "false", "--target", "es2023", "--module", "esnext"),
    *("--moduleResolution", "bundler", "--lib", "es2024,dom,dom.iterable,dom.asynciterable"),
]
"""Strict, but parameters without a type and caught errors may be anything."""


def check(page: Path, compiler: Path) -> str:
    """Return the errors of the compiler."""
    command = [shutil.which("node") or "node", compiler / "bin" / "tsc", *OPTIONS, "app.js"]
    return subprocess.run(command, cwd=page, capture_output=True, text=True, timeout=300).stdout


def test_types(tmp_path: Path) -> None:
    """Catches a misspelt field, a null that is used, and a wrong argument. Modules of others are not checked."""
    page = tmp_path / "page"
    shutil.copytree(PAGE, page)
    for path in (page / "vendor").glob("*.js"):
        path.write_text(f"// @ts-nocheck\n{path.read_text()}")
    compiler = unpack("typescript@5.9.3", tmp_path)
    assert check(page, compiler) == ""
    turn = page / "turn.js"
    turn.write_text(turn.read_text().replace("this.tokens.length", "this.tokens.lenght"))
    assert "'lenght'" in check(page, compiler)
