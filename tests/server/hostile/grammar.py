# SPDX-License-Identifier: Apache-2.0
"""Bodies of all surfaces by grammar: nearly valid, wrong inside, with long lists, markers of parts and odd texts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.server.hostile.case import CLEAR, MODEL, MODULES, SET
from tests.server.server import HIDDEN

PATCH, SWEEP = "/v1/steering/patch", "/v1/patch_sweep"
_texts = st.sampled_from(
    ["Hello", "", "<think>why", "</think>", "<tool_call>", "a:b", "é😀", "\ud800", "x" * 2000, "user: me\nassistant:"]
)
# vLLM itself answers halves of surrogate pairs in prompts and in `vllm_xargs` with HTTP 500, with or without steering.
_encodable = _texts.filter(lambda text: text != "\ud800")
_scalars = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(width=32) | _texts
    | st.sampled_from([2**31, 10**30, 1e39, [], {}, [[]], "all", "answer", "thinking"])
)  # fmt: skip
_vectors = st.floats(-2, 2, width=32).map(lambda value: [value] * HIDDEN) | st.sampled_from(
    [[1.0], [], {"dtype": "float32", "shape": [HIDDEN], "data": "AAAA" * (HIDDEN // 3)}, [0.0] * HIDDEN]
)
_tokens = (
    st.sampled_from(["all", "prompt", "generated", "last_prompt", "answer", "thinking", "tool_call", "user", "image"])
    | st.lists(st.integers(-3, 60) | st.lists(st.integers(-3, 60), max_size=3), max_size=4)
    | st.sampled_from([[1] * 70_000, list(range(9000)), {"generated": [[0, None]]}, {"between": [":", "a"]}])
)  # fmt: skip
_layers = st.integers(-1, 5) | st.just("all") | st.lists(st.integers(0, 4), max_size=3) | st.just([1] * 5000)
_points = st.sampled_from(["pre_attn", "post_attn", "post_block", "attn_out", "blocks.1.hook_resid_post", "nowhere"])
_conditions = st.fixed_dictionaries(
    {"readout": st.sampled_from(["r", "other"])},
    optional={"above": st.floats(-3, 3), "below": _scalars, "window": st.sampled_from(["token", "previous", "latch"])},
)
_edits = st.fixed_dictionaries(
    {"kind": st.sampled_from(["add", "add_normed", "ablate", "clamp", "replace"]), "point": _points, "layers": _layers},
    optional={
        "vector": _vectors | st.lists(_vectors, max_size=3) | st.fixed_dictionaries({"module": _scalars}),
        "strength": _scalars, "dose": _scalars, "tokens": _tokens, "low": _scalars,
        "when": _conditions, "live": _texts, "subspace": st.lists(_vectors, max_size=3), "odd": _scalars,
    },
)  # fmt: skip
_readouts = st.fixed_dictionaries(
    {"point": _points},
    optional={"probe": _vectors, "layer": _layers, "positions": _tokens, "lens": _scalars, "bias": _scalars},
)
_captures = st.fixed_dictionaries(
    {"hooks": st.dictionaries(_points, _layers, max_size=2)},
    optional={"positions": _tokens, "before": _scalars, "reduce": _scalars, "store": st.booleans()},
)
_short = st.dictionaries(_points, st.dictionaries(st.sampled_from(["0", "1", "x"]), _vectors, max_size=2), max_size=2)
_fields = st.fixed_dictionaries(
    {},
    optional={
        "steering": st.lists(_edits, max_size=3) | _scalars,
        "steering_vectors": _short | _scalars,
        "decode_steering_vectors": _short,
        "readouts": st.dictionaries(st.sampled_from(["r", "\ud800", "a b"]), _readouts, max_size=2) | _scalars,
        "stop_on": st.lists(_conditions, max_size=2),
        "capture": st.dictionaries(st.sampled_from(["memory", "filesystem", "odd"]), _captures, max_size=2) | _scalars,
        "steering_modules": st.lists(_texts | st.fixed_dictionaries({"module": _texts, "dose": _scalars}), max_size=2),
        "vllm_xargs": st.dictionaries(_encodable, st.integers(), max_size=2)
        | st.just({f"z\u4e00{i}": 1 for i in range(3000)}),
        "stream": st.booleans(),
        "n": st.integers(1, 2),
    },
)
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": _encodable},
    optional={
        "tool_calls": st.just([{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        "tool_call_id": st.just("a"),
    },
)  # fmt: skip
_sampling: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 3}


def _joined(base: dict[str, Any], part: st.SearchStrategy[Any], key: str) -> st.SearchStrategy[Any]:
    return st.builds(lambda fields, value: {**base, **fields, key: value}, _fields, part)


_ids = st.lists(st.integers(0, 200), max_size=5)
_prompts = _texts | _ids
_study = st.fixed_dictionaries(
    {"clean": _prompts, "answer": _prompts},
    optional={
        "corrupt": _prompts, "foil": _prompts, "metric": _texts | st.sampled_from(["logprob", "kl"]), "layers": _tokens,
        "positions": _tokens, "points": st.lists(_points, max_size=2), "noise": _scalars, "subject": _texts,
        "ablate": st.sampled_from(["zero", "mean", "odd"]), "stream": st.booleans(), "pairs": _scalars,
    },
)  # fmt: skip
_sweep = st.fixed_dictionaries(
    {"prompt": _prompts, "clean_prompt": _prompts, "answer_token": _scalars},
    optional={"layers": _tokens, "positions": _tokens, "hook": _points, "stream": st.booleans()},
)
_content = st.fixed_dictionaries(
    {}, optional={"base": _short, "edits": st.lists(_edits, max_size=2), "probes": _short, "odd": _scalars}
)
SURFACES: dict[str, st.SearchStrategy[Any]] = {
    "/v1/completions": _joined(_sampling, _encodable | _ids, "prompt"),
    "/v1/chat/completions": _joined(_sampling, st.lists(_message, min_size=1, max_size=4), "messages"),
    "/v1/responses": _joined({"model": MODEL, "temperature": 0, "max_output_tokens": 3}, _encodable, "input"),
    MODULES: st.builds(lambda content, name: {**content, "name": name}, _content, _texts),
    SET: _content,
    CLEAR: st.just({}) | _scalars,
    "/v1/steering/requests/none": st.dictionaries(_texts, _scalars, max_size=2),
    PATCH: _study,
    SWEEP: _sweep,
}
"""Bodies by route."""
requests = st.one_of([st.tuples(st.just(route), bodies) for route, bodies in SURFACES.items()])


def encoded(body: Any) -> bytes:
    """Return a body as clients send it: with escapes, so that halves of surrogate pairs arrive."""
    return json.dumps(body).encode()
