# SPDX-License-Identifier: Apache-2.0
"""Consumers: lookup by name, options, and the built-in consumers ``memory`` and ``logging``."""

from __future__ import annotations

import json
import logging
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

import pytest
import torch

from tests.capture.captured import captured
from vllm_steer.capture import CaptureResult
from vllm_steer.capture.consumers import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    Consumer,
    consumer_class,
    consumer_names,
    discovery,
    make_consumer,
    parse_consumer_flag,
    read_consumers,
)
from vllm_steer.capture.consumers.filesystem import FilesystemConsumer
from vllm_steer.errors import SteeringError
from vllm_steer.request import CaptureSpec


class CustomConsumer(Consumer):
    """A consumer of an installed package."""

    name: ClassVar[str] = "mine"
    spec_options: ClassVar[dict[str, Any]] = {"tag": str, "times": int}

    def __init__(
        self, *, where: str, count: int = 1, ratio: float = 0.5, on: bool = False, kind: Literal["a", "b"] = "a"
    ) -> None:
        self.options = (where, count, ratio, on, kind)

    def accept(self, captured: object) -> None:
        return None


class NotAConsumer:
    """A class that is not a consumer."""


@pytest.fixture
def offer(monkeypatch):
    """Pretend that installed packages offer consumers, given as pairs of name and ``module:attribute``."""

    def install(*offers: tuple[str, str]) -> None:
        points = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in offers]

        class Found(list):
            names = frozenset(point.name for point in points)

        def found(group: str, name: str | None = None) -> Found:
            assert group == ENTRY_POINT_GROUP
            return Found(point for point in points if name in (None, point.name))

        monkeypatch.setattr(discovery, "entry_points", found)

    return install


def assert_rejected(call, *words):
    with pytest.raises(SteeringError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


class TestLookup:
    @pytest.mark.parametrize("name", [*BUILT_IN])
    def test_built_in_names_match_their_classes(self, name):
        """Catches a built-in consumer under another name."""
        assert consumer_class(name).name == name

    def test_built_in_names(self):
        """Catches a built-in consumer added or removed by accident."""
        assert tuple(BUILT_IN) == ("memory", "filesystem", "logging")

    def test_consumer_of_an_installed_package(self, offer):
        """Catches entry points that are not found, and defaults that are not applied."""
        offer(("mine", f"{__name__}:CustomConsumer"))
        assert consumer_names() == (*BUILT_IN, "mine")
        assert make_consumer("mine", {"where": "x"}).options == ("x", 1, 0.5, False, "a")

    def test_unknown_consumer(self, offer):
        """Catches an error that does not list the available consumers."""
        offer(("mine", f"{__name__}:CustomConsumer"))
        assert_rejected(lambda: consumer_class("yours"), "yours", "memory", "mine")

    def test_package_cannot_override_a_built_in_consumer(self, offer):
        """Catches a package that receives rows of requests that did not name it."""
        offer(("memory", f"{__name__}:CustomConsumer"))
        assert_rejected(lambda: consumer_class("memory"), "built-in")

    def test_same_name_in_two_packages(self, offer):
        """Catches an arbitrary choice between two packages."""
        offer(("mine", f"{__name__}:CustomConsumer"), ("mine", "other:CustomConsumer"))
        assert_rejected(lambda: consumer_class("mine"), "both")

    @pytest.mark.parametrize(
        ("name", "value", "word"),
        [
            ("mine", "no_such_module:CustomConsumer", "no_such_module"),
            ("mine", f"{__name__}:NotAConsumer", "subclass"),
            ("yours", f"{__name__}:CustomConsumer", "mine"),
        ],
    )
    def test_invalid_entry_points(self, offer, name, value, word):
        """Catches an entry point that cannot be imported, is not a Consumer or has another name."""
        offer((name, value))
        assert_rejected(lambda: consumer_class(name), word)


class TestOptions:
    def test_flag_converts_by_annotation(self, offer):
        """Catches options passed on as text: "false" would be true, and "10" would sort before "9"."""
        offer(("mine", f"{__name__}:CustomConsumer"))
        name, options = parse_consumer_flag("mine:where=/a=b:c,count=3,ratio=2,on=false,kind=b")
        assert (name, options) == ("mine", {"where": "/a=b:c", "count": 3, "ratio": 2.0, "on": False, "kind": "b"})
        assert [type(value) for value in options.values()] == [str, int, float, bool, str]

    def test_flag_without_options(self):
        """Catches a flag that requires a colon."""
        assert parse_consumer_flag("memory") == ("memory", {})
        assert parse_consumer_flag("logging:level=debug") == ("logging", {"level": "debug"})

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("memory:size=3", ["memory", "size", "none"]),
            ("filesystem", ["root", "missing"]),
            ("filesystem:root=a,b", ["'b'", "comma"]),
            ("filesystem:", ["''"]),
            ("filesystem:root=a,root=b", ["root", "twice"]),
            ("filesystem:root=a,rot=b", ["rot", "root", "layout"]),
            ("filesystem:root=a,layout=zip", ["layout", "per_request", "sharded"]),
            ("filesystem:root=a,fsync=maybe", ["fsync"]),
            ("filesystem:root=a,quota=0", ["quota"]),
            ("filesystem:root=a,quota=ten", ["quota"]),
            ("filesystem:root=a,max_requests=1.5", ["max_requests"]),
            ("filesystem:root=a,max_seconds=inf", ["max_seconds"]),
            ("logging:level=loud", ["level", "debug"]),
            ("nothing:a=1", ["nothing", "memory"]),
        ],
    )
    def test_rejects_invalid_flags(self, text, words):
        """Catches invalid options that are ignored, and errors that do not name the option."""
        assert_rejected(lambda: parse_consumer_flag(text), "--capture-consumers", *words)

    def test_sizes_accept_units(self):
        """Catches units that are rejected or misread."""
        assert parse_consumer_flag("filesystem:root=a,quota=1.5GiB")[1]["quota"] == 3 << 29
        assert parse_consumer_flag("filesystem:root=a,quota=1000")[1]["quota"] == 1000

    def test_make_consumer_rejects_invalid_options(self):
        """Catches options that are only checked in flags."""
        assert_rejected(lambda: make_consumer("memory", {"x": 1}), "x")
        assert_rejected(lambda: make_consumer("logging", {"level": 3}), "level")

    def test_errors_name_the_origin_of_options(self, tmp_path):
        """Catches errors about a flag that was not given, and errors of a constructor without the consumer's name."""
        field = "capture_consumers"
        assert_rejected(
            lambda: make_consumer("filesystem", {}, field),
            'capture_consumers.filesystem.root: is missing; write {"filesystem": {"root": ...}}',
        )
        assert_rejected(
            lambda: make_consumer("filesystem", {"root": str(tmp_path), "max_requests": 3}, field),
            "capture_consumers.filesystem.max_requests: has no effect with layout per_request; use packed or sharded",
        )
        assert_rejected(
            lambda: make_consumer("memory", {"x": 1}, field), "capture_consumers.memory: unknown option 'x'"
        )

    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("filesystem", "--capture-consumers.filesystem.root: is missing; write filesystem:root=..."),
            ("filesystem:root=a,layout=zip", "--capture-consumers.filesystem.layout: "),
            ("memory:hooks=post_block:x", "--capture-consumers.memory.hooks: "),
            ("memory:hooks=post_block:1,positions=x", "--capture-consumers.memory.positions: "),
        ],
    )
    def test_paths_in_flags_have_one_form(self, text, path):
        """Catches the consumer's name separated by a space in some errors and by a dot in others."""
        assert_rejected(lambda: parse_consumer_flag(text), path)

    def test_comma_between_layers(self):
        """Catches an error that does not say how layers are separated in a flag."""
        assert_rejected(
            lambda: parse_consumer_flag("memory:hooks=post_block:4,5"), "'5'", "join layers with +: post_block:4+5"
        )


class TestCheck:
    def check(self, **options):
        CustomConsumer(where="x").check(CaptureSpec(hooks={"pre_attn": 1}, options=options), "capture.mine")

    def test_accepts_known_options(self):
        """Catches valid options that are rejected."""
        self.check()
        self.check(tag="a", times=3)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"tga": "a"}, ["capture.mine.tga", "tag, times"]),
            ({"tag": 3}, ["capture.mine.tag", "string", "3"]),
            ({"times": "3"}, ["capture.mine.times", "integer"]),
            ({"times": True}, ["capture.mine.times"]),
        ],
    )
    def test_rejects_unknown_and_invalid_options(self, options, words):
        """Catches an option that is accepted and ignored."""
        assert_rejected(lambda: self.check(**options), *words)

    @pytest.mark.parametrize(
        ("option", "meant"), [("position", "; did you mean positions?"), ("strem", "; did you mean stream?"), ("x", "")]
    )
    def test_unknown_option_that_resembles_a_field(self, option, meant):
        """Catches a misspelt field of the spec that is reported as an option, without the field that was meant."""
        spec = CaptureSpec(hooks={"pre_attn": 1}, options={option: True})
        with pytest.raises(SteeringError) as caught:
            make_consumer("memory").check(spec, "capture.memory")
        assert caught.value.field == f"capture.memory.{option}"
        assert caught.value.problem == (
            "is neither a field of a capture spec (hooks, positions, before, dtype, reduce) nor an option of memory "
            f"(stream){meant}"
        )

    @pytest.mark.parametrize(("name", "known"), [("memory", "stream"), ("logging", "none")])
    def test_rejects_options_of_other_consumers(self, name, known):
        """Catches options that every consumer accepts."""
        spec = CaptureSpec(hooks={"pre_attn": 1}, options={"tag": "a"})
        assert_rejected(lambda: make_consumer(name).check(spec, f"capture.{name}"), f"capture.{name}.tag", known)

    def test_length_of_tags(self, tmp_path):
        """Catches tags without a limit, which clients could use to fill the disk."""
        consumer = FilesystemConsumer(root=str(tmp_path))
        consumer.check(CaptureSpec(hooks={"pre_attn": 1}, options={"tag": "a" * 1024}), "f")
        long = CaptureSpec(hooks={"pre_attn": 1}, options={"tag": "a" * 1025})
        assert_rejected(lambda: consumer.check(long, "f"), "f.tag", "1024")


def test_memory_returns_the_rows():
    """Catches copied, reordered or renamed rows."""
    request = captured(options={"tag": "t"})
    result = CaptureResult("ok", None, make_consumer("memory").accept(request))
    rows = result.tensor("post_block", 3)
    assert rows is request.sites["post_block", 3].rows
    assert result.positions("post_block", 3).tolist() == [1, 3, 5, 7, 9]
    assert result.token_ids("post_block", 3).tolist() == [101, 103, 900, 902, 904]
    assert set(result.sites) == set(request.sites)
    assert (result.num_bytes, result.tag) == (request.num_bytes, "t") and request.num_bytes > 0
    assert (result.numpy("post_block", 3) == rows.numpy()).all()
    assert request.spec.positions == request.spec.tokens
    with pytest.raises(KeyError, match=r"post_block\[4\].*pre_attn\[0\]"):
        result.tensor("post_block", 4)


def test_result_without_rows_states_the_reason():
    """Catches an error that hides the reason for missing rows."""
    with pytest.raises(RuntimeError, match="disk is full"):
        CaptureResult("error", "disk is full", None).tensor("post_block", 3)
    with pytest.raises(TypeError, match="dict"):
        CaptureResult("ok", None, {"path": "x"}).tensor("post_block", 3)


class TestLogging:
    def test_statistics(self, caplog):
        """Catches norms along the wrong dimension, and a report that differs from the log."""
        request = captured(sites=(("post_block", 3),), rows=3, width=4)
        site = request.sites["post_block", 3]
        site.rows[:] = torch.tensor([[3.0, 4, 0, 0], [0, 0, 0, 1], [2, 2, 2, 2]])
        with caplog.at_level(logging.INFO, "vllm_steer.capture"):
            data = make_consumer("logging").accept(request)
        assert data == {
            "sites": {
                "post_block[3]": {
                    "shape": [3, 4],
                    "dtype": "float32",
                    "norm_mean": pytest.approx(10 / 3, rel=1e-5),
                    "norm_min": 1.0,
                    "norm_max": 5.0,
                    "not_finite": 0,
                }
            }
        }
        assert "post_block[3] [3, 4] float32, norm 3.33333 (1.0 to 5.0)" in caplog.text

    def test_rows_that_are_not_finite(self):
        """Catches a NaN that makes the mean NaN, which is not valid JSON and hides the other rows."""
        request = captured(sites=(("post_block", 3),), rows=3, dtype=torch.bfloat16)
        request.sites["post_block", 3].rows[0, 5] = float("nan")
        request.sites["post_block", 3].rows[2, 0] = float("inf")
        numbers = make_consumer("logging").accept(request)["sites"]["post_block[3]"]
        assert numbers["not_finite"] == 2 and numbers["norm_min"] == numbers["norm_max"] > 0
        json.dumps(numbers, allow_nan=False)

    def test_without_rows(self):
        """Catches statistics of empty rows that raise."""
        numbers = make_consumer("logging").accept(captured(rows=0))["sites"]["post_block[3]"]
        assert numbers["shape"] == [0, 16] and numbers["norm_mean"] is None

    def test_level(self, caplog):
        """Catches an ignored log level."""
        with caplog.at_level(logging.INFO, "vllm_steer.capture"):
            make_consumer("logging", {"level": "debug"}).accept(captured())
        assert not caplog.records

    def test_request_ids_cannot_forge_log_lines(self, caplog):
        """Catches line breaks and control characters of request ids in the log."""
        with caplog.at_level(logging.INFO, "vllm_steer.capture"):
            make_consumer("logging").accept(captured("a\nERROR: all is lost\x1b[2J"))
        assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ([{"name": "filesystem", "params": {"root": "x"}}], 'write {"filesystem": {"root": "x"}}'),
        (["logging"], 'write {"logging": {}}'),
        ([{"name": "unknown"}], 'must be {name: options} such as {"filesystem": {"root": "acts"}}'),
        ("filesystem:root=x", "must be {name: options}"),
        ({"filesystem": "acts"}, "capture_consumers.filesystem: must be a dict of options"),
        ({"filesytem": {}}, "did you mean filesystem?"),
    ],
)
def test_consumers_in_another_form(given: object, remedy: str) -> None:
    """Catches a list of consumers that fails with a bare TypeError, and only after the model was loaded."""
    with pytest.raises(SteeringError) as caught:
        read_consumers(given)
    assert remedy in str(caught.value)
    assert "; write" not in str(caught.value) or remedy.startswith("write")


def test_consumers_without_options() -> None:
    """Catches None refused where no options are meant."""
    assert read_consumers(None) == {}
    assert read_consumers({"logging": None, "filesystem": {"root": "x"}}) == {
        "logging": {},
        "filesystem": {"root": "x"},
    }
