# SPDX-License-Identifier: Apache-2.0
"""Capabilities of a running engine, and the check of a program against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from vllm_steer.config import SteeringConfig
from vllm_steer.engine.admission import most_rows, rows_for
from vllm_steer.engine.report import CapabilityReport, make_report, merge_facts
from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.points import POINT_NAMES, POINTS, PointName, how_to_switch_on, points_on
from vllm_steer.program import Program, Resolved, resolve
from vllm_steer.program.compiled_capture import CompiledCapture
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.instructions import KIND_OF
from vllm_steer.program.overflow import check_overflow
from vllm_steer.program.readouts import CompiledReadout
from vllm_steer.request import Selector
from vllm_steer.request.readout import LENS, READOUTS_FIELD, SAE_PREFIX
from vllm_steer.request.sites import OF_THE_MODEL

EXCEEDS = "the engine allows"
"""Part of the message about a request that exceeds a limit of the engine."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Capabilities:
    """Facts about the model and the limits of an engine with steering.

    Attributes:
        num_layers: Number of decoder layers.
        hidden_size: Width of the residual stream.
        max_model_len: vLLM's ``max_model_len``.
        dtype: Name of the model's dtype.
        refused: Reasons why edits are refused, by point and layer. Other sites can be edited.
        config: Limits of the engine.
        no_capture: Reason why the engine captures nothing, or None.
        unread: Reasons why captures are refused, by point and layer. Other sites can be captured.
        facts: Further facts from the workers, for reports.
        drafts: Most draft tokens of a request in a step.
        no_readouts: Reason why the engine supports no readouts, or None.
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
    no_readouts: str | None = None
    _checked: WeakValueDictionary[int, Program] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )
    """Live programs, by id, whose sites and positions have been checked."""

    @classmethod
    def merge(
        cls,
        ranks: Iterable[Mapping[str, Any]],
        config: SteeringConfig,
        no_capture: str | None = None,
        drafts: int = 0,
        no_readouts: str | None = None,
    ) -> Capabilities:
        """Return an engine's capabilities from its ranks' reports; a pipeline stage reports its own layers."""
        reports = list(ranks)
        first = reports[0]
        return cls(
            first["num_layers"],
            first["hidden_size"],
            first["max_model_len"],
            first["dtype"],
            _merge_reasons(report["refused"] for report in reports),
            config,
            no_capture,
            _merge_reasons(report["unread"] for report in reports),
            merge_facts(reports)
            | {key: _merge_reasons(report[key] for report in reports) for key in ("refused", "unread")},
            drafts,
            no_readouts,
        )

    def report(self) -> CapabilityReport:
        """Return the report of the engine, which does not change while it runs."""
        import vllm

        return make_report({**self.facts, "vllm": vllm.__version__}, self.config, no_capture=self.no_capture)

    def check(self, program: Program, prompt_len: int | None, max_tokens: int | None = None) -> None:
        """Raise :class:`SteeringError` unless this engine serves ``program`` exactly as written.

        Args:
            program: A decoded program.
            prompt_len: Length of the prompt in tokens. None skips the checks that depend on it.
            max_tokens: Most generated tokens. None skips the checks of positions and of the capture budget.
        """
        # Requests with equal programs share the object, and those that differ in vectors only share the outline, so its
        # sites are checked once.
        outline = program.outline
        if self._checked.get(id(program)) is not program:
            if self._checked.get(id(outline)) is not outline:
                self._check_sites(outline)
                self._checked[id(outline)] = outline
            check_overflow(program, self.dtype, self.num_layers)
            self._checked[id(program)] = program
        program = outline
        if prompt_len is not None:
            resolved = resolve(program, prompt_len, self.num_layers, max_segments=self.config.max_segments)
            self._check_size(resolved)
            if max_tokens is not None:
                self._check_reach(program, prompt_len, max_tokens)
                if resolved.max_captures:
                    self._check_budget(self._most_bytes(resolved, prompt_len, max_tokens))

    def _check_sites(self, program: Program) -> None:
        if program.vectors and program.width != self.hidden_size:
            raise SteeringError(
                program.vector_source,
                f"the vector has {program.width} elements, but this model's hidden size is {self.hidden_size}",
            )
        for i, edit in enumerate(program.edits):
            source = program.edit_source(i)
            if edit.is_pending:
                raise SteeringError(source, "features of autoencoders are supported in fields of requests only")
            self._check_range(edit, source, source)
            point = POINT_NAMES[edit.point]
            self._check_served(edit, self.refused.get(point, {}), f"{KIND_OF[edit.code]} at {point}", source)
        for i, capture in enumerate(program.captures):
            hooks = f"{program.capture_source(i)}.hooks.{POINT_NAMES[capture.point]}"
            self._check_range(capture, hooks, f"{program.capture_source(i)}.positions")
            if self.no_capture is not None:
                raise SteeringError("capture", self.no_capture)
            self._check_served(capture, self.unread.get(POINT_NAMES[capture.point], {}), "capture", hooks)
        for i, readout in enumerate(program.readouts):
            self._check_readout(readout, program.readout_source(i))
        if program.has_records:
            self._check_records(program)

    def _check_readout(self, readout: CompiledReadout, source: str) -> None:
        point = POINT_NAMES[readout.point]
        if readout.probes or readout.omitted:
            raise SteeringError(source, "probes of modules and autoencoders are supported in fields of requests only")
        if self.no_readouts is not None:
            raise SteeringError(source, self.no_readouts)
        for layer in readout.layers or (readout.layer,):
            self._check_layer(layer, f"{source}.layer")
            reason = self.unread.get(point, {}).get(layer)
            if reason is not None:
                raise SteeringError(source, f"cannot be read at {point} of layer {layer}: {reason}")
        if readout.head:
            self._check_head(readout, source)
        self._check_enabled(point, source)
        self._check_last(readout.selector, f"{source}.positions")

    def _check_head(self, readout: CompiledReadout, source: str) -> None:
        """Raise :class:`SteeringError` unless the engine has a readout's head."""
        heads: Mapping[str, int] = self.facts.get("heads", {})
        if readout.head == LENS:
            if (reason := self.facts.get("no_lens", "it was not reported")) is not None:
                raise SteeringError(f"{source}.lens", f"is not supported by this engine: {reason}")
            if POINTS[POINT_NAMES[readout.point]].optional:
                raise SteeringError(f"{source}.point", f"lens reads the stream; use {', '.join(points_on(()))}")
        elif readout.head not in heads:
            known = sorted(name.removeprefix(SAE_PREFIX) for name in heads if name.startswith(SAE_PREFIX))
            raise SteeringError(
                f"{source}.sae",
                f"no autoencoder is called {readout.head.removeprefix(SAE_PREFIX)!r}; this engine has: "
                f"{', '.join(known) or 'none (--steering-sae NAME=FOLDER)'}",
            )
        if max(readout.targets, default=0) >= heads[readout.head]:
            raise SteeringError(
                f"{source}.lens.tokens",
                f"token id {max(readout.targets)} does not exist; this model has {heads[readout.head]} tokens",
            )
        if readout.top_k > heads[readout.head]:
            raise SteeringError(f"{source}.top_k", f"is {readout.top_k}, but there are {heads[readout.head]} outputs")

    def _check_records(self, program: Program) -> None:
        conditions, spans = program.num_conditions
        needed = (
            (
                "record_columns",
                program.layout.width - 1,  # the tables have one more column, for the number of a stop
                "record columns for readouts, gated edits, live strengths and parts",
            ),
            ("max_conditions", conditions + spans, f"conditions, {conditions} in when and stop_on, {spans} for parts"),
        )
        source = READOUTS_FIELD if program.readouts else "steering"
        for name, count, unit in needed:
            limit = getattr(self.config, name)
            if count > limit:
                raise SteeringError(source, f"needs {count} {unit}; {EXCEEDS} {limit} ({ENGINE_LIMITS[name].flag})")
        for i, edit in enumerate(program.edits):
            field = f"{program.edit_source(i)}.{'when' if edit.when or edit.live else 'tokens'}"
            if (edit.is_gated or edit.live) and self.no_readouts is not None:
                raise SteeringError(field, self.no_readouts)

    def with_layers(self, error: SteeringError) -> SteeringError:
        """Return an error of the parser with this model's layers instead of the range of layers of any model."""
        before, found, after = error.problem.partition(OF_THE_MODEL)
        if not found:
            return error
        return SteeringError(error.field, f"{before}less than {self.num_layers}, this model's number of layers{after}")

    def most_row_bytes(self, program: Program, prompt_len: int | None, max_tokens: int | None) -> int:
        """Return the most bytes of captured rows that one sample of a checked program can store."""
        program = program.outline
        # The maximum over all prompt lengths is at the shortest or the longest prompt.
        lengths = (1, self.max_model_len - 1) if prompt_len is None else (prompt_len,)
        return max(self._most_bytes(resolve(program, each, self.num_layers), each, max_tokens) for each in lengths)

    def _most_bytes(self, resolved: Resolved, prompt_len: int, max_tokens: int | None) -> int:
        left = self.max_model_len - prompt_len
        return resolved.total_bytes(prompt_len, left if max_tokens is None else min(max_tokens, left), self._row_bytes)

    def _check_range(self, part: CompiledEdit | CompiledCapture, layers_field: str, tokens_field: str) -> None:
        for layer in part.layers:
            self._check_layer(layer, layers_field)
        self._check_last(part.selector, tokens_field)

    def _check_layer(self, layer: int, field: str) -> None:
        if layer >= self.num_layers:
            problem = f"layer {layer} does not exist; this model has layers 0 to {self.num_layers - 1}"
            raise SteeringError(field, problem)

    def _check_last(self, selector: Selector, field: str) -> None:
        if (last := selector.max_position) >= self.max_model_len:
            problem = f"position {last} is beyond this engine's max_model_len of {self.max_model_len}"
            raise SteeringError(field, problem)

    def _check_reach(self, program: Program, prompt_len: int, max_tokens: int) -> None:
        """Raise :class:`SteeringError` if the request's own fields name positions that no token of it can reach."""
        # The last generated token never runs through the model.
        stop = max(min(prompt_len + max_tokens, self.max_model_len) - 1, prompt_len)
        matrices = {f"{program.edit_source(i)}.tokens" for i, edit in enumerate(program.edits) if edit.num_rows}
        for selector, field_name in program.own_positions:
            # Of a matrix, every row must have its position.
            whole = field_name in matrices
            ranges = selector.intervals(prompt_len, field_name)
            beyond = [max(start, stop) for start, end in ranges if start >= stop or (whole and end > stop)]
            if beyond:
                raise SteeringError(
                    field_name,
                    f"position {beyond[0]} is out of reach: with {prompt_len} prompt tokens and "
                    f"max_tokens={max_tokens}, {stop - 1} is the last that the model computes",
                )

    def _check_served(
        self, part: CompiledEdit | CompiledCapture, refused: Mapping[int, str], what: str, field: str
    ) -> None:
        for layer in part.layers or range(self.num_layers):
            if layer in refused:
                raise SteeringError(field, f"{what} is not supported at layer {layer}: {refused[layer]}")
        self._check_enabled(POINT_NAMES[part.point], field)

    def _check_enabled(self, point: PointName, field: str) -> None:
        if POINTS[point].optional and point not in self.config.points:
            raise SteeringError(field, how_to_switch_on(point))

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    def _check_budget(self, num_bytes: int) -> None:
        # The scheduler counts rows, so a request that fits in bytes may not fit in rows.
        if rows_for(num_bytes, self._row_bytes) > most_rows(self.config.capture_mib, self._row_bytes):
            raise SteeringError(
                "capture",
                f"needs up to {num_bytes / 2**20:.0f} MiB; {EXCEEDS} {self.config.capture_mib} "
                f"({ENGINE_LIMITS['capture_mib'].how_to_raise}); capture fewer layers or positions, or set max_tokens",
            )

    def _check_size(self, resolved: Resolved) -> None:
        rows = resolved.token_programs
        captured = resolved.max_captures * (1 + self.drafts)
        needed = (
            ("max_rows", "steering", len(rows), "table rows"),
            ("max_instructions", "steering", sum(row.num_instructions for row in rows), "instructions"),
            ("capture_rows", "capture", captured, "captured rows for one token"),
            ("max_vectors", "steering", len({vector for row in rows for vector in row.vectors}), "vectors"),
            ("max_matrix_rows", "steering", sum(row.num_matrix_rows for row in rows), "positions of matrices"),
        )
        for name, field_name, count, unit in needed:
            limit = getattr(self.config, name)
            if count > limit:
                how = ENGINE_LIMITS[name].how_to_raise
                raise SteeringError(field_name, f"needs {count} {unit}; {EXCEEDS} {limit} ({how})")


def _merge_reasons(reports: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[int, str]]:
    """Return the reasons of all ranks by point and layer; reports have layers as strings."""
    merged: dict[str, dict[int, str]] = {}
    for report in reports:
        for point, layers in report.items():
            merged.setdefault(point, {}).update({int(layer): reason for layer, reason in layers.items()})
    return merged
