# SPDX-License-Identifier: Apache-2.0
"""Device tables that every tap reads.

They are allocated once, before the model is traced, and only written in place, since CUDA graphs hold their addresses.

==================  =======================  ==================================================================
table               shape, dtype             meaning
==================  =======================  ==================================================================
``token_row``       [tokens] int32           row of each token of the running step, 0 for none
``head``            [rows + 1, k] int32      first instruction of a row at a site, 0 for none; one column per site, see
                                             :attr:`Tables.head_index`, and unused ones. Row 0 has no instructions;
                                             it holds the number of rows that have instructions at the site
``instruction``     [n + 1, 4] int32         operation code, vector, next instruction (0 ends), columns of a record, see
                                             :class:`vllm_steer.program.token_program.Instruction`
``parameter``       [n + 1, 4] float32       strength, low, high, first operand of the run of an edit with a matrix
``operand``         [operands] int32         runs of operands by position: vectors, or the bits of float32 numbers;
                                             :data:`~vllm_steer.program.position_runs.NO_OPERAND` for positions that are
                                             not edited
``vector``          [vectors, hidden] f32    pool of vectors
``segment_start``   [requests, k] int32      first position of each segment of a request, ascending, padded with
                                             :data:`OPEN_END`
``segment_row``     [requests, k] int32      row of each segment
``row_captures``    [rows + 1] int32         number of stream rows that each token with this row captures
``token_offset``    [tokens] int32           distance of each token of the running step from the start of its segment
``token_base``      [tokens] int64           arena offset of a token's captured rows
``arena``           [captured, hidden]       captured rows of the running step, by token, in the model's dtype
``record``          [tokens, columns] f32    readouts and factors of the tokens of the running step, see
                                             :mod:`vllm_steer.program.records`
``replayed``        [tokens] int32           1 for tokens whose record was computed before a preemption
``initial``         [requests, columns] f32  record of a token before its step: 1 for factors, the live strengths
``condition``       [requests, c, 9] int32   kind, readout's column, factor's column, first and stop of the folded
                                             positions, count, first position scaled, number of the stop, column of the
                                             folded tokens; see :class:`~vllm_steer.program.records.DeviceCondition`
``bound``           [requests, c, 6] f32     threshold, sign, sharpness, release, sign of release (0 for none), alpha
``carry``           [requests, d, c] f64     state of each condition after the last step without its last 0, 1, ...
                                             tokens, which are drafts that may be rejected
``next_position``   [requests] int64         position after the last token of the last step
==================  =======================  ==================================================================

Vectors are float32 for every model dtype: instructions compute in float32 and round once, when they write.

Each tap gets a view of one column of ``head``, and all layers share one compiled function. Inductor assumes the
alignment of the first layer's views and copies views of other layers that are aligned otherwise
(``get_input_idxs_to_check`` in ``torch/_inductor/compile_fx.py``). A copy does not show which site it belongs to, so
the columns of a layer are padded to a multiple of 16 bytes: the views of a point are aligned alike in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from vllm_steer.config import SteeringConfig
from vllm_steer.points import PointName, columns_of, points_on
from vllm_steer.program.records import BOUND_FIELDS, CONDITION_FIELDS
from vllm_steer.taps.user_hooks import UserHooks

OPEN_END = 2**31 - 1
"""Position after the last one of an open-ended segment."""

_ALIGNED_COLUMNS = 16 // torch.int32.itemsize
"""Columns of ``head`` in 16 bytes, the alignment that Inductor assumes."""


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device, copied on the current stream without a sync."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _head_stride(points: Sequence[PointName]) -> int:
    """Return the distance between two layers in ``head``, in columns."""
    return -(-len(points) // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


def _head_index(column: int, points: Sequence[PointName]) -> int:
    """Return the column of ``head`` for a site of an engine with these points."""
    layer, point = divmod(column, len(points))
    return layer * _head_stride(points) + point


def table_shapes(
    config: SteeringConfig,
    *,
    num_sites: int,
    hidden_size: int,
    max_tokens: int,
    max_requests: int,
    dtype: torch.dtype,
    drafts: int = 0,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every table of an engine rank."""
    points = points_on(config.points)
    width = -(-num_sites // len(points)) * _head_stride(points)
    rows, instructions, segments = config.max_rows + 1, config.max_instructions + 1, config.max_segments
    columns = config.record_columns + 1  # with the number of a stop
    return {
        "token_row": ((max_tokens,), torch.int32),
        "head": ((rows, width), torch.int32),
        "instruction": ((instructions, 4), torch.int32),
        "parameter": ((instructions, 4), torch.float32),
        "operand": ((config.max_matrix_rows,), torch.int32),
        "vector": ((config.max_vectors, hidden_size), torch.float32),
        "segment_start": ((max_requests, segments), torch.int32),
        "segment_row": ((max_requests, segments), torch.int32),
        "row_captures": ((rows,), torch.int32),
        "token_offset": ((max_tokens,), torch.int32),
        "token_base": ((max_tokens,), torch.int64),
        "arena": ((config.capture_rows, hidden_size), dtype),
        "record": ((max_tokens, columns), torch.float32),
        "replayed": ((max_tokens,), torch.int32),
        "initial": ((max_requests, columns), torch.float32),
        "condition": ((max_requests, config.max_conditions, CONDITION_FIELDS), torch.int32),
        "bound": ((max_requests, config.max_conditions, BOUND_FIELDS), torch.float32),
        "carry": ((max_requests, drafts + 1, config.max_conditions), torch.float64),
        "next_position": ((max_requests,), torch.int64),
    }


def table_bytes(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, int]:
    """Return the size of each table in bytes."""
    return {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}


class Tables:
    """All tables of one engine rank, and the host-side state that lets a step skip taps."""

    token_row: torch.Tensor
    head: torch.Tensor
    instruction: torch.Tensor
    parameter: torch.Tensor
    operand: torch.Tensor
    vector: torch.Tensor
    segment_start: torch.Tensor
    segment_row: torch.Tensor
    row_captures: torch.Tensor
    token_offset: torch.Tensor
    token_base: torch.Tensor
    arena: torch.Tensor
    record: torch.Tensor
    replayed: torch.Tensor
    initial: torch.Tensor
    condition: torch.Tensor
    bound: torch.Tensor
    carry: torch.Tensor
    next_position: torch.Tensor

    def __init__(
        self,
        config: SteeringConfig,
        *,
        num_sites: int,
        hidden_size: int,
        max_tokens: int,
        max_requests: int,
        dtype: torch.dtype,
        device: torch.device,
        drafts: int = 0,
    ) -> None:
        self.device = device
        self.num_sites = num_sites
        # Programs number the sites of all points; ``column`` maps them to the sites of this engine's points.
        self.points = points_on(config.points)
        self.column = columns_of(self.points, num_sites // len(self.points))
        shapes = table_shapes(
            config,
            num_sites=num_sites,
            hidden_size=hidden_size,
            max_tokens=max_tokens,
            max_requests=max_requests,
            dtype=dtype,
            drafts=drafts,
        )
        for name, (shape, table_dtype) in shapes.items():
            setattr(self, name, torch.zeros(shape, dtype=table_dtype, device=device))
        # Columns of ``head``, by site of this engine.
        self.head_index = tuple(_head_index(column, self.points) for column in range(num_sites))
        self._column_at = {self.head_column(column).data_ptr(): column for column in range(num_sites)}
        self._first_heads: frozenset[int] = frozenset()
        self.set_first_layer(0)
        self.segment_start.fill_(OPEN_END)
        # Number of rows with instructions, by column.
        self.site_users = [0] * num_sites
        # Number of running requests whose tokens have records.
        self.num_recorded = 0
        # Truthy for each column whose tap launches. CUDA graphs replay the launches of their capture instead.
        self.no_sites = (False,) * num_sites
        self.active_sites: Sequence[object] = self.no_sites
        # Functions of the user; None in engines without them.
        self.hooks: UserHooks | None = None

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return sum(table.nbytes for _, table in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tables by name."""
        return ((name, value) for name, value in vars(self).items() if isinstance(value, torch.Tensor))

    def head_column(self, column: int) -> torch.Tensor:
        """Return the view of ``head`` for one site of this engine, ``[rows + 1]``; see :meth:`column_at`."""
        return self.head[:, self.head_index[column]]

    def set_first_layer(self, layer: int) -> None:
        """Set the first layer of this pipeline stage."""
        points = len(self.points)
        columns = range(layer * points, min((layer + 1) * points, self.num_sites))
        self._first_heads = frozenset(self.head_column(column).data_ptr() for column in columns)

    def is_in_first_layer(self, head: torch.Tensor) -> bool:
        """Return whether this is the view of ``head`` for a site in the first layer of this pipeline stage."""
        return head.data_ptr() in self._first_heads

    def column_at(self, head: torch.Tensor) -> int:
        """Return the site whose view of ``head`` this is.

        Raises:
            RuntimeError: ``head`` is a copy. Every tap outside of a CUDA graph calls this in every forward pass, so the
                engine already fails at start.
        """
        column = self._column_at.get(head.data_ptr())
        if column is None:
            raise RuntimeError(
                "compiled code passed a tap a copy of its view of the table `head`, so edits and captures are lost; "
                "start the engine with --enforce-eager, and report this error as an issue of vllm-steer, with the "
                "versions of torch and vLLM"
            )
        return column

    def save(self) -> dict[str, torch.Tensor]:
        """Return copies of all tables in host memory, except the arena, whose contents belong to one step."""
        return {
            name: value.to("cpu", copy=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and value is not self.arena
        }

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the contents that :meth:`save` returned, in place."""
        for name, value in saved.items():
            getattr(self, name).copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tables:
        """Return the same object, so that a copy of vLLM's configuration refers to the same tables."""
        return self
