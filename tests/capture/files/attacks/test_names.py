# SPDX-License-Identifier: Apache-2.0
"""Request ids have no influence on paths, and ids that look alike stay separate."""

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


def files_under(folder: Path) -> set[Path]:
    return {Path(where) / name for where, _, names in os.walk(folder) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_do_not_leave_the_root(tmp_path, layout):
    """Catches request ids used as paths."""
    root = tmp_path / "deep" / "root"
    consumer = FilesystemConsumer(root=str(root), layout=layout)
    requests = [captured(name, seed=i) for i, name in enumerate(HOSTILE)]
    for request in requests:
        consumer.accept(request)
    consumer.close()
    written = files_under(tmp_path)
    assert written and all(path.parent == root for path in written)
    assert layout != "per_request" or all(HASHED.fullmatch(path.name) for path in written)
    for request in requests:
        if request.request_id.isprintable():
            (there,) = open_captures(root).find(request.request_id)
            assert_same(there, request)
    (half,) = open_captures(root).find("\ud800 half a pair")
    assert half.request_id == "\\ud800 half a pair"


# Pairs that a normalization, truncation or prefix search would confuse.
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
def test_similar_ids_stay_separate(tmp_path, layout, one, other):
    """Catches ids that are normalized, truncated or compared by prefix."""
    consumer = FilesystemConsumer(root=str(tmp_path), layout=layout)
    first, second = captured(one, seed=1), captured(other, seed=2)
    consumer.accept(first)
    consumer.accept(second)
    consumer.close()
    for request in (first, second):
        (there,) = open_captures(tmp_path).find(request.request_id)
        assert_same(there, request)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reused_ids_overwrite_nothing(tmp_path, layout):
    """Catches files overwritten by another client, or by another request of the same client."""
    requests = [captured("same", seed=i) for i in range(5)]
    consumers = [FilesystemConsumer(root=str(tmp_path), layout=layout) for _ in range(2)]
    for i, request in enumerate(requests):
        consumers[i % 2].accept(request)
    for consumer in consumers:
        consumer.close()
    there = open_captures(tmp_path).find("same")
    assert sorted(r.token_ids("pre_attn", 0)[0] for r in there) == [101, 102, 103, 104, 105]


def test_samples_have_separate_files(tmp_path):
    """Catches samples that overwrite each other, and a search for sample 1 that finds 10."""
    consumer = FilesystemConsumer(root=str(tmp_path))
    for sample in (0, 1, 10):
        path = consumer.accept(captured("request", sample=sample, seed=sample))["path"]
        assert path.endswith(f"-{sample}.safetensors")
    for sample in (0, 1, 10):
        (there,) = open_captures(tmp_path).find("request", sample)
        assert_same(there, captured("request", sample=sample, seed=sample))
    assert len(open_captures(tmp_path).find("request")) == 3


def test_id_equal_to_another_file_name(tmp_path):
    """Catches a lookup by file name that returns the rows of another client."""
    consumer = FilesystemConsumer(root=str(tmp_path))
    stem = Path(consumer.accept(captured("victim"))["path"]).name
    imitator = captured(stem, seed=9)
    consumer.accept(imitator)
    (there,) = open_captures(tmp_path).find(stem)
    assert_same(there, imitator)
