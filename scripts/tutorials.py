# SPDX-License-Identifier: Apache-2.0
"""Run the tutorials, and write what they print, their pictures and their notebooks.

    python scripts/tutorials.py [NAME...]       run all tutorials, or some
    python scripts/tutorials.py --notebooks     write only the notebooks, from the pages

A page of ``docs/tutorials`` is the one source of its tutorial. Its Python blocks run in order in one namespace, with
the chat model of ``scripts/chat_model.py``. A ``text`` block behind a Python block is what that block printed. Blocks
from the first ``vllm serve`` on run at the end, against one server with the modules of all pages. A notebook has the
same text, code and output; its pictures are those of ``docs/assets``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
FOLDER, ASSETS = ROOT / "docs" / "tutorials", ROOT / "docs" / "assets"
PAGES = ("which-layer-knows", "monitor", "tone", "thousands-of-rows", "autoencoder")
"""In the order in which they run: a later one may read files of an earlier one."""
PUBLISHED, LOCAL = "HuggingFaceTB/SmolLM2-135M-Instruct", ROOT / ".models" / "SmolLM2-135M-Instruct"
SERVER = "http://localhost:8000"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SERVE = "vllm serve "

Namespace = dict[str, Any]
Serve = Callable[[Sequence[str]], AbstractContextManager[str]]
"""Starts a server with these flags, and returns its URL."""


class Cell(NamedTuple):
    """A part of a page: ``kind`` is the language of a block, or ``prose``."""

    kind: str
    text: str


def cells(page: str) -> list[Cell]:
    """Return the parts of a page in order."""
    found, end = [], 0
    for fence in FENCE.finditer(page):
        found += [Cell("prose", page[end : fence.start()]), Cell(fence[1], fence[2])]
        end = fence.end()
    found.append(Cell("prose", page[end:]))
    return [cell for cell in found if cell.text.strip()]


def filled(page: str, outputs: Sequence[str]) -> str:
    """Return the page with the outputs of its Python blocks, in order."""
    left, parts = list(outputs), []
    for cell in cells(page):
        if cell.kind == "prose":
            parts.append(cell.text.strip("\n"))
        elif cell.kind != "text":
            parts.append(f"```{cell.kind}\n{cell.text}```")
        if cell.kind == "python" and (printed := left.pop(0)):
            parts.append(f"```text\n{printed}```")
    return "\n\n".join(parts) + "\n"


def notebook(page: str) -> str:
    """Return the page as a notebook (nbformat 4.5): Python blocks are code cells, all else is Markdown."""
    made: list[dict[str, Any]] = []
    for cell in cells(page):
        lines = cell.text.strip("\n").splitlines(keepends=True)
        if cell.kind == "python":
            made.append({"cell_type": "code", "execution_count": None, "outputs": []})
        elif cell.kind == "text":
            printed = {"output_type": "stream", "name": "stdout", "text": cell.text.splitlines(keepends=True)}
            made[-1]["outputs"] = [printed]
            continue
        else:
            made.append({"cell_type": "markdown"})
            if cell.kind != "prose":
                lines = f"```{cell.kind}\n{cell.text}```".splitlines(keepends=True)
        made[-1] |= {"id": f"cell-{len(made)}", "metadata": {}, "source": lines}
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    document = {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


class Engines:
    """Replaces ``LLM``: pages with equal settings share an engine, and there is one engine at a time."""

    def __init__(self, close: Callable[[Any], None]) -> None:
        self._close = close
        self._settings: dict[str, Any] | None = None
        self._llm: Any = None

    def __call__(self, model: str, **settings: Any) -> Any:
        from vllm_steer.llm import LLM

        if model != PUBLISHED:
            raise ValueError(f"{model} is not {PUBLISHED}")
        if settings != self._settings:
            self.close()
            self._llm = LLM(str(LOCAL), use_tqdm_on_load=False, disable_log_stats=True, **settings)
            self._settings = settings
        return self._llm

    def close(self) -> None:
        """Shut down the engine, if there is one."""
        if self._llm is not None:
            llm, self._llm, self._settings = self._llm, None, None
            self._close(llm)


def run(blocks: Sequence[Cell], namespace: Namespace, name: str) -> list[str]:
    """Run the Python blocks of a page, and return what each prints."""
    printed = []
    for number, block in enumerate(each for each in blocks if each.kind == "python"):
        sink = io.StringIO()
        namespace["print"] = partial(print, file=sink)  # not stdout, which has vLLM's log as well
        exec(compile(block.text, f"{name}, block {number}", "exec"), namespace)  # noqa: S102
        printed.append(sink.getvalue())
    return printed


def run_pages(
    pages: dict[str, str], folder: Path, close: Callable[[Any], None], serve: Serve
) -> tuple[dict[str, list[str]], dict[str, Namespace]]:
    """Run all pages in a folder.

    Args:
        pages: Texts by name.
        folder: Working directory, in which the pages write their files.
        close: Shuts down an engine.
        serve: Starts a server.

    Returns:
        What each Python block prints, and the variables of each page.
    """
    import matplotlib

    matplotlib.use("Agg")
    outputs: dict[str, list[str]] = {}
    spaces: dict[str, Namespace] = {name: {"__name__": "__main__"} for name in pages}
    later: dict[str, list[Cell]] = {}
    flags: list[str] = []
    engines = Engines(close)
    with contextlib.chdir(folder), patch("vllm_steer.LLM", engines):
        for name, page in pages.items():
            found = cells(page)
            start = next((i for i, cell in enumerate(found) if cell.text.startswith(SERVE)), len(found))
            outputs[name] = run(found[:start], spaces[name], name)
            for cell in found[start : start + 1]:
                command = shlex.split(cell.text, comments=True)
                flags += command[command.index("--steering-modules") :]
            later[name] = found[start:]
        for space in spaces.values():
            space.pop("llm", None)
        engines.close()
        if any(cell.kind == "python" for rest in later.values() for cell in rest):
            with serve(flags) as url:
                for name, rest in later.items():
                    there = [cell._replace(text=cell.text.replace(SERVER, url)) for cell in rest]
                    outputs[name] += run(there, spaces[name], name)
    return outputs, spaces


def shut_down(llm: Any) -> None:
    """Shut down an engine of this process, so that another can start."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """Run a server in another process."""
    from demo.server import running_server

    with tempfile.TemporaryDirectory() as folder, running_server(LOCAL, Path(folder) / "server.log", *flags) as url:
        yield url.removesuffix("/v1")


def read_pages() -> dict[str, str]:
    """Return the texts of the pages by name."""
    return {name: (FOLDER / f"{name}.md").read_text() for name in PAGES}


def main() -> None:
    pages = read_pages()
    if named := [name for name in pages if name in sys.argv]:
        pages = {name: pages[name] for name in named}
    if "--notebooks" not in sys.argv:
        sys.path.insert(0, str(ROOT))
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        with tempfile.TemporaryDirectory() as folder:
            outputs, _ = run_pages(pages, Path(folder), shut_down, served)
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, ASSETS / picture.name)
        pages = {name: filled(page, outputs[name]) for name, page in pages.items()}
    for name, page in pages.items():
        (FOLDER / f"{name}.md").write_text(page)
        (FOLDER / f"{name}.ipynb").write_text(notebook(page))


if __name__ == "__main__":
    main()
