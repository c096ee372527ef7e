# SPDX-License-Identifier: Apache-2.0
"""Vectors of edits from elsewhere: rows of an earlier capture, and directions of files and modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_WIDTH
from vllm_steer.request.field_types import any_of
from vllm_steer.request.scalars import shown
from vllm_steer.request.selector import OPEN_END, Interval, Selector
from vllm_steer.request.vector import PackedVector


class StoredRowsForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rows of a capture that the server has stored."""

    capture: Annotated[str, msgspec.Meta(description="Id of the capture, in `capture_results`.")]
    positions: Annotated[
        list[int] | None,
        msgspec.Meta(description="Positions in the captured prompt, one for each of `tokens`; by default the same."),
    ] = None


class ModuleRowsForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A vector of a registered module."""

    module: Annotated[
        str,
        msgspec.Meta(
            description="`module`, the name of a module, for its vector of the edit's site times its scale, or "
            "`module/probe`, the name of a probe in it."
        ),
    ]


VECTOR_FIELD = msgspec.Meta(
    description="A vector of the model's hidden size. `replace` also takes a matrix `[n, H]`, with one row for "
    "each of the n positions in `tokens` in ascending order, and, over HTTP, the id of a stored capture instead. "
    "Over HTTP, every kind but `feature` takes the name of a module or of a module's probe instead of a vector.",
    extra_json_schema=any_of(
        Annotated[list[float | list[float]], msgspec.Meta(min_length=1, max_length=MAX_WIDTH)],
        PackedVector,
        StoredRowsForm,
        ModuleRowsForm,
        None,
    ).extra_json_schema,
)
"""Description and JSON form of the vector of an edit."""

_NAMING_KEYS = (StoredRowsForm.__struct_fields__[0], ModuleRowsForm.__struct_fields__[0])


def names_rows(vector: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a vector is given by the name of a stored capture or of a module."""
    return isinstance(vector, Mapping) and any(key in vector for key in _NAMING_KEYS)


def refuse_names(vector: object, *, takes_matrix: bool) -> None:
    """Raise SteeringError for rows that are named by capture id or module, which only a server can look up.

    Args:
        vector: The vector of an edit in any form.
        takes_matrix: Whether the kind of the edit takes such rows on a server.
    """
    if not names_rows(vector):
        return
    if not takes_matrix and _NAMING_KEYS[0] in vector:
        raise SteeringError("vector", "refers to rows stored on a server; only replace takes stored rows")
    raise SteeringError(
        "vector",
        "names rows or a module of a server, which only edits in `steering` of a request over HTTP can, as plain dicts "
        "or JSON; give the vector itself, or name the module in steering_modules",
    )


class DirectionSource(Protocol):
    """Directions by site, such as the `Directions` of a file."""

    def direction_at(self, point: str | None, layers: Any, /) -> Any:
        """Return the `Direction` for an edit of one layer; raise SteeringError if there is none."""
        ...


def has_directions(value: object) -> TypeGuard[DirectionSource]:
    """Return whether ``value`` has directions by site."""
    return hasattr(type(value), "direction_at")


def no_dose(vector: str) -> SteeringError:
    """Return the error of a dose of a vector that does not tell the length of the stream."""
    return SteeringError(
        "dose",
        f"needs the length of the stream, which {vector} does not tell; use a vector of a file made with "
        '`vllm-steer make`, or of a module registered with "stream" lengths in its provenance, or give a strength',
    )


class CapturedRows(Protocol):
    """A `CaptureResult` of ``LLM``, or a report of the client."""

    status: str
    error: str | None

    @property
    def sites(self) -> Mapping[tuple[str, int], Any]:
        """Rows by point and layer."""
        ...


def is_captured(value: object) -> TypeGuard[CapturedRows]:
    """Return whether ``value`` is the result of a capture."""
    kind: Any = type(value)
    return _is_result_type(kind)


@lru_cache(maxsize=64)
def _is_result_type(kind: Any) -> bool:
    # The property `sites` of a failed capture raises an error, so it is not read.
    names = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    return names.issuperset(("status", "error", "sites"))


def rows_of(
    captured: CapturedRows, point: str, layers: Sequence[int] | str, tokens: object
) -> tuple[npt.NDArray[Any], Any]:
    """Return the captured rows of an edit's site, and its tokens.

    Args:
        captured: The capture, of any prompt.
        point: Hook point of the edit.
        layers: Layers of the edit; must be one layer.
        tokens: Positions, whose rows are taken from the same positions of the captured prompt; positions from the end
            of the prompt from its end. None takes all captured positions.

    Raises:
        SteeringError: The capture failed, lacks the site or a position, or the edit has several layers.
    """
    if captured.status != "ok":
        raise SteeringError(
            "vector", f"is a capture with status {captured.status!r}: {captured.error}; capture the rows again"
        )
    try:
        sites = captured.sites
    except (RuntimeError, TypeError) as error:
        raise SteeringError("vector", f"is a capture without rows: {error}; capture them again") from None
    if isinstance(layers, str) or len(layers) != 1:
        raise SteeringError(
            "layers", f"must be one layer if the rows come from a capture, not {shown(layers)}; send one edit per layer"
        )
    site = sites.get((point, layers[0]))
    if site is None:
        if not sites:
            raise SteeringError(
                "vector", 'the response did not contain the rows: call `client.fetch(report)`, or pass {"capture": id}'
            )
        known = ", ".join(f"{name}[{layer}]" for name, layer in sites)
        raise SteeringError("vector", f"is a capture without rows of {point}[{layers[0]}]; its sites: {known}")
    rows = site.rows.float().numpy()
    found = np.asarray(site.positions).tolist()
    if not len(rows):
        raise SteeringError(
            "vector", f"is a capture without rows of {point}[{layers[0]}]; capture positions that the request reaches"
        )
    if len(rows) != len(found):  # a mean or the last row
        return rows[0], tokens
    if getattr(captured, "paired", False):
        return (rows if len(rows) > 1 else rows[0]), tokens
    if tokens is None:
        return (rows, found) if len(found) > 1 else (rows[0], found)
    selector = Selector.parse(tokens)
    prompt_len = getattr(getattr(captured, "data", None), "num_prompt_tokens", None)
    if prompt_len is None:
        # The client does not know the length: positions from the start only.
        prompt_len = max(found) + 1
        if not isinstance(tokens, (list, tuple)) or any(
            place < 0 for item in tokens for place in (item if isinstance(item, (list, tuple)) else [item]) if place
        ):
            raise SteeringError(
                "tokens",
                f"{shown(tokens)} depends on the length of the prompt, which a report of the client does not have; "
                "list positions that count from 0, or omit tokens to use all captured positions",
            )
    row_of = {position: i for i, position in enumerate(found)}
    picked = rows[_row_numbers(selector.intervals(prompt_len), row_of, tokens)]
    # One vector covers any number of positions. Where the prompt decides about their number, each needs its own row.
    return (picked if len(picked) > 1 or selector.num_positions is None else picked[0]), tokens


def _row_numbers(intervals: Iterable[Interval], row_of: Mapping[int, int], tokens: object) -> list[int]:
    """Return the numbers of the rows at the positions in ``intervals``; raise SteeringError if one has no row."""
    numbers: list[int] = []
    last = max(row_of)
    for start, stop in intervals:
        # Ends at the first position without a row: an interval of a short body can have two billion positions.
        for position in range(start, last + 1 if stop == OPEN_END else stop):
            if position not in row_of:
                raise _not_captured(position, row_of)
            numbers.append(row_of[position])
    if not numbers:
        raise _not_captured(tokens, row_of)
    return numbers


def _not_captured(what: object, row_of: Mapping[int, int]) -> SteeringError:
    return SteeringError(
        "tokens",
        f"position {shown(what)} was not captured; use some of the captured positions {shown(list(row_of))}, "
        "or capture it too",
    )
