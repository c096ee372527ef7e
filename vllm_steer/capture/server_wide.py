# SPDX-License-Identifier: Apache-2.0
"""Captures of every request, set where the engine is started: a consumer's options may hold a spec of its own.

In Python the spec's keys stand beside the consumer's options. In a flag, sites are written ``point:layers``, layers
joined by ``+`` and points by ``;``::

    --capture-consumers "filesystem:root=acts,hooks=post_block:4+12;pre_attn:all,positions=last_prompt"
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.params import CAPTURE_KEY, EXTRA_KEY, Specs, capture_specs, encode_specs, program_of
from vllm_steer.program import compile_program, join
from vllm_steer.spec import parse_capture

FLAG_KEYS = ("hooks", "positions", "before", "dtype")


def split_options(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Specs]:
    """A consumer's own options, and the spec for every request, if the options hold one."""
    own = {key: value for key, value in options.items() if key not in FLAG_KEYS}
    spec = {key: value for key, value in options.items() if key in FLAG_KEYS}
    return own, parse_capture({name: spec}, "capture_consumers") if spec else ()


def read_flag_value(key: str, text: str, field: str) -> Any:
    """One of :data:`FLAG_KEYS` as it is written in a flag; what it means is checked with the spec."""
    if key == "hooks":
        return {point: _layers(layers, field) for point, _, layers in (part.partition(":") for part in text.split(";"))}
    if key == "before":
        if text not in ("true", "false"):
            raise SteeringError(f"{field}.before", f"must be true or false, not {text[:40]!r}")
        return text == "true"
    return text


def _layers(text: str, field: str) -> str | list[int]:
    if text == "all":
        return text
    if not text or not all(part.isdecimal() and len(part) < 6 for part in text.split("+")):
        raise SteeringError(
            f"{field}.hooks", f"{text[:40]!r} is no list of layers; write post_block:4+12 or post_block:all"
        )
    return [int(part) for part in text.split("+")]


def with_captures(params: Any, specs: Specs) -> Any:
    """``params`` with ``specs`` added, but for consumers that the request names itself; a copy where any is added."""
    own = capture_specs(params)
    named = {name for name, _ in own}
    added = tuple((name, spec) for name, spec in specs if name not in named)
    if not added:
        return params
    program = program_of(params) or compile_program([])
    paths = [f"capture.{consumer}" for consumer, _ in added]
    changed = join([program, compile_program([], [spec for _, spec in added], capture_paths=paths)])
    params = copy.copy(params)
    params.extra_args = {
        **(params.extra_args or {}),
        EXTRA_KEY: changed.encode_cached(),
        CAPTURE_KEY: encode_specs((*own, *added)),
    }
    return params
