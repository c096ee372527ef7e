# SPDX-License-Identifier: Apache-2.0
"""The tutorials run on the chat model and print what their pages show; the notebooks are those of the pages."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.docs.markdown import links, tables
from tests.engine.conftest import close
from tests.repo.tree import ROOT, load_script, read
from tests.server.server import run_server

script: ModuleType = load_script("tutorials")
PAGES: dict[str, str] = script.read_pages()
VARIES = ("autoencoder",)
"""Pages whose training amplifies the last bit of the rows, which CPUs round differently; their claims have a test."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.]*\w)%?")


class Ran(NamedTuple):
    """What the Python blocks of each page printed, the variables of each page, and the files that they wrote."""

    outputs: dict[str, list[str]]
    spaces: dict[str, dict[str, Any]]
    files: set[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    if not (script.LOCAL / "config.json").exists():
        pytest.skip("the chat model is missing: run `make model`")
    folder = tmp_path_factory.mktemp("tutorials")

    @contextmanager
    def served(flags: Sequence[str]) -> Iterator[str]:
        log = tmp_path_factory.mktemp("server") / "log"
        yield from run_server(script.LOCAL, ["--enable-steering", *flags], log, warm=True)

    outputs, spaces = script.run_pages(PAGES, folder, close, served)
    yield Ran(outputs, spaces, {path.name for path in folder.iterdir()})


def numbers(text: str) -> list[float]:
    return [float(each.rstrip("%")) for each in NUMBER.findall(text)]


def agree(found: str, shown: str) -> bool:
    """Return whether two outputs have the same words, and numbers that are equal but for rounding."""
    if NUMBER.sub("#", found).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(numbers(found), numbers(shown), strict=True)
    return all(a == pytest.approx(b, rel=0.05, abs=0.11) for a, b in pairs)


def recorded(page: str) -> list[str]:
    """Return what the Python blocks of a page print, by the page."""
    outputs: list[str] = []
    for cell in script.cells(page):
        if cell.kind == "python":
            outputs.append("")
        elif cell.kind == "text":
            outputs[-1] = cell.text
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_their_code_prints(ran: Ran, name: str) -> None:
    """Catches code that no longer runs, and output that is written by hand or by earlier code."""
    for found, shown in zip(ran.outputs[name], recorded(PAGES[name]), strict=True):
        if name in VARIES:
            found, shown = (re.sub(r".+", "a line", text) for text in (found, shown))
        assert agree(found, shown), f"{name} prints\n{found}\ninstead of\n{shown}\nRun scripts/tutorials.py"


@pytest.mark.slow
def test_pictures_are_drawn_by_the_pages(ran: Ran) -> None:
    """Catches a picture from elsewhere."""
    shown = {Path(link).name for page in PAGES.values() for link in links(page) if link.endswith(".png")}
    assert shown == {name for name in ran.files if name.endswith(".png")}


@pytest.mark.slow
def test_the_capital_moves_from_the_country_to_the_last_token(ran: Ran) -> None:
    """Catches a study whose text no longer fits: early, the country decides; late, the last token."""
    space = ran.spaces["which-layer-knows"]
    assert len(space["known"]) >= 8
    grid = space["grid"]
    assert grid[:4, -2].min() > 0.8 and grid[-3:, -2].max() < 0.2
    assert grid[:4, -1].max() < 0.2 and grid[-3:, -1].min() > 0.8
    moved, lens = space["patched"][int((grid[:, -1] > 0.5).argmax())], space["lens"].mean(0)
    readable = space["layers"][int((lens > -3).argmax())]
    assert lens[-1] > -3 > lens[0]
    assert readable >= moved


@pytest.mark.slow
def test_the_monitor_stops_violence_only(ran: Ran) -> None:
    """Catches a probe that learned nothing, a bound that is never crossed, and a stop at any text."""
    space = ran.spaces["monitor"]
    assert space["right"][space["LAYER"]] >= 0.85
    assert all(space["highest"](scores) <= space["bound"] for scores in space["calm"])
    stopped = [answer.stop_reason is not None for answer in space["watched"]]
    assert stopped == [True, False, False]
    assert space["streamed"] == space["watched"][0].text


@pytest.mark.slow
def test_the_tone_is_beyond_random_vectors(ran: Ran) -> None:
    """Catches a vector without an effect of its own, and text that is not text."""
    space = ran.spaces["tone"]
    best = space["best"]
    assert space["effect"][best] > 1.5 * abs(space["found"]).max()
    assert space["cost"][best] <= 2 * space["cost"][0]
    assert space["answer"].applied.modules[0].name == "cheerful"


@pytest.mark.slow
def test_the_topic_is_in_the_rows(ran: Ran) -> None:
    """Catches too few rows, lost labels, a split that no longer leaks, and sampled rows that do not fit answers."""
    space = ran.spaces["thousands-of-rows"]
    assert len(space["rows"][12]) >= 4_000
    assert space["captures"].missing() == []
    assert max(space["found"].values()) > 3 / len(space["TOPICS"])
    assert space["leaked"] > max(space["found"].values()) + 0.1
    assert space["explained"]["answers"] > space["explained"]["questions"] + 0.2


@pytest.mark.slow
def test_features_notice_and_bring_their_topics(ran: Ran) -> None:
    """Catches (1) weights in another scale than the engine reads, and (2) features without an effect of their own.

    With features that are paired with other topics, the counts are those of chance.
    """
    space = ran.spaces["autoencoder"]
    read, change = space["read"], space["change"]
    trained = [float(space["means"].max(0).values[feature]) for feature in space["features"]]
    assert 0.5 < sum(read.diagonal()) / sum(trained) < 2
    for matrix, count in ((read.T, space["noticed"].sum()), (change, space["most"].sum())):  # [features, topics]
        size = len(matrix)
        other = (matrix.sum() - matrix.trace()) / (size * size - size)
        assert size >= 20 and count >= size / 3
        assert matrix.trace() / size > 3 * abs(other)
        assert (np.roll(matrix, 1, 0).argmax(0) == np.arange(size)).sum() <= size / 4


@pytest.mark.parametrize("name", PAGES)
def test_notebooks_are_those_of_the_pages(name: str) -> None:
    """Catches a notebook that was edited, and a page that was changed without its notebook."""
    text = script.notebook(PAGES[name])
    assert read(f"docs/tutorials/{name}.ipynb") == text, "run python scripts/tutorials.py --notebooks"
    cells = json.loads(text)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for block in code:
        compile(block, name, "exec")
    assert len(code) == sum(cell.kind == "python" for cell in script.cells(PAGES[name]))


@pytest.mark.parametrize("name", PAGES)
def test_filling_a_page_keeps_it(name: str) -> None:
    """Catches a writer that loses prose or commands, or moves an output."""
    assert script.filled(PAGES[name], recorded(PAGES[name])) == PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_figures_in_the_prose_are_printed(name: str) -> None:
    """Catches a measured figure in the text that no code of the page prints."""
    cells = script.cells(PAGES[name])
    prose = " ".join(cell.text for cell in cells if cell.kind == "prose")
    printed = " ".join(cell.text for cell in cells if cell.kind == "text")
    figures = re.findall(r"(?<![\w./-])\d+\.\d+|\d+ ?%", re.sub(r"\]\([^)]*\)", "]", prose))
    assert [figure for figure in figures if figure not in printed] == []


def test_every_tutorial_is_listed() -> None:
    """Catches a page without a row in the list, in the navigation or among those that run."""
    (rows,) = tables(read("docs/tutorials/index.md"))
    assert len(rows) == len(PAGES) + 1
    names = {Path(link).stem for link in links(read("docs/tutorials/index.md")) if link.endswith(".ipynb")}
    pages = {path.stem for path in (ROOT / "docs/tutorials").glob("*.md")} - {"index"}
    assert names == pages == set(PAGES)
    assert [name for name in pages if f"tutorials/{name}.md" not in read("mkdocs.yml")] == []


@pytest.mark.parametrize(
    ("found", "shown"),
    [("a 1.0\n", "a 1.2\n"), ("a 1.0\n", "b 1.0\n"), ("a 1 2\n", "a 1\n"), ("20 rows\n", "22 rows\n")],
)
def test_other_outputs_are_noticed(found: str, shown: str) -> None:
    """Catches a comparison that accepts every output."""
    assert not agree(found, shown)


def test_equal_settings_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine per page, and one that is left running beside the next."""
    import vllm_steer.llm

    numbered, closed = itertools.count(), []
    monkeypatch.setattr(vllm_steer.llm, "LLM", lambda model, **settings: next(numbered))
    engines = script.Engines(closed.append)
    found = [engines(script.PUBLISHED, dtype=dtype) for dtype in ("a", "a", "b")]
    engines.close()
    assert found == [0, 0, 1]
    assert closed == [0, 1]
