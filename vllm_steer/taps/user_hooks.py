# SPDX-License-Identifier: Apache-2.0
"""Functions of the user that run at hook points, request by request.

The custom op of a tap calls `UserHooks.run` ahead of the site's edits and captures, so captures return the rows
that the hooks left. The op is opaque to the compiler, which makes it the eager segment around a hooked layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from vllm_steer.log import steering_logger
from vllm_steer.points import PointName

logger = steering_logger(__name__)


@dataclass(eq=False)
class HookedRows:
    """Rows of one request at one site in one step: the argument of a user hook.

    Examples:
        >>> from vllm_steer import HookedRows
        >>> def halve_prompt_start(view: HookedRows) -> None:
        ...     view.rows[view.positions < 4] *= 0.5
    """

    rows: torch.Tensor
    """``[n, hidden]`` in the model's dtype, a copy. Changes in place and assignments become the stream."""
    positions: torch.Tensor
    """``[n]`` int64 on the CPU: positions of the rows in the request, from 0 at the start of its prompt."""
    request_id: str
    """The id of the request's output. Samples of a request with ``n > 1`` have the sample's index ahead of it."""
    point: PointName
    """The hook point."""
    layer: int
    """The layer."""


Hook: TypeAlias = Callable[[HookedRows], torch.Tensor | None]
"""A user hook. It changes ``view.rows``, or returns rows of the same shape that replace them."""


@dataclass(frozen=True)
class _Registered:
    number: int
    function: Hook
    point: PointName
    layer: int


@dataclass(frozen=True)
class _Part:
    """Tokens of one request in the running step."""

    request_id: str
    shown_id: str
    tokens: slice
    positions: torch.Tensor


class UserHooks:
    """The user hooks of an engine rank.

    Args:
        columns: Column of each site in the device tables, by layer and point.
        shown_id: Returns the id that users know for the engine's id of a request.
    """

    def __init__(
        self, columns: Mapping[tuple[int, PointName], int], shown_id: Callable[[str], str] = lambda name: name
    ) -> None:
        self._columns = columns
        self._shown_id = shown_id
        self._hooks: dict[int, list[_Registered]] = {}
        self._batch: tuple[_Part, ...] = ()
        self._failed: dict[str, str] = {}

    @property
    def registered(self) -> bool:
        """Whether there are hooks."""
        return bool(self._hooks)

    def register(self, number: int, function: Hook, point: PointName, layers: Sequence[int]) -> None:
        """Add a function at a point of some layers; hooks of one site run in the order of their registration."""
        for layer in layers:
            registered = _Registered(number, function, point, layer)
            self._hooks.setdefault(self._columns[layer, point], []).append(registered)

    def remove(self, number: int) -> None:
        """Remove a function from all its sites."""
        left = {column: [hook for hook in hooks if hook.number != number] for column, hooks in self._hooks.items()}
        self._hooks = {column: hooks for column, hooks in left.items() if hooks}

    def begin(self, ids: Sequence[str], first: Sequence[int], count: Sequence[int]) -> None:
        """Prepare a forward pass of requests, in batch order.

        Args:
            ids: The engine's ids of the requests.
            first: First position of each request in this step.
            count: Number of tokens of each request in this step.
        """
        parts, start = [], 0
        for name, position, tokens in zip(ids, map(int, first), map(int, count), strict=True):
            if tokens:
                positions = torch.arange(position, position + tokens)
                parts.append(_Part(name, self._shown_id(name), slice(start, start + tokens), positions))
            start += tokens
        self._batch = tuple(parts)

    def end(self) -> None:
        """End a forward pass. Others, such as dummy runs, run no hooks."""
        self._batch = ()

    def take_failed(self) -> dict[str, str]:
        """Return the errors of the requests whose hooks failed, by the engine's id, once."""
        failed, self._failed = self._failed, {}
        return failed

    def run(self, column: int, target: torch.Tensor, other: torch.Tensor | None) -> None:
        """Run the hooks of a site on the rows of each request, and write changed rows.

        The rows of a request whose hook failed are left as they are for the rest of the step.

        Args:
            column: Column of the site.
            target: ``[tokens, hidden]``, which becomes the stream of changed rows.
            other: The stream's second summand, which becomes zero there; None if ``target`` is the whole stream.
        """
        for hook in self._hooks.get(column, ()):
            for part in self._batch:
                if part.request_id not in self._failed:
                    self._run(hook, part, target[part.tokens], None if other is None else other[part.tokens])

    def _run(self, hook: _Registered, part: _Part, target: torch.Tensor, other: torch.Tensor | None) -> None:
        before = target.clone() if other is None else (target.float() + other.float()).to(target.dtype)
        view = HookedRows(before.clone(), part.positions.clone(), part.shown_id, hook.point, hook.layer)
        try:
            after = _rows_of(hook.function(view), view, before)
        except Exception as error:
            # An exception here would stop the engine. The scheduler ends the request with this error instead.
            where = f"{_name(hook.function)} at {hook.point} of layer {hook.layer}"
            logger.exception("User hook %s failed for request %s", where, part.shown_id)
            self._failed[part.request_id] = f"the user hook {where} raised {type(error).__name__}: {error}"
            return
        # Rows that the hook left alone are not written, since their sum was rounded.
        changed = (after != before).any(dim=-1, keepdim=True)
        target.copy_(torch.where(changed, after, target))
        if other is not None:
            other.masked_fill_(changed, 0)


def _rows_of(returned: Any, view: HookedRows, before: torch.Tensor) -> torch.Tensor:
    """Return the rows that a hook returned or left in its view, in the model's dtype."""
    rows = view.rows if returned is None else returned
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"hooks return None or a tensor, not {type(rows).__name__}")
    if rows.shape != before.shape or not rows.is_floating_point():
        raise ValueError(
            f"the rows must stay floating-point numbers of shape {list(before.shape)}, not {rows.dtype} of shape "
            f"{list(rows.shape)}"
        )
    return rows.to(before)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
