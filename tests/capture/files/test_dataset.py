# SPDX-License-Identifier: Apache-2.0
"""Rows of many files: descriptors, mappings, random access, other processes, and the dataset."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import stream_file
from vllm_steer.capture.files.format import CaptureFileError
from vllm_steer.capture.files.reader import open_captures

LAYOUTS = pytest.mark.parametrize("layout", ["per_request", "packed"])
SITE = ("post_block", 3)


def write(root: Path, requests, layout="packed", per_file=1):
    """Write requests, ``per_file`` of them to each stream."""
    limits = {} if layout == "per_request" else {"max_requests": per_file}
    consumer = FilesystemConsumer(root=str(root), layout=layout, **limits)
    for request in requests:
        consumer.accept(request)
    consumer.close()
    return open_captures(root)


def many(count: int, **given):
    return [captured(f"r{i}", seed=i, rows=1 + i % 3, **given) for i in range(count)]


@LAYOUTS
def test_rows_hold_no_descriptor(tmp_path, layout):
    """Catches a descriptor per file: more than 1,018 files in use were reported as damaged."""
    requests = many(30)
    captures = write(tmp_path, requests, layout)
    before = len(os.listdir("/proc/self/fd"))
    held = [(request.request_id, request.tensor(*SITE)) for request in captures]
    assert len(os.listdir("/proc/self/fd")) <= before
    expected = {request.request_id: request.tensor(*SITE) for request in requests}
    assert len(held) == 30 and all(torch.equal(rows, expected[name]) for name, rows in held)


def test_small_rows_hold_no_mapping(tmp_path):
    """Catches rows that keep one mapping per file; Linux allows 65,530."""
    held = [request.tensor(*SITE) for request in write(tmp_path, many(30), "per_request")]
    assert len(held) == 30 and str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_lack_of_descriptors_is_no_damage(tmp_path, monkeypatch):
    """Catches an intact file reported as damaged because the process has reached a limit."""
    (request,) = write(tmp_path, many(1))
    monkeypatch.setitem(vars(request._file), "_mapped", None)
    del vars(request._file)["_mapped"]

    def fail(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(stream_file, "_map", fail)
    with pytest.raises(OSError, match="Too many open files"):
        request.tensor(*SITE)


def test_random_access_scans_each_file_once(tmp_path, monkeypatch):
    """Catches a file that is parsed again for each of its requests."""
    scanned, scan = [], stream_file.scan
    monkeypatch.setattr(stream_file, "scan", lambda path: (scanned.append(path), scan(path))[1])
    requests = many(60)
    folder = write(tmp_path, requests, per_file=4).path
    scanned.clear()
    captures = open_captures(folder)
    expected = {request.request_id: request for request in requests}
    order = list(range(60)) * 2
    random.Random(0).shuffle(order)
    for i in order:
        assert_same(captures[i], expected[captures[i].request_id])
    assert len(scanned) == len(set(scanned)) == 15


def test_file_that_was_replaced(tmp_path):
    """Catches rows and properties of another file, read at the places of the first one."""
    captures = write(tmp_path / "a", many(2), per_file=2)
    (other,) = write(tmp_path / "b", many(3, width=32)[1:], per_file=2).files()
    assert len(captures) == 2
    for file in captures._streams.values():
        vars(file).pop("_mapped", None)
        other.replace(file.path)
    with pytest.raises(CaptureFileError, match="has changed since it was opened"):
        captures[0].tensor(*SITE)


@LAYOUTS
def test_pickled_requests(tmp_path, layout):
    """Catches requests that other processes cannot get, and pickles that contain the rows of all sites."""
    requests = many(4, width=8192)
    captures = write(tmp_path, requests, layout, per_file=4)
    held = list(captures)
    rows = [request.tensor(*SITE) for request in held]
    data = pickle.dumps((captures, held))
    assert len(data) < 20_000 < sum(path.stat().st_size for path in captures.files())
    copied, stored = pickle.loads(data)  # noqa: S301
    expected = {request.request_id: request for request in requests}
    for found in (*copied, *stored):
        assert_same(found, expected[found.request_id])
    for tensor in rows:
        assert len(pickle.dumps(tensor)) < tensor.nbytes + 2000


class TestDataset:
    @LAYOUTS
    def test_rows_in_order(self, tmp_path, layout):
        """Catches rows of another request or site, and labels that do not belong to their row."""
        requests = [*many(5), captured("other", sites=(("pre_attn", 0),)), captured("last", seed=9)]
        captures = write(tmp_path, requests, layout, per_file=3)
        rows = captures.dataset(*SITE)
        stored = [(i, request) for i, request in enumerate(captures) if SITE in request.sites]
        expected = torch.cat([request.tensor(*SITE) for _, request in stored])
        assert len(rows) == len(expected) == 1 + 2 + 3 + 1 + 2 + 5
        assert torch.equal(torch.stack(list(rows)), expected)
        assert torch.equal(rows[-1], expected[-1])
        index = [i for i, request in stored for _ in request.positions(*SITE)]
        assert rows.request_index.tolist() == index
        for outside in (len(rows), -len(rows) - 1):
            with pytest.raises(IndexError):
                rows[outside]

    def test_rows_are_copies(self, tmp_path):
        """Catches a row that was changed in place and comes back changed in the next epoch."""
        rows = write(tmp_path, many(2)).dataset(*SITE)
        before = rows[1].clone()
        rows[1].zero_()
        assert torch.equal(rows[1], before) and before.any()

    def test_only_properties_are_read_at_first(self, tmp_path, monkeypatch):
        """Catches a dataset that reads all rows before the first one is used."""
        captures = write(tmp_path, many(3))
        monkeypatch.setattr(stream_file.StreamFile, "site", None)
        assert len(captures.dataset(*SITE)) == 6

    @LAYOUTS
    def test_rows_that_do_not_fit_together(self, tmp_path, layout):
        """Catches an error of the first batch of the second hour of a training."""
        captures = write(tmp_path, [captured("a"), captured("b", dtype=torch.bfloat16)], layout)
        with pytest.raises(ValueError, match=r"rows of 16 x torch.*earlier requests have 16 x torch"):
            captures.dataset(*SITE)
        with pytest.raises(KeyError, match=r"post_attn\[1\] was not captured; captured sites: .*pre_attn\[0\]"):
            captures.dataset("post_attn", 1)

    def test_shuffled_in_spawned_workers(self, tmp_path):
        """Catches a dataset that a worker process of a `DataLoader` cannot get."""
        captures = write(tmp_path, many(20), per_file=4)
        rows = captures.dataset(*SITE)
        rows[0], rows[5]
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(
            rows, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="spawn", generator=generator
        )
        found = torch.cat(list(loader))
        expected = torch.stack(list(rows))
        assert not torch.equal(found, expected)
        assert sorted(found.tolist()) == sorted(expected.tolist())
