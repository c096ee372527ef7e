# SPDX-License-Identifier: Apache-2.0
"""What a client calls its request decides nothing about where its file is, nor about anybody else's."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

import pytest

from tests.capture.captured import assert_same, captured
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.capture.files.reader import open_captures

LAYOUTS = ("per_request", "packed", "sharded")
HASHED = re.compile(r"[0-9a-f]{32}-\d+(-[0-9a-f]{16})?\.safetensors")

HOSTILE = [
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b/c",
    "a\\..\\b",
    "nul\0byte",
    "line\nbreak",
    "~root",
    "$(id)",
    "%2e%2e%2f",
    "*",
    ".hidden.part",
    "x.safetensors",
    "-rf",
    "\ud800 half a pair",
    "x" * 100_000,
    "{}",
    '"}],"x":[{"request_id":"other',
]


def files_below(folder: Path) -> set[Path]:
    return {Path(where) / name for where, _, names in os.walk(folder) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_id_leaves_the_root(tmp_path, layout):
    root = tmp_path / "deep" / "root"
    consumer = FilesystemConsumer(root=str(root), layout=layout)
    requests = [captured(name, seed=i) for i, name in enumerate(HOSTILE)]
    for request in requests:
        consumer.accept(request)
    consumer.close()
    written = files_below(tmp_path)
    assert written and all(path.parent == root for path in written)
    assert layout != "per_request" or all(HASHED.fullmatch(path.name) for path in written)
    for request in requests:
        if request.request_id.isprintable():
            (there,) = open_captures(root).find(request.request_id)
            assert_same(there, request)
    (half,) = open_captures(root).find("\ud800 half a pair")
    assert half.request_id == "\\ud800 half a pair"


# Pairs that some normalisation, truncation or prefix search would take for one.
ALIKE = [
    ("req-1", "req-10"),
    ("req-1", "req-1-0"),
    ("a" * 255, "a" * 256),
    ("Request", "request"),
    ("request", "request "),
    ("request", "request\0"),
    ("paypal", "p\u0430ypal"),  # Cyrillic a
    ("\u00e9", unicodedata.normalize("NFD", "\u00e9")),
    ("A", "\uff21"),  # full width
    ("ab", "a\u200bb"),  # zero width
    ("ab", "a\u202eb"),  # right to left
    ("1", "\u0661"),  # another script's digit
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_ids_that_look_alike_stay_apart(tmp_path, layout, one, other):
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    first, second = captured(one, seed=1), captured(other, seed=2)
    consumer.accept(first)
    consumer.accept(second)
    consumer.close()
    for request in (first, second):
        (there,) = open_captures(tmp_path).find(request.request_id)
        assert_same(there, request)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_id_again_overwrites_nothing(tmp_path, layout):
    """Two clients can choose one id, and one client can use its own twice."""
    requests = [captured("same", seed=i) for i in range(5)]
    consumers = [FilesystemConsumer(root=str(tmp_path), layout=layout) for _ in range(2)]
    for i, request in enumerate(requests):
        consumers[i % 2].accept(request)
    for consumer in consumers:
        consumer.close()
    there = open_captures(tmp_path).find("same")
    assert sorted(r.token_ids("pre_attn", 0)[0] for r in there) == [101, 102, 103, 104, 105]


def test_samples_of_a_request_have_files_of_their_own(tmp_path):
    consumer = FilesystemConsumer(root=str(tmp_path))
    for sample in (0, 1, 10):
        path = consumer.accept(captured("request", sample=sample, seed=sample))["path"]
        assert path.endswith(f"-{sample}.safetensors")
    for sample in (0, 1, 10):
        (there,) = open_captures(tmp_path).find("request", sample)
        assert_same(there, captured("request", sample=sample, seed=sample))
    assert len(open_captures(tmp_path).find("request")) == 3


def test_an_id_that_is_anothers_file_name_finds_only_its_own(tmp_path):
    consumer = FilesystemConsumer(root=str(tmp_path))
    stem = Path(consumer.accept(captured("victim"))["path"]).name
    thief = captured(stem, seed=9)
    consumer.accept(thief)
    (there,) = open_captures(tmp_path).find(stem)
    assert_same(there, thief)
