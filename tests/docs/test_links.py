# SPDX-License-Identifier: Apache-2.0
"""Links between the Markdown files lead somewhere."""

from pathlib import Path

import pytest

from tests.docs.markdown import anchors, links
from tests.repo.tree import ROOT, files, offenders, read


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    return [link for link in links(read(page)) if "://" not in link and not exists(page, link)]


def exists(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    if anchor and target.suffix == ".md":
        return target.is_file() and anchor in anchors(target.read_text(encoding="utf-8"))
    return target.exists()


def test_links_lead_to_files_and_headings() -> None:
    """Catches a link to a page that was moved or to a heading that was renamed."""
    pages = [path for path in files() if path.suffix == ".md"]
    assert len(pages) > 20
    assert offenders(pages, broken_links) == {}


@pytest.mark.parametrize("link", ["gone.md", "docs/gone.md#x", "README.md#gone", "#gone"])
def test_broken_links_are_found(link: str) -> None:
    """Catches a check that accepts every link."""
    assert not exists(Path("README.md"), link)


def test_valid_links_pass() -> None:
    """Catches a check that rejects links to headings, folders and pictures."""
    for link in ("#cost", "docs/index.md", "examples", "docs/guides/steering.md#over-http"):
        assert exists(Path("README.md"), link), link


def test_links_in_html_are_found() -> None:
    """Catches a picture with a width, written in HTML, whose file may be missing."""
    assert list(links('<a href="a.md"><img src="b.png" width="9"></a> [c](d.md)')) == ["a.md", "b.png", "d.md"]
