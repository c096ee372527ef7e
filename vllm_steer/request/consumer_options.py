# SPDX-License-Identifier: Apache-2.0
"""Options of a consumer in a capture spec, as canonical JSON."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_OPTIONS_CHARS, MAX_OPTIONS_DEPTH
from vllm_steer.request.scalars import is_integer, shown

NO_OPTIONS = "{}"
_OPTION_NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]{0,63}")


def read_options(value: object) -> str:
    """Return a consumer's options as canonical JSON; raise SteeringError if they are invalid or too large."""
    if value is None:
        return NO_OPTIONS
    if not isinstance(value, Mapping):
        raise SteeringError("options", f"must be a dict, not {shown(value)} ({type(value).__name__})")
    for name in value:
        if not isinstance(name, str) or not _OPTION_NAME.fullmatch(name):
            raise SteeringError("options", f"{shown(name)} is not a valid option name; use letters, digits, - and _")
    plain = {str(name): _plain(item, f"options.{name}", MAX_OPTIONS_DEPTH) for name, item in value.items()}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_OPTIONS_CHARS:
        raise SteeringError("options", f"have {len(text)} characters of JSON; at most {MAX_OPTIONS_CHARS} are allowed")
    return text


def _plain(value: object, field: str, depth: int) -> Any:
    """Copy ``value``, restricted to JSON types; `json.dumps` accepts more, and turns other keys into strings."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, (list, tuple)):
        return [_plain(item, f"{field}[{i}]", depth - 1) for i, item in enumerate(value)]
    if depth and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{field}.{shown(key)}", depth - 1) for key, item in value.items()}
    if is_integer(value) or isinstance(value, float):
        raise SteeringError(field, f"must be finite and fit into 64 bits, not {shown(value)}")
    raise SteeringError(
        field,
        f"must have JSON types, nested at most {MAX_OPTIONS_DEPTH} levels, not {shown(value)} ({type(value).__name__})",
    )
