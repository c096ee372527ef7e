# SPDX-License-Identifier: Apache-2.0
"""Runs in a directory: names, the order of submission, indexing, and requests by tag."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.capture.captured import assert_same, captured
from tests.server.fakes import REPORT
from vllm_steer.capture import CapturedRequest
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.layouts import LayoutName
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.results import SiteRows, SubmittedRequest, Unreached
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.errors import SteeringError

LAYOUTS: tuple[LayoutName, ...] = ("per_request", "packed", "sharded")
ENDED = (3, 0, 11, 2, 10, 1)
"""Submission numbers in the order in which the requests end, which is neither numerical nor alphabetical."""


def request(number: int, sample: int = 0, seed: int = 0) -> CapturedRequest:
    """Return a request whose id is its number, as offline."""
    found = captured(str(number), seed=seed + number, sample=sample, rows=2, options={"tag": f"prompt {number}"})
    return dataclasses.replace(found, submission=number)


def write(
    root: Path, requests: list[CapturedRequest], layout: LayoutName = "packed", run: str | None = None, **options: bool
) -> None:
    """Submit requests in the order of their numbers, and store them in the given order."""
    consumer = FilesystemConsumer(root=str(root), layout=layout, run=run, **options)
    for each in sorted(requests, key=lambda request: (request.submission, request.sample)):
        assert each.submission is not None
        consumer.begin(SubmittedRequest(each.request_id, each.sample, each.submission, each.spec))
    for each in requests:
        consumer.accept(each)
    consumer.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_of_submission(tmp_path: Path, layout: LayoutName) -> None:
    """Catches (1) the order of names, hashes or endings, (2) 10 before 2, and (3) requests of two runs that mix."""
    first, second = ([request(number, seed=seed) for number in ENDED] for seed in (0, 100))
    write(tmp_path, first, layout, "z, but first")
    write(tmp_path, second, layout, "a")
    captures = open_captures(tmp_path)
    assert captures.runs == ("z, but first", "a")
    assert len(captures) == 2 * len(ENDED)
    expected = [*sorted(first, key=lambda each: each.submission), *sorted(second, key=lambda each: each.submission)]
    for i, (stored, each) in enumerate(zip(captures, expected, strict=True)):
        assert stored.submission == each.submission
        assert_same(stored, each)
        assert_same(captures[i], each)
        assert_same(captures[i - len(expected)], each)
    assert [stored.request_id for stored in captures[1:4]] == ["1", "2", "3"]
    with pytest.raises(IndexError):
        captures[2 * len(ENDED)]


def test_samples_follow_their_request(tmp_path: Path) -> None:
    """Catches samples in the order of their ends."""
    write(tmp_path, [request(1, 0), request(0, 1), request(1, 1), request(0, 0)])
    assert [(stored.submission, stored.sample) for stored in open_captures(tmp_path)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_one_run(tmp_path: Path) -> None:
    """Catches requests of another run that has the same ids."""
    write(tmp_path, [request(0), request(1)], run="a")
    write(tmp_path, [request(0, seed=100)], run="b")
    (stored,) = open_captures(tmp_path, run="b")
    assert_same(stored, request(0, seed=100))
    assert open_captures(tmp_path, run="b").runs == ("b",)
    assert [found.run for found in open_captures(tmp_path).find("0")] == ["a", "b"]
    assert [found.run for found in open_captures(tmp_path, run="a").find("0")] == ["a"]
    with pytest.raises(ValueError, match="has no run 'c'; runs: 'a', 'b'"):
        open_captures(tmp_path, run="c")


def test_name_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    """Catches a second run with one name, whose lost requests are hidden and whose requests mix with the first's."""
    write(tmp_path, [request(0)], run="baseline")
    with pytest.raises(
        SteeringError,
        match=r"run: .* already has requests of a run 'baseline'; choose another name, .* or set resume=true",
    ):
        write(tmp_path, [request(0, seed=100)], run="baseline")
    write(tmp_path, [request(0)], run="other")
    write(tmp_path, [request(0)])
    write(tmp_path / "elsewhere", [request(0)], run="baseline")
    assert open_captures(tmp_path).runs[:2] == ("baseline", "other")
    assert not [*tmp_path.glob(".*.run")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_goes_on(tmp_path: Path, layout: LayoutName) -> None:
    """Catches a restart that fails, repeats numbers, changes stored rows, or hides the requests that were lost."""
    before = [request(0), request(1, 0), request(1, 1)]
    write(tmp_path, before, layout, "x", resume=True)
    first = FilesystemConsumer(root=str(tmp_path), layout=layout, run="x", resume=True)
    first.begin(SubmittedRequest("lost", 0, 0, before[0].spec))
    first.close()
    write(tmp_path, [request(7, seed=50)], layout, "y")
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    after = [request(0, seed=100), request(1, seed=100)]
    write(tmp_path, after, layout, "x", resume=True)
    assert {path: path.read_bytes() for path in files} == files
    captures = open_captures(tmp_path, run="x")
    assert [(each.submission, each.sample) for each in captures] == [(0, 0), (1, 0), (1, 1), (3, 0), (4, 0)]
    for stored, each in zip(captures, [*before, *after], strict=True):
        assert_same(stored, each)
    assert [(entry.submission, entry.request_id) for entry in captures.missing()] == [(2, "lost")]
    assert open_captures(tmp_path).runs == ("x", "y")


@pytest.mark.parametrize("step", [1, -3600], ids=["ascending clock", "clock set back"])
def test_submitted_requests_of_a_resumed_run(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches submitted and missing requests in the order of the journals instead of by run and submission."""
    clock = iter(range(10**18, 2 * 10**18 if step > 0 else 0, step * 10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    spec = request(0).spec
    for run in ("x", "y", "x"):
        consumer = FilesystemConsumer(root=str(tmp_path), run=run, resume=True)
        for submission, sample in ((0, 0), (0, 1), (1, 0)):
            consumer.begin(SubmittedRequest(str(submission), sample, submission, spec))
        consumer.close()
    captures = open_captures(tmp_path)
    numbers = {run: [(0, 0), (0, 1), (1, 0)] for run in ("x", "y")}
    numbers["x"] += [(2, 0), (2, 1), (3, 0)]
    expected = [(run, *number) for run in captures.runs for number in numbers[run]]
    assert [(entry.run, entry.submission, entry.sample) for entry in captures.submitted()] == expected
    assert captures.missing() == captures.submitted()
    assert sorted(captures.runs) == ["x", "y"]


def test_a_run_is_resumed_after_requests_that_the_journal_lacks(tmp_path: Path) -> None:
    """Catches a number that a stored request has already, because its line of the journal was not written."""
    write(tmp_path, [request(0), request(4)], run="x")
    for journal in tmp_path.glob("requests-*"):
        journal.unlink()
    write(tmp_path, [request(0, seed=100)], run="x", resume=True)
    assert [stored.submission for stored in open_captures(tmp_path)] == [0, 4, 5]


def test_failed_requests_of_a_resumed_run(tmp_path: Path) -> None:
    """Catches the reason of a failure under the number of another request."""
    write(tmp_path, [request(0)], run="x")
    consumer = FilesystemConsumer(root=str(tmp_path), run="x", resume=True)
    bad = dataclasses.replace(request(0), sites={("post_block", 1): SiteRows(np.arange(2), torch.zeros(3, 4))})
    with pytest.raises(ValueError, match="3 captured rows"):
        consumer.accept(bad)
    consumer.close()
    (missing,) = open_captures(tmp_path).missing()
    assert (missing.submission, "3 captured rows" in str(missing.error)) == (1, True)


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    """Catches rows of two models in one run, a name that stays locked, and an option that is ignored."""
    write(tmp_path, [request(0)], run="x")
    capabilities = Capabilities.merge([REPORT], SteeringConfig())
    options = {"root": str(tmp_path), "run": "x", "resume": True}
    found = r"capture_consumers.filesystem.run: 'x' has requests of the model '.*', not 'another'; choose another name"
    with pytest.raises(SteeringError, match=found):
        CaptureManager(capabilities, "another", {"filesystem": options})
    CaptureManager(capabilities, request(0).model, {"filesystem": options}).close()
    first = FilesystemConsumer(**options)
    with pytest.raises(SteeringError, match="run: a running process writes the run 'x'"):
        FilesystemConsumer(**options)
    first.close()
    with pytest.raises(SteeringError, match="resume: has no effect without run"):
        FilesystemConsumer(root=str(tmp_path), resume=True)
    (tmp_path / "a.safetensors").write_bytes(b"damaged")
    with pytest.raises(SteeringError, match=r"run: cannot read the runs of the directory: .*a\.safetensors"):
        FilesystemConsumer(**options)


def test_name_of_a_running_writer_is_refused(tmp_path: Path) -> None:
    """Catches two writers that share a name because neither has a request yet, and a name that stays taken."""
    first = FilesystemConsumer(root=str(tmp_path), run="baseline")
    with pytest.raises(SteeringError, match="run: a running process writes the run 'baseline'"):
        FilesystemConsumer(root=str(tmp_path), run="baseline")
    FilesystemConsumer(root=str(tmp_path), run="other").close()
    first.close()
    (tmp_path / f".{hashlib.blake2b(b'baseline', digest_size=16).hexdigest()}.run").touch()  # of a killed process
    write(tmp_path, [request(0)], run="baseline")
    assert open_captures(tmp_path).runs == ("baseline",)


def test_damaged_journal_and_a_named_run(tmp_path: Path) -> None:
    """Catches a name that is accepted unchecked, and a traceback instead of what to do."""
    (tmp_path / "requests-1.jsonl").write_bytes(b"{\n")
    with pytest.raises(SteeringError, match=r"run: cannot read the runs of the directory: .* or leave it out"):
        FilesystemConsumer(root=str(tmp_path), run="baseline")
    FilesystemConsumer(root=str(tmp_path)).close()


def test_generated_names_are_in_the_order_of_the_starts(tmp_path: Path) -> None:
    """Catches two runs without a name of their own that share one, and runs in the order of their random parts."""
    for seed in range(4):
        write(tmp_path, [request(0, seed=seed)])
    captures = open_captures(tmp_path)
    assert len(set(captures.runs)) == 4 and captures.runs == tuple(sorted(captures.runs))
    for seed, stored in enumerate(captures):
        assert_same(stored, request(0, seed=seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_find_by_tag(tmp_path: Path, layout: LayoutName) -> None:
    """Catches a tag that finds other requests, and the order of names."""
    write(tmp_path, [request(number, sample) for number in (2, 1) for sample in (1, 0)], layout)
    captures = open_captures(tmp_path)
    assert [stored.sample for stored in captures.find(tag="prompt 2")] == [0, 1]
    (found,) = captures.find("1", 1, tag="prompt 1")
    assert (found.request_id, found.sample, found.tag) == ("1", 1, "prompt 1")
    assert captures.find("1", tag="prompt 2") == [] == captures.find(tag="prompt")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unreached", [(), (10, [12, None], [-1, 40])])
def test_attributes_of_memory_and_file_results(tmp_path: Path, layout: LayoutName, unreached: Unreached) -> None:
    """Catches a property that has another name or value in a file than in memory."""
    expected = dataclasses.replace(request(4, sample=1), unreached=unreached)
    write(tmp_path, [expected], layout)
    (stored,) = open_captures(tmp_path)
    for name in ("request_id", "sample", "model", "tag", "submission", "status", "error", "unreached", "num_bytes"):
        assert getattr(stored, name) == getattr(expected, name), name
    for name in ("num_prompt_tokens", "num_output_tokens"):
        assert getattr(stored, name) == getattr(expected, name) > 0, name
    assert [*stored.sites] == [*expected.sites]
    for method in ("tensor", "numpy", "positions", "token_ids"):
        assert (getattr(stored, method)("post_block", 3) == getattr(expected, method)("post_block", 3)).all(), method
