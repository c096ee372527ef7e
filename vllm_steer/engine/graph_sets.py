# SPDX-License-Identifier: Apache-2.0
"""Several sets of CUDA graphs of one model, which differ in the taps that they launch, and the choice between them.

A graph replays exactly what was launched when it was captured, and a launch that finds nothing to do still takes a
microsecond or so. So the model is captured more than once: without any tap, with all of them, with those between
layers, those within layers, and those of a stretch of layers each. Before a step the graphs with the fewest taps among
those that have all that its edits and reads need become the runner's.

Everything else of vLLM's graphs stays as it is: one manager, whose dictionary of graphs and whose piecewise wrappers'
dictionaries are exchanged. A set with some of the taps has full graphs only, and that of a stretch only those of small
steps, in which a launch more is a larger part of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode

from vllm_steer.engine.plain_code import PlainCode
from vllm_steer.log import steering_logger
from vllm_steer.taps.tables import Tables

logger = steering_logger(__name__)

_FULL = CUDAGraphMode.FULL
SMALL_TOKENS = 64
"""A small step has so many tokens at most."""
_FULL_OF_WHOLE, _SMALL_OF_WHOLE = 0.6, 1 / 6
"""What all full graphs and those of small steps, 35 and 11 with vLLM's defaults, take of a set that has pieces too."""
_BETWEEN = frozenset({"pre_attn", "post_block"})
"""The points between two layers, where two taps are mostly one launch (:mod:`vllm_steer.taps.fusion_pass`)."""


@dataclass(eq=False)
class GraphSet:
    """The graphs of a model with the taps of ``sites`` (by number; truthy where there is one). ``part``: what share of
    a whole set it takes; less than 1 where it has no pieces. ``most_tokens``: of steps of so many at most."""

    sites: Sequence[object]
    what: str
    part: float = 1.0
    most_tokens: float = math.inf
    full: dict[Any, Any] = field(default_factory=dict)
    pieces: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def serves(self, used: Sequence[int]) -> bool:
        """Whether it has the taps of every site that rows use."""
        return all(inside for inside, users in zip(self.sites, used, strict=True) if users)


class GraphSets:
    """The sets of one runner, and which of them is in use. ``count`` is the setting ``graph_sets``; ``layers`` those
    that this pipeline stage has, each with ``per_layer`` sites; ``plain``: the model without taps, if there is one."""

    def __init__(
        self, tables: Tables, count: int, per_layer: int, layers: range, plain: PlainCode | None = None
    ) -> None:
        self._tables = tables
        self._plain = plain
        self._all = GraphSet((True,) * tables.num_sites, "all taps")
        self._none = GraphSet(tables.no_sites, "no taps") if count > 1 else self._all
        sites = range(tables.num_sites)
        between = tuple(tables.points[site % per_layer] in _BETWEEN for site in sites)
        places = [
            GraphSet(between, "the taps between layers", _FULL_OF_WHOLE),
            GraphSet(tuple(not each for each in between), "the taps within layers", _FULL_OF_WHOLE),
        ][: max(count - 2, 0)]
        stretches = [
            GraphSet(
                tuple(first <= site // per_layer < stop for site in sites),
                f"the taps of layers {first} to {stop - 1}",
                _SMALL_OF_WHOLE,
                SMALL_TOKENS,
            )
            for first, stop in _stretches(layers, count - 4)
        ]
        # A later one's graphs go before an earlier one's: fewer taps.
        self._parts = [*places, *stretches]
        self._mixed: dict[tuple[GraphSet, ...], GraphSet] = {(): self._all}
        self._manager: Any = None
        self._current = self._none
        self._capturing: GraphSet | None = None
        self._chosen = (-1, self._all)

    @property
    def size(self) -> float:
        """How much memory all sets take, in sets that have everything."""
        return sum(each.part for each in self._sets())

    def _sets(self) -> list[GraphSet]:
        """Each once, in the order of their capture: later ones have pieces of earlier ones."""
        return list(dict.fromkeys((self._none, self._all, *self._parts)))

    def idle(self) -> None:
        """Before a forward pass in which nothing is edited or read; while graphs are captured, what they are to
        launch."""
        capturing = self._none if self._capturing is None else self._capturing
        self._tables.launch = self._tables.no_sites if self._capturing is None else capturing.sites
        self._run(tapped=capturing is not self._none)
        self._use(self._none)

    def busy(self, used: Sequence[int], version: int) -> None:
        """Before a forward pass in which some token has a row.

        ``used`` counts the rows at each site, and ``version`` changes whenever it does.
        """
        self._tables.launch = used
        self._run(tapped=True)
        if self._manager is None:
            return
        if self._chosen[0] != version:
            self._chosen = (version, self._smallest(used))
        self._run(tapped=self._chosen[1] is not self._none)
        self._use(self._chosen[1])

    def compile_plain(self, run: Callable[[int], torch.Tensor | None], most_tokens: int) -> None:
        """After vLLM's profiling run, which compiled the model with taps; see :meth:`PlainCode.compile`."""
        if self._plain is not None:
            self._plain.compile(run, most_tokens)

    def rest(self) -> None:
        """After a forward pass: who looks at the model then, as for a reload of its weights, finds its own modules."""
        self._run(tapped=True)

    def _run(self, tapped: bool) -> None:
        if self._plain is not None:
            self._plain.switch(tapped)

    def _smallest(self, used: Sequence[int]) -> GraphSet:
        if self._none.serves(used):
            # All that is edited and read is on other stages.
            return self._none
        return self._with_all(tuple(each for each in self._parts if each.serves(used)))

    def _with_all(self, parts: tuple[GraphSet, ...]) -> GraphSet:
        """The set of all taps, with graphs of these in the place of its own; one object for the same ones."""
        if parts not in self._mixed:
            full = dict(self._all.full)
            for each in parts:
                full.update(each.full)
            self._mixed[parts] = GraphSet((), "", full=full, pieces=self._all.pieces)
        return self._mixed[parts]

    def _use(self, chosen: GraphSet) -> None:
        if chosen is self._current or self._manager is None or self._capturing is not None:
            return
        self._current = chosen
        self._manager.graphs = chosen.full
        for wrapper, entries in chosen.pieces.items():
            setattr(wrapper, _entries_of(wrapper), entries)

    @contextmanager
    def every_tap(self) -> Iterator[None]:
        """What is captured inside launches every tap: for runners that keep one set."""
        self._capturing = self._all
        try:
            yield
        finally:
            self._capturing = None

    def wrap_capture(self, manager: Any) -> None:
        """Make the next ``manager.capture`` (``v1/worker/gpu/cudagraph_utils.py``) capture every set.

        The manager's own method is called once for each; drafters, encoders and whatever else has graphs are captured
        by others, once, as without steering.
        """
        original: Callable[..., None] = manager.capture

        def capture(*args: Any, **kwargs: Any) -> None:
            del manager.capture
            stages = manager._capture_descs
            try:
                for graphs in self._sets():
                    self._capturing = graphs
                    if graphs in self._parts:
                        steps = stages.get(_FULL, ())
                        manager._capture_descs = {_FULL: [s for s in steps if s.num_tokens <= graphs.most_tokens]}
                        graphs.pieces = self._all.pieces
                    self.idle()
                    self._capture(manager, graphs, original, args, kwargs)
            finally:
                manager._capture_descs = stages
                self._capturing = None
            self._manager = manager
            self._current = graphs
            self.idle()
            self.rest()

        manager.capture = capture

    def _capture(self, manager: Any, graphs: GraphSet, original: Callable[..., None], args: Any, kwargs: Any) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        manager.graphs = graphs.full
        before = {wrapper: getattr(wrapper, _entries_of(wrapper)) for wrapper in _wrappers()}
        if not graphs.pieces:
            for wrapper in before:
                setattr(wrapper, _entries_of(wrapper), {})
        original(*args, **kwargs)
        for wrapper in _wrappers():
            captured, earlier = getattr(wrapper, _entries_of(wrapper)), before.get(wrapper)
            if captured and captured is not earlier:
                graphs.pieces[wrapper] = captured
            elif earlier is not None:
                # Not the model's, but a drafter's.
                setattr(wrapper, _entries_of(wrapper), earlier)
        logger.info(
            "CUDA graphs with %s: %d full, %d pieces, %.1f s, %.0f MiB",
            graphs.what,
            len(graphs.full),
            sum(len(entries) for entries in graphs.pieces.values()) if graphs not in self._parts else 0,
            time.perf_counter() - started,
            (free - torch.cuda.mem_get_info()[0]) / 2**20,
        )


def _stretches(layers: range, count: int) -> list[tuple[int, int]]:
    """``layers`` cut into ``count`` stretches ``(first, stop)`` of nearly equal length; none for a count below 1."""
    edges = [layers.start + round(i * len(layers) / count) for i in range(count + 1)] if count > 0 else []
    return [(first, stop) for first, stop in pairwise(edges) if first < stop]


def _wrappers() -> list[Any]:
    # Created in the first capture, where it is needed at all: so they are looked up again for each.
    return [*CUDAGraphWrapper._all_instances, *BreakableCUDAGraphWrapper._all_instances]


def _entries_of(wrapper: Any) -> str:
    return "concrete_cudagraph_entries" if isinstance(wrapper, CUDAGraphWrapper) else "entries"
