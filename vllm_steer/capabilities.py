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
from vllm_steer.program.program import Read, Step

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Capabilities:
    """Facts of the model and the tables of an engine that steers.

    ``refused[point][layer]`` is the reason why edits are refused there; what is not named is served. ``no_capture``
    is the reason why this engine reads nothing at all, or None.
    """

    num_layers: int
    hidden_size: int
    max_model_len: int
    dtype: str
    refused: Mapping[str, Mapping[int, str]]
    config: SteeringConfig
    no_capture: str | None = None

    @classmethod
    def merge(
        cls, ranks: Iterable[Mapping[str, Any]], config: SteeringConfig, no_capture: str | None = None
    ) -> Capabilities:
        """From every rank's own report: pipeline stages know only their layers."""
        reports = list(ranks)
        refused: dict[str, dict[int, str]] = {}
        for report in reports:
            for point, layers in report["refused"].items():
                refused.setdefault(point, {}).update({int(layer): reason for layer, reason in layers.items()})
        first = reports[0]
        return cls(
            first["num_layers"],
            first["hidden_size"],
            first["max_model_len"],
            first["dtype"],
            refused,
            config,
            no_capture,
        )

    def check(self, program: Program, prompt_len: int | None, max_tokens: int | None = None) -> None:
        """Raise :class:`SteeringError` where this engine cannot serve ``program`` exactly as asked.

        ``prompt_len`` or ``max_tokens`` None: not known yet, and what depends on them is checked later.
        """
        if program.steps and program.width != self.hidden_size:
            raise SteeringError(
                "vector", f"has {program.width} elements, but this model's hidden size is {self.hidden_size}"
            )
        for step in program.steps:
            where = f"{KIND_OF[step.code]} at {POINT_NAMES[step.point]}"
            self._check_place(step, where, "tokens")
            self._check_editable(step, where)
        for read in program.reads:
            where = f"capture at {POINT_NAMES[read.point]}"
            self._check_place(read, where, "positions")
            self._check_readable(read, where)
        if prompt_len is not None:
            resolved = resolve(program, prompt_len, self.num_layers)
            self._check_size(resolved)
            if max_tokens is not None and resolved.max_captures:
                self._check_budget(resolved.rows_in_all(prompt_len, min(max_tokens, self.max_model_len - prompt_len)))

    def _check_place(self, part: Step | Read, where: str, field: str) -> None:
        for layer in part.layers:
            if layer >= self.num_layers:
                raise SteeringError(
                    f"layers ({where})",
                    f"layer {layer} does not exist; this model has layers 0 to {self.num_layers - 1}",
                )
        last = part.selector.max_position
        if last >= self.max_model_len:
            raise SteeringError(
                f"{field} ({where})", f"position {last} is beyond this engine's max_model_len of {self.max_model_len}"
            )

    def _check_editable(self, step: Step, where: str) -> None:
        refused = self.refused.get(POINT_NAMES[step.point], {})
        for layer in step.layers or range(self.num_layers):
            if layer in refused:
                raise SteeringError(f"point ({where})", f"not served at layer {layer}: {refused[layer]}")

    def _check_readable(self, read: Read, where: str) -> None:
        if self.no_capture is not None:
            raise SteeringError("capture", self.no_capture)
        # Where a point cannot be edited there is no tap that could read it either.
        refused = self.refused.get(POINT_NAMES[read.point], {})
        for layer in read.layers or range(self.num_layers):
            if layer in refused:
                raise SteeringError(f"hooks ({where})", f"no tap reads this point at layer {layer} of this model")

    def _check_budget(self, rows: int) -> None:
        mib = rows * self.hidden_size * DTYPE_BYTES[self.dtype] / 2**20
        if mib > self.config.capture_mib:
            raise SteeringError(
                "capture",
                f"may come to {mib:.0f} MiB of rows, but this engine was started with capture_mib "
                f"{self.config.capture_mib}: it can never fit; read fewer layers or positions, or set max_tokens",
            )

    def _check_size(self, resolved: Resolved) -> None:
        rows = resolved.rows
        needed = {
            "max_segments": len(resolved.segments),
            "max_rows": len(rows),
            "max_instructions": sum(row.instruction_count for row in rows),
            "capture_rows": resolved.max_captures,
            "max_vectors": len({vector for row in rows for vector in row.vectors}),
        }
        for name, count in needed.items():
            limit = getattr(self.config, name)
            if count > limit:
                raise SteeringError(
                    "steering", f"needs {count} of {name}, but this engine was started with {limit}: it can never fit"
                )
