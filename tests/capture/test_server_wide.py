# SPDX-License-Identifier: Apache-2.0
"""Server-wide captures: parsing of options and flags, and their addition to sampling parameters."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from vllm_steer import SamplingParams, SteeringConfig, SteeringError
from vllm_steer.capture.consumers import parse_consumer_flag
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.server_wide import split_options, with_captures
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.params import MAX_SPEC_CACHE_BYTES, capture_specs, program_of


def test_flag_with_options_and_spec() -> None:
    """Catches keys of the spec passed to the consumer, and options parsed as part of the spec."""
    name, options = parse_consumer_flag(
        "filesystem:root=acts,hooks=post_block:4+12;pre_attn:all,positions=all,before=true"
    )
    own, specs = split_options(name, options)
    assert own == {"root": "acts"}
    ((consumer, spec),) = specs
    assert consumer == "filesystem"
    assert spec.hooks == (("pre_attn", "all"), ("post_block", (4, 12)))
    assert spec.before
    assert split_options("memory", {}) == ({}, ())


@pytest.mark.parametrize(
    "text",
    [
        "memory:hooks=post_mlp:1",
        "memory:hooks=post_block:x",
        "memory:hooks=post_block:",
        "memory:hooks=post_block:1-4",
        "memory:positions=all",
        "memory:hooks=post_block:1,positions=sometimes",
        "memory:hooks=post_block:1,positions=user",  # not every prompt has such a message
        "memory:hooks=post_block:1,before=yes",
        "memory:hooks=post_block:1,colour=red",
    ],
)
def test_rejects_invalid_flags(text: str) -> None:
    """Catches a server that starts with a different capture than requested."""
    with pytest.raises(SteeringError):
        parse_consumer_flag(text)


def test_repeated_point_in_a_flag() -> None:
    """Catches layers that are dropped because their point is given again."""
    with pytest.raises(SteeringError, match=r"memory\.hooks: 'post_block' is given twice; join layers with \+"):
        parse_consumer_flag("memory:hooks=post_block:4;pre_attn:1;post_block:12")


def test_added_to_requests_that_do_not_name_the_consumer() -> None:
    """Catches lost edits, a replaced spec of the request, and a modified ``SamplingParams`` of the caller."""
    _, specs = split_options("logging", {"hooks": {"post_block": [1]}})
    plain = SamplingParams(max_tokens=3)
    steered = SamplingParams(
        steering_vectors={"pre_attn": {0: np.ones(4)}}, capture={"memory": {"hooks": {"pre_attn": [2]}}}
    )
    own = SamplingParams(capture={"logging": {"hooks": {"post_attn": [3]}}})
    assert [name for name, _ in capture_specs(with_captures(plain, specs))] == ["logging"]
    assert plain.extra_args is None
    both = with_captures(steered, specs)
    assert [name for name, _ in capture_specs(both)] == ["memory", "logging"]
    program = program_of(both)
    assert program is not None
    assert (len(program.edits), len(program.captures)) == (1, 2)
    assert with_captures(own, specs) is own


def test_spec_cache_is_bounded_in_bytes() -> None:
    """Catches a cache bounded in entries only: 64 projections of the largest size take 2 GiB."""
    requests = [SamplingParams(capture={"memory": {"hooks": {"pre_attn": [0]}, "reduce": {
        "directions": np.full((256, 4096), i, "f4")}}}) for i in range(10)]  # fmt: skip
    references = []
    for params in requests:
        ((_, spec),) = capture_specs(params)
        assert capture_specs(params)[0][1] is spec
        references.append(weakref.ref(spec))
        del spec
    gc.collect()
    assert 0 < sum(each() is not None for each in references) <= MAX_SPEC_CACHE_BYTES // (8 << 20)
    small = SamplingParams(capture={"memory": {"hooks": {"pre_attn": [0]}}})
    assert capture_specs(small) is capture_specs(small)


def test_unsupported_capture_prevents_the_start(tmp_path: Path) -> None:
    """Catches a server that rejects every request, and a run whose name stays taken after the failed start."""
    capabilities = Capabilities(4, 64, 128, "float32", {}, SteeringConfig())
    with pytest.raises(SteeringError, match="layer 9"):
        CaptureManager(capabilities, "model", {"memory": {"hooks": {"post_block": [9]}}})
    CaptureManager(capabilities, "model", {"memory": {"hooks": {"post_block": [3]}}}).close()
    files = {"root": str(tmp_path), "run": "baseline"}
    with pytest.raises(SteeringError, match="layer 9"):
        CaptureManager(capabilities, "model", {"filesystem": {**files, "hooks": {"post_block": [9]}}})
    CaptureManager(capabilities, "model", {"filesystem": files}).close()
