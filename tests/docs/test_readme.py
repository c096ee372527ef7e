# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the README and of the guides on installing and steering run and show an effect."""

import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from demo.run import MODEL
from tests.docs.markdown import Block, blocks
from tests.docs.runner import blocks_of, run_python, run_with_fake_curl
from tests.repo.tree import ROOT, load_script, read
from vllm_steer.points import points_on
from vllm_steer.request import parse_fields

README, INSTALL, STEERING = "README.md", "docs/guides/install.md", "docs/guides/steering.md"
PAGES = (README, INSTALL, STEERING, "CONTRIBUTING.md")


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason="the chat model is missing: run `make model`")
def test_readme_example_has_the_quoted_answers() -> None:
    """Catches an example that no longer runs, whose effect is not visible, or whose answers are not the quoted ones."""
    example = Block("python", load_script("check_wheel").quick_start(read(README)), 1, README)
    plain, sad = run_python([example], "[output.outputs[0].text for output in outputs]", warm=False)
    quoted = re.search(r'first answer begins "(.+?)", the steered one "(.+?)"', read(README), re.DOTALL)
    # Words behind these have near ties, which processors round differently.
    assert quoted and [plain.split()[:4], sad.split()[:4]] == [each.split()[:4] for each in quoted.groups()]
    assert quoted[1].split()[:4] != quoted[2].split()[:4]


@pytest.mark.slow
def test_steering_guide_runs_and_steers() -> None:
    """Catches an example that no longer runs, or runs unsteered, and a chat with another prompt."""
    texts = "[each.outputs[0].text for each in (*outputs, answer)]"
    plain, steered, chat = run_python(blocks_of(STEERING, "python"), texts)
    assert plain and steered and plain != steered
    assert chat == steered


def test_runner_keeps_one_namespace_and_reports_failures() -> None:
    """Catches a runner that passes whatever the blocks do."""
    for warm in (False, True):
        assert (
            run_python([Block("python", "a = 1", 1, "x.md"), Block("python", "b = a + 1", 5, "x.md")], "b", warm=warm)
            == 2
        )
        with pytest.raises(pytest.fail.Exception, match=r'x\.md", line 8'):
            run_python([Block("python", "1 / 0", 7, "x.md")], "1", warm=warm)


def test_every_block_has_a_tested_language() -> None:
    """Catches a block that no test covers."""
    assert {block.language for page in PAGES for block in blocks(read(page))} <= {"python", "bash"}


def test_shell_blocks_are_valid() -> None:
    """Catches a syntax error, and a missing make target or command."""
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    for block in (block for page in PAGES for block in blocks_of(page, "bash")):
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        assert set(re.findall(r"^make ([\w-]+)", block.code, re.MULTILINE)) <= targets, block
        for command in re.findall(r"^\.venv/bin/([\w-]+)", block.code, re.MULTILINE):
            assert Path(sys.executable).with_name(command).exists(), block


def test_request_bodies_are_accepted(tmp_path: Path) -> None:
    """Catches a body that is not JSON, is refused, or has a vector of the wrong width."""
    requests = {
        page: [block for block in blocks_of(page, "bash") if block.code.startswith("curl")]
        for page in (README, STEERING)
    }
    assert all(requests.values())
    widths = {
        "demo/model": json.loads((ROOT / "demo/model/config.json").read_text())["hidden_size"],
        "Qwen/Qwen3-0.6B": 1024,
    }
    for block in chain.from_iterable(requests.values()):
        body = json.loads(run_with_fake_curl(block, tmp_path))
        edits = parse_fields({name: value for name, value in body.items() if "steering" in name})
        assert edits
        assert {edit.vector.size for edit in edits} == {widths[body["model"]]}


def test_steering_guide_describes_every_default_hook_point() -> None:
    """Catches a new hook point that the guide does not mention."""
    described = re.findall(r"^\* `(\w+)` is `", read(STEERING), re.MULTILINE)
    assert described == list(points_on(()))
