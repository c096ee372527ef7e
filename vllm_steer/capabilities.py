# SPDX-License-Identifier: Apache-2.0
"""What a running engine serves, and the check of one request against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_steer.config import SteeringConfig
from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import Program, Resolved, resolve
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.program import Step


@dataclass(frozen=True)
class Capabilities:
    """Facts of the model and the tables of an engine that steers.

    ``refused[point][layer]`` is the reason why edits are refused there; what is not named is served.
    """

    num_layers: int
    hidden_size: int
    max_model_len: int
    refused: Mapping[str, Mapping[int, str]]
    config: SteeringConfig

    @classmethod
    def merge(cls, ranks: Iterable[Mapping[str, Any]], config: SteeringConfig) -> Capabilities:
        """From every rank's own report: pipeline stages know only their layers."""
        reports = list(ranks)
        refused: dict[str, dict[int, str]] = {}
        for report in reports:
            for point, layers in report["refused"].items():
                refused.setdefault(point, {}).update({int(layer): reason for layer, reason in layers.items()})
        first = reports[0]
        return cls(first["num_layers"], first["hidden_size"], first["max_model_len"], refused, config)

    def check(self, program: Program, prompt_len: int | None) -> None:
        """Raise :class:`SteeringError` where this engine cannot serve ``program`` exactly as asked.

        ``prompt_len`` None: the prompt is not known yet, and what depends on it is checked later.
        """
        if program.steps and program.width != self.hidden_size:
            raise SteeringError(
                "vector", f"has {program.width} elements, but this model's hidden size is {self.hidden_size}"
            )
        for step in program.steps:
            self._check_step(step)
        if prompt_len is not None:
            self._check_size(resolve(program, prompt_len, self.num_layers))

    def _check_step(self, step: Step) -> None:
        point = POINT_NAMES[step.point]
        where = f"{KIND_OF[step.code]} at {point}"
        for layer in step.layers:
            if layer >= self.num_layers:
                raise SteeringError(
                    f"layers ({where})", f"layer {layer} does not exist; this model has layers 0 to {self.num_layers - 1}"
                )
        refused = self.refused.get(point, {})
        for layer in step.layers or range(self.num_layers):
            if layer in refused:
                raise SteeringError(f"point ({where})", f"not served at layer {layer}: {refused[layer]}")
        last = step.selector.max_position
        if last >= self.max_model_len:
            raise SteeringError(
                f"tokens ({where})", f"position {last} is beyond this engine's max_model_len of {self.max_model_len}"
            )

    def _check_size(self, resolved: Resolved) -> None:
        rows = resolved.rows
        needed = {
            "max_segments": len(resolved.segments),
            "max_rows": len(rows),
            "max_instructions": sum(row.instruction_count for row in rows),
            "max_vectors": len({vector for row in rows for vector in row.vectors}),
        }
        for name, count in needed.items():
            limit = getattr(self.config, name)
            if count > limit:
                raise SteeringError(
                    "steering", f"needs {count} of {name}, but this engine was started with {limit}: it can never fit"
                )
