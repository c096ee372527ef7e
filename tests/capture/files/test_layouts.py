# SPDX-License-Identifier: Apache-2.0
"""Every layout gives back what was written, in files that plain safetensors reads, complete when they should be."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from tests.capture.captured import SITES, assert_same, captured
from vllm_steer.capture import SiteRows
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files import packed_file, rotation
from vllm_steer.capture.files.format import TensorEntry, encode_header
from vllm_steer.capture.files.reader import open_captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS, timestamped_stem
from vllm_steer.errors import SteeringError

LAYOUTS = ("per_request", "packed", "sharded")
layouts = pytest.mark.parametrize("layout", LAYOUTS)
many_to_a_file = pytest.mark.parametrize("layout", LAYOUTS[1:])


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def stored(root: Path) -> list:
    return list(open_captures(root))


def assert_aligned(path: Path) -> None:
    """Tensors that are not would be slow, and some readers refuse them."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 8 == 0
    for name, tensor in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            bits = int(tensor["dtype"].lstrip("BFIU"))
            assert tensor["data_offsets"][0] % (bits // 8) == 0, name


def wait_for_file(root: Path) -> None:
    deadline = time.monotonic() + 20
    while not open_captures(root).files():
        assert time.monotonic() < deadline, "no file has appeared"
        time.sleep(0.01)


@layouts
def test_everything_comes_back(tmp_path, layout):
    """Catches rows, positions, tokens or words of one request given to another, in the order of writing."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    requests = [
        captured(f"r{i}", seed=i, rows=i % 4, status="partial" if i == 3 else "ok", error="why" if i == 3 else None)
        for i in range(9)
    ]
    reports = [consumer.accept(request) for request in requests]
    consumer.close()
    for request, report in zip(requests, reports, strict=True):
        (there,) = open_captures(tmp_path).find(request.request_id)
        assert (str(there.path), there.index) == (report["path"], report["index"])
        assert_same(there, request)
        (again,) = [r for r in open_captures(report["path"]) if r.index == report["index"]]
        assert_same(again, request)
    if layout != "per_request":
        assert [r.request_id for r in stored(tmp_path)] == [f"r{i}" for i in range(9)]


kinds = st.tuples(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 7),  # width: odd sizes put what follows out of alignment
    st.integers(0, 5),  # rows
    st.integers(0, 3),  # sites
)


@layouts
@settings(deadline=None, max_examples=40)
@given(st.lists(kinds, min_size=1, max_size=8))
def test_any_mix_of_dtypes_and_sizes_comes_back(tmp_path_factory, layout, mix):
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
        (there,) = open_captures(root).find(request.request_id)
        assert_same(there, request)
    for path in root.iterdir():
        assert_aligned(path)


@layouts
def test_sites_of_one_request_may_differ(tmp_path, layout):
    """Catches one list of positions, or one width, taken for all sites of a request."""
    request = captured(rows=4, width=3, dtype=torch.float16)
    sites = dict(request.sites)
    sites["post_block", 3] = SiteRows(np.array([0, 7]), torch.randn(2, 5, dtype=torch.float64))
    sites["post_block", 0] = SiteRows(np.array([2]), torch.randn(1, 1, dtype=torch.bfloat16))
    request = dataclasses.replace(request, sites=sites)
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(request)
    consumer.close()
    (there,) = stored(tmp_path)
    assert_same(there, request)


@layouts
def test_a_mean_has_one_row_and_all_its_positions(tmp_path, layout):
    request = captured(rows=4, reduce="mean")
    sites = {site: SiteRows(there.positions, there.rows.mean(0, keepdim=True)) for site, there in request.sites.items()}
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(dataclasses.replace(request, sites=sites))
    consumer.close()
    (there,) = stored(tmp_path)
    assert there.tensor("pre_attn", 0).shape == (1, 16) and there.positions("pre_attn", 0).tolist() == [1, 3, 5, 7]
    assert there.spec["reduce"] == "mean"


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
def test_rows_that_are_views_of_others(tmp_path, layout, rows):
    """Catches bytes taken in the order of memory instead of the order of rows."""
    request = dataclasses.replace(captured(rows=4), sites={("pre_attn", 0): SiteRows(np.arange(4), rows)})
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    consumer.accept(request)
    consumer.close()
    (there,) = stored(tmp_path)
    assert_same(there, request)


class TestPlainSafetensors:
    def test_a_request_is_readable_without_this_package(self, tmp_path):
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

    @many_to_a_file
    def test_a_file_of_many_is_few_tensors(self, tmp_path, layout):
        """Catches a tensor to a request, with which the header would have no bound."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        requests = [captured(f"r{i}", seed=i, rows=2) for i in range(50)]
        paths = {consumer.accept(request)["path"] for request in requests}
        consumer.close()
        (path,) = paths
        tensors = load_file(path)
        assert set(tensors) == {"rows.0", "positions", "token_ids", "index"}
        expected = [request.sites[site].rows for request in requests for site in request.sites]
        assert torch.equal(tensors["rows.0"], torch.cat(expected))

    def test_tensors_are_mapped_in_place(self, tmp_path):
        """Catches rows copied at opening: a shard is larger than memory."""
        path = FilesystemConsumer(root=str(tmp_path)).accept(captured())["path"]
        (there,) = open_captures(path)
        assert there.tensor("pre_attn", 0).data_ptr() == there.tensor("pre_attn", 0).data_ptr()
        start = there.tensor("pre_attn", 0).data_ptr()
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps if line.endswith(path)]
        assert any(int(low, 16) <= start < int(high, 16) for low, high in spans)

    def test_writing_to_a_mapped_tensor_leaves_the_file_alone(self, tmp_path):
        request = captured()
        path = FilesystemConsumer(root=str(tmp_path)).accept(request)["path"]
        (there,) = open_captures(path)
        there.tensor("pre_attn", 0).zero_()
        assert_same(next(iter(open_captures(path))), request)


class TestWindows:
    @many_to_a_file
    def test_nothing_is_seen_before_a_file_is_complete(self, tmp_path, layout):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
        report = consumer.accept(captured())
        assert not report["sealed"] and not Path(report["path"]).exists() and stored(tmp_path) == []
        consumer.close()
        assert len(stored(tmp_path)) == 1 and names(tmp_path) == [Path(report["path"]).name]

    @many_to_a_file
    def test_a_file_is_complete_at_its_number_of_requests(self, tmp_path, layout):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_requests=3)
        reports = [consumer.accept(captured(f"r{i}", seed=i)) for i in range(7)]
        assert [report["sealed"] for report in reports] == [False, False, True] * 2 + [False]
        assert [report["index"] for report in reports] == [0, 1, 2] * 2 + [0]
        # Readable while the third file is being written.
        assert [request.request_id for request in stored(tmp_path)] == [f"r{i}" for i in range(6)]
        consumer.close()
        assert len(open_captures(tmp_path).files()) == 3 and len(stored(tmp_path)) == 7

    def test_names_sort_by_time(self):
        """Catches a name made of two looks at the clock, between which a second ends: the later file comes first."""
        moments = [0, 1, 999_999_999, 10**9, 1_795_344_059_999_999_999, 1_795_344_060_000_000_000]
        stems = [timestamped_stem("sharded", moment) for moment in moments]
        assert stems == sorted(stems) and stems[3][:-8] == "sharded-19700101t000001-000000000-"

    @many_to_a_file
    @pytest.mark.parametrize("step", [0, -(10**9), 10**6], ids=["stands", "is_set_back", "goes_on"])
    def test_requests_are_in_order_whatever_the_clock_does(self, tmp_path, monkeypatch, layout, step):
        """From the last moment of a second on."""
        moments = itertools.count(1_795_344_059_999_999_999, step)
        monkeypatch.setattr(rotation.time, "time_ns", lambda: next(moments))
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_requests=1)
        for i in range(8):
            consumer.accept(captured(f"r{i}"))
        assert [request.request_id for request in stored(tmp_path)] == [f"r{i}" for i in range(8)]

    @many_to_a_file
    def test_a_file_is_complete_at_its_size(self, tmp_path, layout):
        """One request is 3 sites of 5 rows of 16 float32, 960 bytes, and 5 positions and tokens, 40 bytes."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_size=2000)
        assert [consumer.accept(captured(f"r{i}"))["sealed"] for i in range(5)] == [False, True, False, True, False]
        consumer.close()

    @many_to_a_file
    def test_a_file_is_complete_at_its_age_though_nothing_more_comes(self, tmp_path, layout):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, max_seconds=0.2)
        first = captured("first")
        consumer.accept(first)
        wait_for_file(tmp_path)
        assert_same(stored(tmp_path)[0], first)
        consumer.accept(captured("second"))
        consumer.close()
        assert sorted(request.request_id for request in stored(tmp_path)) == ["first", "second"]

    def test_an_old_timer_does_not_complete_a_later_file(self, tmp_path):
        """The moment in which a timer has gone off and waits for the write that completes its file."""
        consumer = FilesystemConsumer(root=str(tmp_path), layout="sharded", max_requests=2)
        consumer.accept(captured("a"))
        old = consumer._layout._file
        consumer.accept(captured("b"))
        consumer.accept(captured("c"))
        consumer._layout._expire(old)
        assert consumer.accept(captured("d"))["index"] == 1
        consumer.close()
        assert len(open_captures(tmp_path).files()) == 2

    def test_own_limits_of_the_layouts(self):
        assert {name: (w.max_requests, w.max_size, w.max_seconds) for name, w in ROTATION_LIMITS.items()} == {
            "packed": (256, 256 << 20, 10.0),
            "sharded": (None, 1 << 30, 300.0),
        }

    def test_limits_are_refused_where_there_is_no_window(self, tmp_path):
        with pytest.raises(SteeringError, match="max_requests"):
            FilesystemConsumer(root=str(tmp_path), max_requests=3)

    def test_a_file_is_complete_when_its_header_is_full(self, tmp_path, monkeypatch):
        """Catches a header that no longer fits, at completing, when it is too late to say so."""
        monkeypatch.setattr(packed_file, "MAX_TENSORS", 6)
        consumer = FilesystemConsumer(root=str(tmp_path), layout="sharded")
        requests = [captured(f"r{i}", width=1 + i % 2, rows=1, dtype=torch.float16, sites=SITES[:1]) for i in range(9)]
        for request in requests:
            consumer.accept(request)
        consumer.close()
        assert len(open_captures(tmp_path).files()) > 1
        for request, there in zip(requests, stored(tmp_path), strict=True):
            assert_same(there, request)

    def test_the_header_has_room_for_as_many_tensors_as_it_is_said_to(self):
        far, wide = 10**13, 65536
        most = packed_file.MAX_TENSORS + 5
        runs = [TensorEntry(f"rows.{i}", "BF16", (far // wide, wide), far, far) for i in range(2 * most)]
        encode_header(runs[:most], {}, packed_file.HEADER_SIZE)
        with pytest.raises(ValueError, match="does not fit"):
            encode_header(runs, {}, packed_file.HEADER_SIZE)


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
def test_rows_that_captures_do_not_have_are_refused_alone(tmp_path, layout, rows, error):
    """Catches one odd request that costs its neighbours their file."""
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
def test_fsync_comes_before_the_name(tmp_path, layout, monkeypatch):
    """Catches a name that survives a power cut while its rows do not."""
    calls = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    for fsync in (False, True):
        consumer = FilesystemConsumer(root=str(tmp_path), layout=layout, fsync=fsync)
        consumer.accept(captured())
        consumer.close()
    assert calls == ["rename", "fsync", "rename", "fsync"]
