# SPDX-License-Identifier: Apache-2.0
"""What a running engine serves, and the check of one request against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from vllm_steer.config import SteeringConfig
from vllm_steer.engine.report import merge_facts
from vllm_steer.errors import SteeringError
from vllm_steer.points import POINT_NAMES, POINTS, PointName, how_to_switch_on
from vllm_steer.program import Program, Resolved, resolve
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.program import CompiledEdit, CompiledRead

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Capabilities:
    """Facts of the model and the tables of an engine that steers.

    ``refused[point][layer]`` is the reason why edits are refused there, ``unread[point][layer]`` why reads are; what is
    not named is served. ``no_capture`` is the reason why this engine reads nothing at all, or None. ``facts`` is what
    the workers said beside this, for reports. ``drafts``: tokens that a request may have beside its next one in a step.
    """

    num_layers: int
    hidden_size: int
    max_model_len: int
    dtype: str
    refused: Mapping[str, Mapping[int, str]]
    config: SteeringConfig
    no_capture: str | None = None
    unread: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    drafts: int = 0
    _placed: WeakValueDictionary[int, Program] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )
    """Programs by their ids, as long as they are there, that have been found to act only where that is served."""

    @classmethod
    def merge(
        cls, ranks: Iterable[Mapping[str, Any]], config: SteeringConfig, no_capture: str | None = None, drafts: int = 0
    ) -> Capabilities:
        """From every rank's own report: pipeline stages know only their layers."""
        reports = list(ranks)
        first = reports[0]
        return cls(
            first["num_layers"],
            first["hidden_size"],
            first["max_model_len"],
            first["dtype"],
            _joined(report["refused"] for report in reports),
            config,
            no_capture,
            _joined(report["unread"] for report in reports),
            merge_facts(reports) | {key: _joined(report[key] for report in reports) for key in ("refused", "unread")},
            drafts,
        )

    def check(self, program: Program, prompt_len: int | None, max_tokens: int | None = None) -> None:
        """Raise :class:`SteeringError` where this engine cannot serve ``program`` exactly as asked.

        ``prompt_len`` or ``max_tokens`` None: not known yet, and what depends on them is checked later.
        """
        # Requests with equal programs share the program: where it acts is looked at once.
        if self._placed.get(id(program)) is not program:
            self._check_places(program)
            self._placed[id(program)] = program
        if prompt_len is not None:
            resolved = resolve(program, prompt_len, self.num_layers, max_segments=self.config.max_segments)
            self._check_size(resolved)
            if max_tokens is not None and resolved.max_captures:
                self._check_budget(self._most_bytes(resolved, prompt_len, max_tokens))

    def _check_places(self, program: Program) -> None:
        if program.vectors and program.width != self.hidden_size:
            raise SteeringError(
                program.edit_source(0) if program.edits else "capture.reduce.directions",
                f"the vector has {program.width} elements, but this model's hidden size is {self.hidden_size}",
            )
        for i, edit in enumerate(program.edits):
            source = program.edit_source(i)
            self._check_range(edit, source, source)
            self._check_editable(edit, source)
        for i, read in enumerate(program.reads):
            hooks = f"{program.read_source(i)}.hooks.{POINT_NAMES[read.point]}"
            self._check_range(read, hooks, f"{program.read_source(i)}.positions")
            self._check_readable(read, hooks)

    def most_row_bytes(self, program: Program, prompt_len: int | None, max_tokens: int | None) -> int:
        """What the captured rows of one sample may come to; ``program`` is checked."""
        # Where the prompt's length is not known, the most is at one of the two ends.
        lengths = (1, self.max_model_len - 1) if prompt_len is None else (prompt_len,)
        return max(self._most_bytes(resolve(program, each, self.num_layers), each, max_tokens) for each in lengths)

    def _most_bytes(self, resolved: Resolved, prompt_len: int, max_tokens: int | None) -> int:
        left = self.max_model_len - prompt_len
        return resolved.total_bytes(prompt_len, left if max_tokens is None else min(max_tokens, left), self._row_bytes)

    def _check_range(self, part: CompiledEdit | CompiledRead, layers_field: str, tokens_field: str) -> None:
        for layer in part.layers:
            if layer >= self.num_layers:
                raise SteeringError(
                    layers_field, f"layer {layer} does not exist; this model has layers 0 to {self.num_layers - 1}"
                )
        last = part.selector.max_position
        if last >= self.max_model_len:
            raise SteeringError(
                tokens_field, f"position {last} is beyond this engine's max_model_len of {self.max_model_len}"
            )

    def _check_editable(self, edit: CompiledEdit, field: str) -> None:
        point = POINT_NAMES[edit.point]
        refused = self.refused.get(point, {})
        for layer in edit.layers or range(self.num_layers):
            if layer in refused:
                raise SteeringError(
                    field, f"{KIND_OF[edit.code]} at {point} is not served at layer {layer}: {refused[layer]}"
                )
        self._check_on(point, field)

    def _check_readable(self, read: CompiledRead, field: str) -> None:
        if self.no_capture is not None:
            raise SteeringError("capture", self.no_capture)
        unread = self.unread.get(POINT_NAMES[read.point], {})
        for layer in read.layers or range(self.num_layers):
            if layer in unread:
                raise SteeringError(field, f"not read at layer {layer}: {unread[layer]}")
        self._check_on(POINT_NAMES[read.point], field)

    def _check_on(self, point: PointName, field: str) -> None:
        """What a model cannot serve is said first, since no flag helps there."""
        if POINTS[point].optional and point not in self.config.points:
            raise SteeringError(field, how_to_switch_on(point))

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    def _check_budget(self, num_bytes: int) -> None:
        mib = num_bytes / 2**20
        if mib > self.config.capture_mib:
            raise SteeringError(
                "capture",
                f"may come to {mib:.0f} MiB of rows, but this engine was started with capture_mib "
                f"{self.config.capture_mib}: it can never fit; read fewer layers or positions, or set max_tokens",
            )

    def _check_size(self, resolved: Resolved) -> None:
        rows = resolved.token_programs
        needed = {
            "max_rows": len(rows),
            "max_instructions": sum(row.num_instructions for row in rows),
            "capture_rows": resolved.max_captures * (1 + self.drafts),
            "max_vectors": len({vector for row in rows for vector in row.vectors}),
        }
        for name, count in needed.items():
            limit = getattr(self.config, name)
            if count > limit:
                raise SteeringError(
                    "steering", f"needs {count} of {name}, but this engine was started with {limit}: it can never fit"
                )


def _joined(reports: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[int, str]]:
    """By point and layer, of all ranks; layers are strings in a report, as JSON's keys are."""
    joined: dict[str, dict[int, str]] = {}
    for report in reports:
        for point, layers in report.items():
            joined.setdefault(point, {}).update({int(layer): reason for layer, reason in layers.items()})
    return joined
