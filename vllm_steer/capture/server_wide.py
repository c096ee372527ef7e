# SPDX-License-Identifier: Apache-2.0
"""Server-wide captures: a consumer's options may contain a capture spec that applies to every request.

In Python, one dict holds the spec's keys and the consumer's options. In the flag, ``hooks`` is written as
``point:layers``, with layers joined by ``+`` and points by ``;``::

    --capture-consumers "filesystem:root=acts,hooks=post_block:4+12;pre_attn:all,positions=last_prompt"
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_KEY, PROGRAM_KEY, Specs, capture_specs, encode_specs, program_of
from vllm_steer.program import compile_program, join
from vllm_steer.request import parse_capture
from vllm_steer.request.references import SERVER_WIDE_SOURCE
from vllm_steer.request.scalars import shown

FLAG_KEYS = ("hooks", "positions", "before", "dtype")
"""Keys of a server-wide spec."""


def split_options(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Specs]:
    """Split a consumer's options into its own options and the server-wide spec, if there is one."""
    own = {key: value for key, value in options.items() if key not in FLAG_KEYS}
    spec = {key: value for key, value in options.items() if key in FLAG_KEYS}
    return own, parse_server_wide(name, spec, SERVER_WIDE_SOURCE) if spec else ()


def parse_server_wide(name: str, spec: Mapping[str, Any], field: str) -> Specs:
    """Return the server-wide spec of a consumer; raise SteeringError if it is invalid or does not fit every prompt."""
    parsed = parse_capture({name: spec}, field)
    if parsed[0][1].tokens.is_prompt_part:
        problem = "selects messages or images, which not every prompt has; use all_prompt"
        raise SteeringError(f"{field}.{name}.positions", problem)
    return parsed


def parse_flag_value(key: str, text: str, field: str) -> Any:
    """Parse the value of one of :data:`FLAG_KEYS`. Parsing the spec validates the result."""
    if key == "hooks":
        hooks: dict[str, str | list[int]] = {}
        for part in text.split(";"):
            point, _, layers = part.partition(":")
            if point in hooks:
                raise SteeringError(f"{field}.hooks", f"{shown(point)} is given twice; join layers with +")
            hooks[point] = _parse_layers(layers, field)
        return hooks
    if key == "before":
        if text not in ("true", "false"):
            raise SteeringError(f"{field}.before", f"must be true or false; got {shown(text)}")
        return text == "true"
    return text


def _parse_layers(text: str, field: str) -> str | list[int]:
    if text == "all":
        return text
    layers = text.split("+")
    if not all(layer.isdecimal() and len(layer) < 6 for layer in layers):
        raise SteeringError(
            f"{field}.hooks", f"{shown(text)} is not a list of layers; write post_block:4+12 or post_block:all"
        )
    return [int(layer) for layer in layers]


def with_captures(params: Any, specs: Specs) -> Any:
    """Add server-wide captures to a request's sampling parameters.

    Args:
        params: Sampling parameters; not modified.
        specs: Server-wide specs. Consumers that the request names itself are skipped.

    Returns:
        A copy with the captures, or ``params`` itself if nothing was added.
    """
    own = capture_specs(params)
    named = {name for name, _ in own}
    added = tuple((name, spec) for name, spec in specs if name not in named)
    if not added:
        return params
    program = program_of(params) or compile_program([])
    paths = [f"{SERVER_WIDE_SOURCE}.{consumer}" for consumer, _ in added]
    joined = join([program, compile_program([], [spec for _, spec in added], capture_paths=paths)])
    params = copy.copy(params)
    params.extra_args = {
        **(params.extra_args or {}),
        PROGRAM_KEY: joined.encode_cached(),
        CAPTURE_KEY: encode_specs((*own, *added)),
    }
    return params
