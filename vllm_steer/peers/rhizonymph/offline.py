# SPDX-License-Identifier: Apache-2.0
"""``LLM`` and ``SamplingParams`` with the fork's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

import vllm_steer
from vllm_steer.adapters import is_integer, shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.rhizonymph.fields import FIELDS, translate_fields

_ROWS_PER_CONFIG = 4
"""Table rows for a request with vectors for prompt and generated tokens, and with room for others to end."""


def SamplingParams(**kwargs: Any) -> vllm_steer.SamplingParams:
    """Return sampling parameters with the fork's fields.

    Raises:
        SteeringError: A field is invalid or not served.

    Examples:
        >>> from vllm_steer.peers.rhizonymph import SamplingParams
        >>> SamplingParams(max_tokens=4, steering_vectors={"post_block": {1: [0.5, 0.5]}}).max_tokens
        4
    """
    given = {name: kwargs.pop(name) for name in (*FIELDS, "steering_modules", "readouts") if name in kwargs}
    return vllm_steer.SamplingParams(**kwargs, **translate_fields(given))


class LLM(vllm_steer.LLM):
    """``vllm_steer.LLM`` with the fork's arguments; steering is enabled.

    Args:
        model: As in vLLM.
        capture_consumers: Also a list of ``{"name", "params"}``.
        max_steering_configs: Number of different steering configurations of running requests; sets ``max_rows``.
        **kwargs: Further arguments of ``vllm_steer.LLM``.

    Raises:
        SteeringError: An argument is invalid.

    Examples:
        >>> from vllm_steer.peers.rhizonymph import LLM  # doctest: +SKIP
        >>> llm = LLM("demo/model", max_steering_configs=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *args: Any,
        capture_consumers: Any = None,
        max_steering_configs: int | None = None,
        **kwargs: Any,
    ) -> None:
        if max_steering_configs is not None:
            if not is_integer(max_steering_configs) or max_steering_configs < 1:
                raise SteeringError("max_steering_configs", f"must be 1 or more, not {shown(max_steering_configs)}")
            config = vllm_steer.SteeringConfig.parse(kwargs.get("steering_config"))
            rows = max(config.max_rows, _ROWS_PER_CONFIG * int(max_steering_configs))
            kwargs["steering_config"] = msgspec.structs.replace(config, max_rows=rows)
        settings = {"enable_steering": True, **kwargs}
        super().__init__(model, *args, capture_consumers=_consumers(capture_consumers), **settings)


def _consumers(given: Any) -> Any:
    if not isinstance(given, (list, tuple)):
        return given
    found: dict[str, Any] = {}
    for i, item in enumerate(given):
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str) or set(item) - {"name", "params"}:
            raise SteeringError(f"capture_consumers[{i}]", f'must be {{"name", "params"}}, not {shown(item)}')
        if item["name"] in found:
            raise SteeringError(f"capture_consumers[{i}]", f"{item['name']} is given twice")
        found[item["name"]] = item.get("params") or {}
    return found
