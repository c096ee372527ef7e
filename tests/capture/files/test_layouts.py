# SPDX-License-Identifier: Apache-2.0
"""Layouts: contents, plain safetensors files, and when files are complete."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.capture.captured import SITES, assert_same, captured
from vllm_steer.capture import SiteRows
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import rotation
from vllm_steer.capture.files.layouts import timestamped_stem
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS
from vllm_steer.capture.files.stream_file import StreamFile
from vllm_steer.errors import SteeringError

LAYOUTS = ("per_request", "packed", "sharded")
layouts = pytest.mark.parametrize("layout", LAYOUTS)
rotating_layouts = pytest.mark.parametrize("layout", LAYOUTS[1:])


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def stored(root: Path) -> list:
    return list(open_captures(root))


def assert_aligned(path: Path) -> None:
    """Check the alignment of all tensors; some readers reject unaligned ones."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 8 == 0
    for name, tensor in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            bits = int(tensor["dtype"].lstrip("BFIU"))
            assert tensor["data_offsets"][0] % (bits // 8) == 0, name


def wait_for_end(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not StreamFile(path).sealed:
        assert time.monotonic() < deadline, "the stream was not ended"
        time.sleep(0.01)


def in_another_process(root: Path) -> list[list[object]]:
    """Return ``[request id, sum of the rows]`` of all requests as another process reads them."""
    code = (
        "import json, sys; from vllm_steer.capture.files.reader import open_captures; "
        "print(json.dumps([[r.request_id, sum(float(r.tensor(*s).sum()) for s in r.sites)] "
        "for r in open_captures(sys.argv[1])]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@layouts
def test_round_trip(tmp_path, layout):
    """Catches rows, positions, tokens or properties stored with another request, and a changed order."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    requests = [
        captured(f"r{i}", seed=i, rows=i % 4, status="partial" if i == 3 else "ok", error="why" if i == 3 else None)
        for i in range(9)
    ]
    reports = [consumer.accept(request) for request in requests]
    consumer.close()
    for request, report in zip(requests, reports, strict=True):
        (found,) = open_captures(tmp_path).find(request.request_id)
        assert (str(found.path), found.index) == (report["path"], report["index"])
        assert_same(found, request)
        (again,) = [r for r in open_captures(report["path"]) if r.index == report["index"]]
        assert_same(again, request)
    if layout != "per_request":
        assert [r.request_id for r in stored(tmp_path)] == [f"r{i}" for i in range(9)]


kinds = st.tuples(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 7),  # width: odd sizes misalign the following tensor
    st.integers(0, 5),  # rows
    st.integers(0, 3),  # sites
)


@layouts
@settings(deadline=None, max_examples=40)
@given(st.lists(kinds, min_size=1, max_size=8))
def test_round_trip_of_any_dtypes_and_sizes(tmp_path_factory, layout, mix):
    """Catches wrong offsets and unaligned tensors after a change of dtype or width."""
    root = tmp_path_factory.mktemp("mix")
    consumer = FilesystemConsumer(root=str(root), layout=layout)
    requests = [
        captured(f"r{i}", seed=i, dtype=dtype, width=width, rows=rows, sites=SITES[:sites])
        for i, (dtype, width, rows, sites) in enumerate(mix)
    ]
    for request in requests:
        consumer.accept(request)
    consumer.close()
    for request in requests:
        (found,) = open_captures(root).find(request.request_id)
        assert_same(found, request)
    for path in root.glob("*.safetensors"):
        assert_aligned(path)


@layouts
def test_sites_with_different_positions_and_widths(tmp_path, layout):
    """Catches one list of positions, or one width, used for all sites of a request."""
    request = captured(rows=4, width=3, dtype=torch.float16)
    sites = dict(request.sites)
    sites["post_block", 3] = SiteRows(np.array([0, 7]), torch.randn(2, 5, dtype=torch.float64))
    sites["post_block", 0] = SiteRows(np.array([2]), torch.randn(1, 1, dtype=torch.bfloat16))
    request = dataclasses.replace(request, sites=sites)
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(request)
    consumer.close()
    (found,) = stored(tmp_path)
    assert_same(found, request)


@layouts
def test_mean_keeps_all_positions(tmp_path, layout):
    """Catches positions cut to the single row of a mean."""
    request = captured(rows=4, reduce="mean")
    sites = {site: SiteRows(rows.positions, rows.rows.mean(0, keepdim=True)) for site, rows in request.sites.items()}
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(dataclasses.replace(request, sites=sites))
    consumer.close()
    (found,) = stored(tmp_path)
    assert found.tensor("pre_attn", 0).shape == (1, 16) and found.positions("pre_attn", 0).tolist() == [1, 3, 5, 7]
    assert found.spec["reduce"] == "mean"


@layouts
@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(64.0).reshape(16, 4).T,
        torch.arange(64.0).reshape(4, 16)[:, ::2],
        torch.arange(64.0).reshape(4, 16)[:, 3:9],
        torch.arange(4.0)[:, None].expand(-1, 16),
    ],
    ids=["transposed", "stepped", "cut", "expanded"],
)
def test_rows_that_are_views(tmp_path, layout, rows):
    """Catches bytes written in memory order instead of row order."""
    request = dataclasses.replace(captured(rows=4), sites={("pre_attn", 0): SiteRows(np.arange(4), rows)})
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(request)
    consumer.close()
    (found,) = stored(tmp_path)
    assert_same(found, request)


class TestPlainSafetensors:
    def test_file_of_one_request(self, tmp_path):
        """Catches a file that safetensors alone cannot read."""
        request = captured(dtype=torch.bfloat16, options={"tag": "mine"})
        path = FilesystemConsumer(root=str(tmp_path)).accept(request)["path"]
        tensors = load_file(path)
        assert set(tensors) == {"pre_attn.0", "post_block.0", "post_block.3", "positions", "token_ids"}
        assert torch.equal(tensors["post_block.3"], request.tensor("post_block", 3))
        assert tensors["positions"].tolist() == [1, 3, 5, 7, 9]
        assert tensors["token_ids"].tolist() == request.token_ids("post_block", 3).tolist()
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "vllm-steer capture"
        for word in ('"request_id":"request"', '"sample":0', '"model":"tiny"', '"tag":"mine"', '"dtype":"BF16"'):
            assert word in metadata["requests"]

    @rotating_layouts
    def test_stream_is_plain_arrow(self, tmp_path, layout):
        """Catches a stream that pyarrow alone cannot read, or whose columns belong to another site."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        requests = [captured(f"r{i}", seed=i, rows=2, dtype=torch.float16) for i in range(5)]
        (path,) = {consumer.accept(request)["path"] for request in requests}
        consumer.close()
        lines = pa.ipc.open_stream(path).read_all().to_pylist()
        expected = [(request, site) for request in requests for site in request.sites]
        assert len(lines) == len(expected)
        for line, (request, site) in zip(lines, expected, strict=True):
            assert (line["request_id"], line["sample"], line["point"], line["layer"]) == (request.request_id, 0, *site)
            assert line["positions"] == request.positions(*site).tolist()
            assert line["token_ids"] == request.token_ids(*site).tolist()
            rows = np.frombuffer(line["rows"], np.float16).reshape(-1, line["width"])
            assert line["dtype"] == "F16"
            np.testing.assert_array_equal(rows, request.tensor(*site).numpy())

    @layouts
    def test_tensors_are_mapped(self, tmp_path, layout):
        """Catches rows copied on opening: a shard can exceed the memory."""
        path = FilesystemConsumer(root=str(tmp_path), layout=layout).accept(captured(width=4096))["path"]
        (found,) = open_captures(path)
        rows = found.tensor("pre_attn", 0)
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps if line.endswith(path)]
        assert any(int(low, 16) <= rows.data_ptr() < int(high, 16) for low, high in spans)

    @layouts
    def test_writing_to_a_mapped_tensor_keeps_the_file(self, tmp_path, layout):
        """Catches a shared mapping, through which users change the file."""
        request = captured()
        path = FilesystemConsumer(root=str(tmp_path), layout=layout).accept(request)["path"]
        (found,) = open_captures(path)
        found.tensor("pre_attn", 0).zero_()
        assert_same(next(iter(open_captures(path))), request)


class TestRotation:
    @layouts
    def test_ok_is_readable_at_once_by_another_process(self, tmp_path, layout):
        """Catches requests reported as ok that other processes cannot read while the writer has the file open."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        expected = []
        for i in range(3):
            request = captured(f"r{i}", seed=i)
            report = consumer.accept(request)
            assert report["sealed"] == (layout == "per_request") and Path(report["path"]).is_file()
            expected.append(
                [f"r{i}", pytest.approx(sum(float(s.rows.sum()) for s in request.sites.values()), abs=1e-4)]
            )
        assert sorted(in_another_process(tmp_path)) == expected
        consumer.close()
        assert sorted(in_another_process(tmp_path)) == expected

    @rotating_layouts
    def test_max_requests(self, tmp_path, layout):
        """Catches files sealed one request too early or too late, and files that cannot be read meanwhile."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_requests=3)
        reports = [consumer.accept(captured(f"r{i}", seed=i)) for i in range(7)]
        assert [report["sealed"] for report in reports] == [False, False, True] * 2 + [False]
        assert [report["index"] for report in reports] == [0, 1, 2] * 2 + [0]
        # Readable while the third file is being written.
        assert [request.request_id for request in stored(tmp_path)] == [f"r{i}" for i in range(7)]
        consumer.close()
        assert len(open_captures(tmp_path).files()) == 3 and len(stored(tmp_path)) == 7

    def test_names_sort_by_time(self):
        """Catches a name built from two reads of the clock: across a second, the later file sorts first."""
        moments = [0, 1, 999_999_999, 10**9, 1_795_344_059_999_999_999, 1_795_344_060_000_000_000]
        stems = [timestamped_stem("sharded", moment) for moment in moments]
        assert stems == sorted(stems) and stems[3][:-8] == "sharded-19700101t000001-000000000-"

    @rotating_layouts
    @pytest.mark.parametrize("step", [0, -(10**9), 10**6], ids=["stands", "is_set_back", "goes_on"])
    def test_order_with_any_clock(self, tmp_path, monkeypatch, layout, step):
        """Catches files out of order if the clock stands still or is set back."""
        moments = itertools.count(1_795_344_059_999_999_999, step)
        monkeypatch.setattr(rotation.time, "time_ns", lambda: next(moments))
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_requests=1)
        for i in range(8):
            consumer.accept(captured(f"r{i}"))
        assert [request.request_id for request in stored(tmp_path)] == [f"r{i}" for i in range(8)]

    @rotating_layouts
    def test_max_size(self, tmp_path, layout):
        """Catches a size that omits tokens or headers, and a limit that is ignored."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_size=8000)
        reports = [consumer.accept(captured(f"r{i}")) for i in range(12)]
        consumer.close()
        sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        assert len(sizes) > 2
        for report in reports:
            last = [other for other in reports if other["path"] == report["path"]][-1] is report
            assert report["sealed"] == (last and sizes[Path(report["path"]).name] - 8 >= 8000)

    @rotating_layouts
    def test_max_seconds_without_further_requests(self, tmp_path, layout):
        """Catches an age that is only checked when the next request arrives."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_seconds=0.2)
        first = captured("first")
        wait_for_end(Path(consumer.accept(first)["path"]))
        assert_same(stored(tmp_path)[0], first)
        consumer.accept(captured("second"))
        consumer.close()
        assert sorted(request.request_id for request in stored(tmp_path)) == ["first", "second"]
        assert len(names(tmp_path)) == 2

    def test_timer_of_an_earlier_file(self, tmp_path):
        """Catches a timer that fired while its file was being sealed and then seals the next file."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout="sharded", max_requests=2)
        consumer.accept(captured("a"))
        (layout,) = consumer._layouts.values()
        old = layout._file
        consumer.accept(captured("b"))
        consumer.accept(captured("c"))
        layout._expire(old)
        assert consumer.accept(captured("d"))["index"] == 1
        consumer.close()
        assert len(open_captures(tmp_path).files()) == 2

    def test_default_limits(self):
        """Catches changed defaults."""
        assert {name: (w.max_requests, w.max_size, w.max_seconds) for name, w in ROTATION_LIMITS.items()} == {
            "packed": (256, 256 << 20, 10.0),
            "sharded": (None, 1 << 30, 300.0),
        }

    def test_per_request_rejects_limits(self, tmp_path):
        """Catches limits that are silently ignored."""
        with pytest.raises(SteeringError, match="max_requests"):
            FilesystemConsumer(root=str(tmp_path), max_requests=3)

    @rotating_layouts
    def test_changing_widths_share_a_file(self, tmp_path, layout):
        """Catches a new file for each change of width or dtype, as clients with different projections cause it."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        requests = [captured(f"r{i}", width=1 + i % 2, rows=1, dtype=torch.float16, sites=SITES[:1]) for i in range(9)]
        for request in requests:
            consumer.accept(request)
        consumer.close()
        assert len(names(tmp_path)) == 1
        for request, found in zip(requests, stored(tmp_path), strict=True):
            assert_same(found, request)

    @rotating_layouts
    def test_large_sites(self, tmp_path, layout):
        """Catches a request of several batches that is split or joined with its neighbour."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        requests = [captured(f"r{i}", seed=i, width=4096, rows=20 + i) for i in range(3)]
        for request in requests:
            consumer.accept(request)
            assert_same(stored(tmp_path)[-1], request)
        consumer.close()
        for request, found in zip(requests, stored(tmp_path), strict=True):
            assert_same(found, request)


@layouts
@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (torch.zeros(5, 2, dtype=torch.int8), TypeError),
        (torch.zeros(5, 2, 2), TypeError),
        (torch.zeros(5), TypeError),
        (torch.zeros(4, 2), ValueError),
    ],
)
def test_invalid_rows_fail_one_request(tmp_path, layout, rows, error):
    """Catches an invalid request that destroys the file of its neighbours."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    before, after = captured("before"), captured("after", seed=1)
    consumer.accept(before)
    with pytest.raises(error):
        consumer.accept(dataclasses.replace(captured("odd"), sites={("pre_attn", 0): SiteRows(np.arange(5), rows)}))
    consumer.accept(after)
    consumer.close()
    found = {request.request_id: request for request in stored(tmp_path)}
    assert set(found) == {"before", "after"}
    assert_same(found["after"], after)


@layouts
def test_fsync_precedes_the_report(tmp_path, layout, monkeypatch):
    """Catches (1) a file name that survives a power failure while its rows do not, and (2) ok ahead of the sync."""
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    for fsync in (False, True):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, fsync=fsync)
        for i in range(2):
            consumer.accept(captured(f"r{i}"))
        reported = len(calls)
        consumer.close()
    if layout == "per_request":
        assert calls == ["rename"] * 2 + ["fsync", "rename", "fsync"] * 2
    else:  # the directory once, each request, the end
        assert calls == ["fsync"] * 4 and reported == 3
