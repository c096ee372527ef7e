# SPDX-License-Identifier: Apache-2.0
"""Bodies with the fields of peers, drawn by grammar, against a real server: no status 5xx and no cut stream."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from hypothesis import strategies as st

from tests.server.hostile.test_grammar import draw, post
from tests.server.server import HIDDEN, MODEL
from vllm_steer.peers.vllm_lens import serialize_tensor

pytestmark = pytest.mark.slow
_odd = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(width=32) | st.sampled_from(
    ["", "all", "\ud800", "x" * 2000, 2**31, 10**30, 1e39, [], {}, [[]], [True, False], {"kind": []}]
)  # fmt: skip
_layers = st.integers(-1, 5) | st.lists(st.integers(-1, 5), max_size=3) | st.just([1] * 5000)
_shapes = st.sampled_from([[1, HIDDEN], [2, HIDDEN], [1, 2, HIDDEN], [HIDDEN], [0, HIDDEN], [1, 3], [1 << 40, 1]])
_compressions = st.sampled_from([None, "zstd", "gzip"])


def _tensor(shape: list[int], compression: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    ones = torch.ones(shape if max(shape) <= HIDDEN else [1])
    wire = serialize_tensor(ones, compression="zstd" if compression == "zstd" else None)
    return {**wire, "shape": shape, "compression": compression, **changes}


_changes = st.fixed_dictionaries(
    {},
    optional={
        "data": st.sampled_from(["", "!", "AAAA", 1]), "dtype": st.sampled_from(["int16", ">f4", "float64", []]),
        "original_dtype": st.sampled_from(["torch.bfloat16", "object", None]), "order": st.just("F"), "shape": _odd,
    },
)  # fmt: skip
_tensors = st.builds(_tensor, _shapes, _compressions, st.just({}) | _changes)
_lens_vectors = st.fixed_dictionaries(
    {"activations": _tensors | _odd, "layer_indices": _layers},
    optional={"scale": _odd, "norm_match": st.booleans(), "position_indices": _layers | _odd, "odd": _odd},
)
_lens = st.fixed_dictionaries(
    {},
    optional={
        "apply_steering_vectors": st.lists(_lens_vectors, max_size=3) | _odd, "output_residual_stream": _layers | _odd,
        "activations_transport": st.sampled_from(["base64", "binary", "x"]), "apply_hooks": _odd, "output_qk": _odd,
        "skip_reading_prefix_cache": _odd,
    },
)  # fmt: skip
_points = st.sampled_from(["pre_attn", "post_attn", "post_block", "nowhere", ""])


def _packed(rows: int, changes: dict[str, Any]) -> dict[str, Any]:
    data = base64.b64encode(bytes(4 * rows * HIDDEN)).decode()
    return {"dtype": "float32", "shape": [rows, HIDDEN], "layer_indices": list(range(rows)), "data": data, **changes}


_packed_vectors = st.builds(
    _packed,
    st.integers(0, 3),
    st.just({}) | st.fixed_dictionaries({}, optional={
        "layer_indices": _layers, "scales": st.lists(st.floats(-1, 1), max_size=3), "shape": _odd, "data": _odd,
    }),
)  # fmt: skip
_rows = st.sampled_from([[0.5] * HIDDEN, [1.0], [], "x"]) | _odd
_sources = _odd | st.fixed_dictionaries({"hook": _points, "layer": st.integers(-1, 5), "vector": _rows}) | st.builds(
    lambda packed: {"kind": "inline", "packed": packed}, st.dictionaries(_points, _packed_vectors | _odd, max_size=2)
)  # fmt: skip
_gates = st.fixed_dictionaries(
    {"apply": st.fixed_dictionaries(
        {"kind": st.sampled_from(["add", "clamp", "attenuate"]), "steer": _sources},
        optional={"strength": _odd, "min": _odd, "max": st.floats(-2, 2)},
    )},
    optional={
        "when": _odd | st.fixed_dictionaries(
            {"kind": st.sampled_from(["probe", "always", "x"]), "probe": _sources},
            optional={"threshold": st.floats(-2, 2) | _odd, "sharpness": _odd},
        ),
        "scope": st.sampled_from(["this_token", "next_step", "rest_of_request", "conversation", 1]),
    },
)  # fmt: skip
_sites = st.fixed_dictionaries(
    {"layer": st.integers(-1, 5), "hook": _points, "dest_position": st.integers(-2, 40), "source_inline": _rows},
    optional={"alpha": _odd, "mask": _odd, "source_run": _odd},
)
_rhizonymph = st.fixed_dictionaries(
    {},
    optional={
        "steering": st.lists(_gates, max_size=3) | _odd, "patch": st.lists(_sites, max_size=3) | _odd,
        "patch_vectors": _packed_vectors | _odd, "steering_name": _odd, "steering_clamps": _odd, "capture_wait": _odd,
        "steering_vectors": st.dictionaries(_points, _packed_vectors, max_size=2),
        "capture": st.dictionaries(
            st.sampled_from(["memory", "filesystem"]),
            st.fixed_dictionaries({"hooks": st.dictionaries(_points, _layers | _odd, max_size=2)}, optional={
                "request_id": _odd, "positions": _odd,
            }),
            max_size=2,
        ),
    },
)  # fmt: skip


def _as_xargs(keys: dict[str, Any]) -> dict[str, Any]:
    # vLLM itself answers halves of surrogate pairs in `vllm_xargs` with HTTP 500; here they are escaped.
    return {"vllm_xargs": {name: json.dumps(value) for name, value in keys.items()}}


_fields = _lens.map(lambda keys: {"extra_args": keys}) | _lens.map(_as_xargs) | _rhizonymph
_bodies = st.builds(
    lambda fields, stream, n: {
        "model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 3, **fields, "stream": stream, "n": n,
    },
    _fields, st.booleans(), st.integers(1, 2),
)  # fmt: skip


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.failure(14)
def test_bodies_of_peers_by_grammar(http: httpx.Client) -> None:
    """Catches a body of a peer's client that breaks the translation, or cuts a stream."""

    def check(body: Any) -> None:
        post(http, "/v1/completions", body)

    draw(check, _bodies, derandomize=True)
    assert http.get("/health").status_code == 200
