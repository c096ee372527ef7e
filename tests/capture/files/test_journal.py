# SPDX-License-Identifier: Apache-2.0
"""The journal of submitted requests, and which of them are missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.capture.captured import captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.directory import CaptureWriteError
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.results import CapturedRequest, SubmittedRequest

layouts = pytest.mark.parametrize("layout", ["per_request", "packed", "sharded"])


def submit(consumer: FilesystemConsumer, request: CapturedRequest) -> None:
    assert request.submission is not None
    consumer.begin(SubmittedRequest(request.request_id, request.sample, request.submission, request.spec))


def requests(count: int, **about) -> list[CapturedRequest]:
    return [dataclasses.replace(captured(f"r{i}", seed=i, **about), submission=i) for i in range(count)]


@layouts
def test_missing_requests(tmp_path: Path, layout: str) -> None:
    """Catches stored requests listed as missing, missing ones that are not listed, and another order."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, run="night")
    asked = requests(6, options={"tag": "t"})
    for request in asked:
        submit(consumer, request)
    for i in (4, 0, 3):
        consumer.accept(asked[i])
    captures = open_captures(tmp_path)  # while the writer runs
    assert [(entry.submission, entry.request_id) for entry in captures.missing()] == [(1, "r1"), (2, "r2"), (5, "r5")]
    assert {(entry.run, entry.sample, entry.tag, entry.error) for entry in captures.missing()} == {
        ("night", 0, "t", None)
    }
    assert [entry.submission for entry in captures.submitted()] == list(range(6))
    assert {(stored.run, stored.submission, stored.request_id) for stored in captures} == {
        ("night", i, f"r{i}") for i in (0, 3, 4)
    }
    for i in (1, 2, 5):
        consumer.accept(asked[i])
    consumer.close()
    assert open_captures(tmp_path).missing() == []


def test_runs_with_equal_ids(tmp_path: Path) -> None:
    """Catches a request taken for stored because an earlier run stored one with its id."""
    for run in ("first", "second"):
        consumer = FilesystemConsumer(root=str(tmp_path), layout="packed", run=run)
        for request in requests(2):
            submit(consumer, request)
            if run == "first":
                consumer.accept(request)
        consumer.close()
    assert [(entry.run, entry.request_id) for entry in open_captures(tmp_path).missing()] == [
        ("second", "r0"),
        ("second", "r1"),
    ]


def test_default_runs_differ(tmp_path: Path) -> None:
    """Catches two runs with one name, whose requests would be mistaken for each other."""
    runs = set()
    for _ in range(2):
        consumer = FilesystemConsumer(root=str(tmp_path))
        submit(consumer, requests(1)[0])
        consumer.close()
    runs = {entry.run for entry in open_captures(tmp_path).missing()}
    assert len(runs) == 2 and all(run.startswith("run-") for run in runs)


@layouts
def test_failed_requests_have_their_error(tmp_path: Path, layout: str) -> None:
    """Catches a failed request that is listed twice, or without the reason."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, quota=3000)
    small, large = requests(2)
    large = dataclasses.replace(captured("r1", rows=500), submission=1)
    for request in (small, large):
        submit(consumer, request)
    with pytest.raises(CaptureWriteError, match="quota"):
        consumer.accept(large)
    (first, second) = open_captures(tmp_path).missing()
    assert (first.request_id, first.error) == ("r0", None)
    assert second.request_id == "r1" and "quota" in (second.error or "")
    consumer.close()


def test_samples_are_separate(tmp_path: Path) -> None:
    """Catches a request that counts as stored when one of its samples is."""
    consumer = FilesystemConsumer(root=str(tmp_path))
    samples = [dataclasses.replace(captured("r", sample=i), submission=0) for i in range(3)]
    for sample in samples:
        submit(consumer, sample)
    consumer.accept(samples[1])
    consumer.close()
    assert [entry.sample for entry in open_captures(tmp_path).missing()] == [0, 2]


def test_incomplete_and_damaged_lines(tmp_path: Path) -> None:
    """Catches a journal that a killed writer makes unreadable, and damage that is skipped."""
    consumer = FilesystemConsumer(root=str(tmp_path))
    for request in requests(3):
        submit(consumer, request)
    consumer.close()
    (path,) = tmp_path.glob("requests-*.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert [entry.submission for entry in open_captures(tmp_path).missing()] == [0, 1]
    path.write_bytes(data.replace(b'"submission":1', b'"submission":x'))
    with pytest.raises(CaptureFileError, match="line 2"):
        open_captures(tmp_path).missing()
