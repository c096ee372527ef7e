# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ run; tests/server covers openai_client.py, tests/peers covers peers/."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from demo.run import MODEL
from demo.texts import mood
from tests.docs.markdown import links
from tests.docs.runner import ENGINE_ENVIRONMENT
from tests.repo.tree import ROOT, files, read
from tests.warm import run_warm
from vllm_steer.capture.results import CapturedRequest, SiteRows
from vllm_steer.request import CaptureSpec

EXAMPLES = ROOT / "examples"
needs_chat_model = pytest.mark.skipif(not MODEL.exists(), reason="the chat model is missing: run `make model`")


def run_example(name: str, *arguments: str) -> dict[str, str]:
    """Run an example in a new process and return its output lines of the form ``label: value``."""
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = os.environ | ENGINE_ENVIRONMENT
    done = run_warm(code, str(EXAMPLES / name), *arguments, environment=environment, folder=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(re.findall(r"^([^:\n]+): (.+)$", done.stdout, re.MULTILINE))


def captured(rows: torch.Tensor) -> CapturedRequest:
    """Return a request with these rows at ``post_block`` of layer 1."""
    return CapturedRequest(
        request_id="a",
        sample=0,
        model="tiny",
        prompt_token_ids=tuple(range(len(rows))),
        output_token_ids=(1,),
        spec=CaptureSpec(hooks={"post_block": [1]}, positions="all"),
        sites={("post_block", 1): SiteRows(np.arange(len(rows)), rows)},
        status="ok",
        error=None,
    )


def test_every_example_is_listed_and_tested() -> None:
    """Catches an example without a test or without a line in the table."""
    names = {path.relative_to("examples").parts[0] for path in files() if path.is_relative_to("examples")}
    assert {link.rstrip("/") for link in links(read("examples/README.md"))} == names - {"README.md"}
    files_with_tests = ("docs/test_examples.py", "engine/test_controllers.py", "server/test_openai_example.py")
    tests = "".join(read(f"tests/{file}") for file in files_with_tests)
    assert [name for name in names if name not in tests] == []


@pytest.mark.slow
@needs_chat_model
def test_offline_steering_changes_the_mood() -> None:
    """Catches an example that runs unsteered, or whose strengths have no effect."""
    shown = run_example("offline_steering.py")
    sad, plain, happy = (mood(shown[f"strength {strength}"]) for strength in (-0.2, 0.0, 0.2))
    assert sad + 2 <= plain <= happy - 2


@pytest.mark.slow
@needs_chat_model
def test_capture_to_disk_reads_what_it_wrote(tmp_path: Path) -> None:
    """Catches files that are not written, or that the reader cannot open."""
    shown = run_example("capture_to_disk.py", str(MODEL), str(tmp_path))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    assert len(shown) == 3
    assert all(" at positions [0, 1" in line for line in shown.values())


@pytest.mark.slow
@needs_chat_model
def test_probe_scores_separate_the_moods() -> None:
    """Catches scores of other rows or of another direction."""
    happy, sad = (float(label.removeprefix("mean score ")) for label in run_example("probes.py"))
    assert happy > 0 > sad


@pytest.mark.slow
@needs_chat_model
def test_global_modules_apply_until_cleared() -> None:
    """Catches a module without effect, and global steering that does not apply or does not end."""
    shown = run_example("global_modules.py")
    assert shown["registered"].startswith("sha256:")
    assert len({shown["plain"], shown["by name"], shown["global"]}) == 3
    assert shown["cleared"] == shown["plain"]


@pytest.mark.slow
def test_lora_and_steering_combine() -> None:
    """Catches an adapter or a vector that is ignored when the other is present."""
    shown = run_example("lora_and_steering.py")
    assert len(shown) == len(set(shown.values())) == 4


def test_example_consumer_computes_means(tmp_path: Path) -> None:
    """Catches an example in capture_consumer that no longer fits the consumer interface."""
    spec = importlib.util.spec_from_file_location("running_mean", EXAMPLES / "capture_consumer/running_mean.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    consumer = module.RunningMean(out=str(tmp_path / "means.safetensors"))
    rows = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[8.0, 0.0]])]
    for each in rows:
        report = consumer.accept(captured(each))
    consumer.close()
    assert report == {"rows": {"post_block.1": 3}}
    assert load_file(tmp_path / "means.safetensors")["post_block.1"].tolist() == [4.0, 2.0]
