# SPDX-License-Identifier: Apache-2.0
"""Several sets of CUDA graphs of one model that launch different taps, and the choice of a set for each step.

A CUDA graph replays exactly the launches that it was captured with, and a tap that finds nothing to do still takes
about a microsecond. The model is therefore captured several times: without taps, with all taps, with the taps between
layers, with the taps within layers, and with the taps of each of several layer ranges. A step replays the graphs with
the fewest taps among those that contain every tap the step needs.

vLLM keeps one graph manager. Selecting a set replaces the manager's dictionary of full graphs and the dictionaries of
the piecewise wrappers. Only the first two sets have piecewise graphs. The taps within layers are rarely used without
the others, and launch overhead matters most in small steps, so that set and those of layer ranges only have the full
graphs of small batches.

Sets with taps have graphs of fewer batch sizes than vLLM's, so steered steps are padded a little more. Small batches
wait for weights, so their padding takes hardly any time; larger ones take longer with each token. The set of all taps
also has piecewise graphs of batches up to twice as large as vLLM's: a busy server's steps with prompts exceed 512
tokens, and without graphs the engine core's thread, which limits such a server, launches every kernel from Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from vllm_steer.compat.internals import BreakableCUDAGraphWrapper, CUDAGraphMode, CUDAGraphWrapper
from vllm_steer.compat.stages import GRAPHS
from vllm_steer.compat.wraps import install
from vllm_steer.engine.untapped_model import UntappedModel, UntappedModelUnavailableError
from vllm_steer.log import steering_logger
from vllm_steer.taps.tables import Tables

logger = steering_logger(__name__)

_FULL, _PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
SMALL_BATCH_TOKENS = 64
"""Largest batch, in tokens, for which the sets of layer ranges and of the taps within layers have graphs."""
MEDIUM_BATCH_TOKENS = 256
"""Largest batch, in tokens, for which the set of the taps between layers has graphs."""
_LAYER_BYTES = 96 << 10
"""Memory of one layer in a graph, full or in pieces. An H200 took 46 to 97 KiB for a Llama of 8B."""
_BETWEEN_LAYERS = frozenset({"pre_attn", "post_block"})
"""Points between two layers, where two taps are usually fused into one launch (:mod:`vllm_steer.taps.fusion_pass`)."""


@dataclass(eq=False)
class CUDAGraphSet:
    """CUDA graphs of the model with some of its taps.

    Attributes:
        sites: For each site, truthy if the graphs launch its tap.
        description: Which taps these are, for the log.
        max_tokens: Largest batch, in tokens, that has a graph.
        full: vLLM's full graphs by batch descriptor.
        piecewise: Graphs by piecewise wrapper and batch descriptor.
    """

    sites: Sequence[object]
    description: str
    max_tokens: float = math.inf
    full: dict[Any, Any] = field(default_factory=dict)
    piecewise: dict[Any, dict[Any, Any]] = field(default_factory=dict)

    def covers(self, site_users: Sequence[int]) -> bool:
        """Return whether the graphs launch the tap of every site that has users."""
        return all(launched for launched, users in zip(self.sites, site_users, strict=True) if users)


class CUDAGraphSetManager:
    """Captures the sets of one model runner and selects one before each forward pass.

    Args:
        tables: The rank's device tables.
        count: Number of sets, the setting ``graph_sets``.
        points_per_layer: Number of sites per layer.
        layers: Layers of this pipeline stage.
        untapped: The model without taps, or the reason why there is none.
        fewer_sizes: Whether sets with taps have graphs of fewer batch sizes.
    """

    def __init__(
        self,
        tables: Tables,
        count: int,
        points_per_layer: int,
        layers: range,
        untapped: UntappedModel | str,
        *,
        fewer_sizes: bool = False,
    ) -> None:
        self._tables = tables
        self._untapped = None if isinstance(untapped, str) else untapped
        self.no_plain_code = untapped if isinstance(untapped, str) else None
        """Reason why idle steps run the model with taps, or None if they run the copy without."""
        self._fewer_sizes = fewer_sizes and count > 1
        self._layers = len(layers)
        self._all_taps = CUDAGraphSet((True,) * tables.num_sites, "all taps")
        self._no_taps = CUDAGraphSet(tables.no_sites, "no taps") if count > 1 else self._all_taps
        self._partial = _partial_sets(tables, count, points_per_layer, layers)
        self._merged: dict[tuple[CUDAGraphSet, ...], CUDAGraphSet] = {(): self._all_taps}
        # vLLM's graph manager, once it has captured.
        self._manager: Any = None
        self._current = self._no_taps
        self._capturing: CUDAGraphSet | None = None
        # All batches that vLLM captures, by graph mode.
        self._batches: Mapping[Any, Sequence[Any]] = {}
        # Whether the set of all taps has graphs of larger batches than vLLM's.
        self._exceeds = False
        # Whether the step whose size was chosen last is so large that only the set of all taps has its graphs.
        self._large = False
        # The set that was selected last for a step with edits or captures, and the version of the sites it is for.
        self._selected = (-1, self._all_taps)

    def observe_profiling(self, manager: Any) -> None:
        """Read the batches that vLLM's graph manager captures."""
        self._batches = manager._capture_descs
        self._exceeds = self._may_exceed(manager)

    def memory_of_all_sets(self, one_set: int) -> int:
        """Return the memory of all sets in bytes.

        All sets share vLLM's memory pool (:func:`capture_on_one_stream`), so another set only takes what the driver
        keeps for its graphs.

        Args:
            one_set: vLLM's estimate for one complete set, with full and piecewise graphs.
        """
        others = (self._batches_of(graphs, self._batches) for graphs in self._sets() if graphs is not self._no_taps)
        graphs = sum(len(each) for modes in others for each in modes.values()) + len(self._beyond(self._batches))
        return one_set + self._layers * _LAYER_BYTES * graphs

    def _batches_of(self, graphs: CUDAGraphSet, all_batches: Mapping[Any, Sequence[Any]]) -> dict[Any, list[Any]]:
        """Return the batch descriptors of a set with taps by graph mode, given vLLM's."""
        found = {mode: self._captured(each) for mode, each in all_batches.items()}
        if graphs not in self._partial:
            return found
        return {_FULL: [batch for batch in found.get(_FULL, ()) if batch.num_tokens <= graphs.max_tokens]}

    def _captured(self, batches: Sequence[Any]) -> list[Any]:
        """Return those of vLLM's batch descriptors of one graph mode that sets with taps have graphs for."""
        if not self._fewer_sizes:
            return list(batches)
        replaced = larger_batches(batches)
        return [batch for batch in batches if batch not in replaced]

    def _beyond(self, all_batches: Mapping[Any, Sequence[Any]]) -> list[Any]:
        """Return the descriptors of the batches larger than vLLM's that the set of all taps has graphs for."""
        return batches_beyond(all_batches.get(_PIECEWISE, ()), len(self._tables.token_row)) if self._exceeds else []

    def _may_exceed(self, manager: Any) -> bool:
        """Return whether this model's pieces can be captured with more tokens than vLLM captures."""
        cache = manager.vllm_config.cache_config
        return self._fewer_sizes and not manager.use_breakable_cg and not getattr(cache, "use_kda_recoverssm", False)

    def _sets(self) -> list[CUDAGraphSet]:
        """Return the distinct sets in capture order. Partial sets share the piecewise graphs of an earlier set."""
        return list(dict.fromkeys((self._no_taps, self._all_taps, *self._partial)))

    def select_idle(self) -> None:
        """Prepare a forward pass without edits and captured rows, or the recording of the current set."""
        capturing = self._capturing
        self._tables.active_sites = self._tables.no_sites if capturing is None else capturing.sites
        graphs = self._all_taps if self._large else self._no_taps
        self._select_model(tapped=(capturing or graphs) is not self._no_taps)
        self._use(graphs)

    def select(self, site_users: Sequence[int], version: int) -> None:
        """Prepare a forward pass with edits or captures.

        Args:
            site_users: Number of rows with instructions at each site.
            version: A number that changes whenever ``site_users`` does.
        """
        self._tables.active_sites = site_users
        self._select_model(tapped=True)
        if self._manager is None:
            return
        if self._selected[0] != version:
            self._selected = (version, self._smallest(site_users))
        graphs = self._all_taps if self._large else self._selected[1]
        self._select_model(tapped=graphs is not self._no_taps)
        self._use(graphs)

    def restore_model(self) -> None:
        """Restore the model's own modules after a forward pass, for code that walks the model between steps."""
        self._large = False
        self._select_model(tapped=True)

    def compile_untapped(self, run: Callable[[int], torch.Tensor | None], max_tokens: int) -> None:
        """Compile the model without taps, if there is one; see :meth:`UntappedModel.compile`."""
        if self._untapped is None:
            return
        try:
            self._untapped.compile(run, max_tokens)
        except UntappedModelUnavailableError as reason:
            self.restore_model()
            self._untapped, self.no_plain_code = None, str(reason)
            logger.warning("Steps without edits and captures run the model with its taps: %s.", reason)

    def _select_model(self, *, tapped: bool) -> None:
        if self._untapped is not None:
            self._untapped.switch(tapped=tapped)

    def _smallest(self, site_users: Sequence[int]) -> CUDAGraphSet:
        if self._no_taps.covers(site_users):
            # All sites in use are on other pipeline stages.
            return self._no_taps
        return self._merge(tuple(graphs for graphs in self._partial if graphs.covers(site_users)))

    def _merge(self, partial: tuple[CUDAGraphSet, ...]) -> CUDAGraphSet:
        """Return the set of all taps with its graphs replaced by those of ``partial``, later sets taking precedence."""
        if partial not in self._merged:
            full = dict(self._all_taps.full)
            for graphs in partial:
                full.update(graphs.full)
            self._merged[partial] = CUDAGraphSet((), "", full=full, piecewise=self._all_taps.piecewise)
        return self._merged[partial]

    def _use(self, graphs: CUDAGraphSet) -> None:
        if graphs is self._current or self._manager is None or self._capturing is not None:
            return
        self._current = graphs
        self._manager.graphs = graphs.full
        for wrapper, entries in graphs.piecewise.items():
            setattr(wrapper, _entries_attribute(wrapper), entries)

    @contextmanager
    def capture_all_taps(self) -> Iterator[None]:
        """Capture graphs with every tap inside the context, for runners that keep a single set."""
        self._capturing = self._all_taps
        try:
            yield
        finally:
            self._capturing = None

    def wrap_capture(self, manager: Any, is_steered: Callable[[], bool]) -> None:
        """Make the next ``manager.capture`` capture every set.

        Args:
            manager: vLLM's graph manager.
            is_steered: Returns whether the step whose batch size is chosen may need taps.

        The original method of vLLM's graph manager (``v1/worker/gpu/cudagraph_utils.py``) is called once per set.
        Drafters and encoders have managers of their own, whose graphs are captured once as in stock vLLM.
        """
        install(GRAPHS)
        original: Callable[..., None] = manager.capture
        self._exceeds = self._may_exceed(manager)
        if self._fewer_sizes:
            self._wrap_dispatch(manager, is_steered)

        def capture(*args: Any, **kwargs: Any) -> None:
            del manager.capture
            all_batches = manager._capture_descs
            try:
                for graphs in self._sets():
                    self._capturing = graphs
                    if graphs is not self._no_taps:
                        manager._capture_descs = self._batches_of(graphs, all_batches)
                    if graphs in self._partial:
                        graphs.piecewise = self._all_taps.piecewise
                    self.select_idle()
                    beyond = self._beyond(all_batches) if graphs is self._all_taps else []
                    self._capture(manager, graphs, _with_larger(manager, original, beyond[::-1]), args, kwargs)
            finally:
                manager._capture_descs = all_batches
                self._capturing = None
            self._manager = manager
            self._current = graphs
            self.select_idle()
            self.restore_model()

        manager.capture = capture

    def _wrap_dispatch(self, manager: Any, is_steered: Callable[[], bool]) -> None:
        """Make ``manager.dispatch`` choose sizes of sets with taps for steered steps."""
        dispatch: Callable[..., Any] = manager.dispatch
        larger = {key: value for each in manager._capture_descs.values() for key, value in larger_batches(each).items()}
        beyond = self._beyond(manager._capture_descs)

        def choose(*args: Any, **kwargs: Any) -> Any:
            batch = dispatch(*args, **kwargs)
            self._large = False
            if not is_steered() or self._manager is None:
                return batch
            if batch.cg_mode != CUDAGraphMode.NONE or not beyond or batch.num_tokens > beyond[-1].num_tokens:
                return larger.get(batch, batch)
            kind = {**_kind(batch), "cg_mode": _PIECEWISE}
            for each in beyond:
                if each.num_tokens >= batch.num_tokens and _kind(each) == kind:
                    self._large = True
                    return each
            return batch

        manager.dispatch = choose

    def _capture(
        self, manager: Any, graphs: CUDAGraphSet, original: Callable[..., None], args: Any, kwargs: Any
    ) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        manager.graphs = graphs.full
        before = {wrapper: getattr(wrapper, _entries_attribute(wrapper)) for wrapper in _piecewise_wrappers()}
        if not graphs.piecewise:
            for wrapper in before:
                setattr(wrapper, _entries_attribute(wrapper), {})
        original(*args, **kwargs)
        for wrapper in _piecewise_wrappers():
            captured, earlier = getattr(wrapper, _entries_attribute(wrapper)), before.get(wrapper)
            if captured and captured is not earlier:
                graphs.piecewise[wrapper] = captured
            elif earlier is not None:
                # A drafter's wrapper, which this manager does not capture.
                setattr(wrapper, _entries_attribute(wrapper), earlier)
        logger.info(
            "CUDA graphs with %s: %d full, %d piecewise, %.1f s, %.0f MiB",
            graphs.description,
            len(graphs.full),
            sum(len(entries) for entries in graphs.piecewise.values()) if graphs not in self._partial else 0,
            time.perf_counter() - started,
            (free - torch.cuda.mem_get_info()[0]) / 2**20,
        )


def _with_larger(manager: Any, original: Callable[..., None], batches: list[Any]) -> Callable[..., None]:
    """Return ``manager.capture`` that first captures ``batches``, whose outputs are larger than its buffers for them.

    Each warm-up copies its output to a buffer of vLLM's largest batch, to which captured full graphs refer
    (``v1/worker/gpu/cudagraph_utils.py``, ``store_capture_output``). Piecewise graphs return their output instead.
    """

    def capture(*args: Any, **kwargs: Any) -> None:
        own = manager._capture_descs, manager.hidden_states, manager.aux_hidden_states
        try:
            manager._capture_descs, manager.hidden_states, manager.aux_hidden_states = {_PIECEWISE: batches}, None, []
            original(*args, **kwargs)
        finally:
            manager._capture_descs, manager.hidden_states, manager.aux_hidden_states = own
        original(*args, **kwargs)

    return capture if batches else original


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def capture_on_one_stream(original: Callable[..., Any], device: torch.device) -> Iterator[Any]:
    """Run vLLM's ``graph_capture``, but capture on the same stream each time.

    A graph pool only reuses memory on the stream that allocated it. vLLM captures on a new stream, so each set would
    allocate the buffers of its largest batch again.
    """
    with original(device) as context:
        stream = context.stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield context


def larger_batches(batches: Sequence[Any]) -> dict[Any, Any]:
    """Return the batch descriptors without a graph in sets with taps, and which descriptor is used for each.

    It is the largest of the same kind up to the next multiple of 16 or 32 tokens. Up to 8 tokens, all remain.
    """
    found: dict[Any, Any] = {}
    for batch in batches:
        step = _size_step(batch.num_tokens)
        top = -(-batch.num_tokens // step) * step
        alike = [each for each in batches if batch.num_tokens < each.num_tokens <= top and _kind(each) == _kind(batch)]
        if alike:
            found[batch] = max(alike, key=lambda each: each.num_tokens)
    return found


def batches_beyond(batches: Sequence[Any], most: int) -> list[Any]:
    """Return descriptors of piecewise graphs for batches up to twice as large as vLLM's largest, smallest first.

    Args:
        batches: vLLM's descriptors of piecewise graphs.
        most: Largest number of tokens of a step.
    """
    top = max((each.num_tokens for each in batches), default=0)
    largest = [each for each in batches if each.num_tokens == top]
    sizes = [n for n in range(top + 32, min(2 * top, most) + 1, 32) if n <= 1.5 * top or n % 64 == 0]
    return [replace(each, num_tokens=n) for n in sizes for each in largest]


def _size_step(tokens: int) -> int:
    return next((step for most, step in ((8, 1), (64, 16)) if tokens <= most), 32)


def _kind(batch: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(batch).items() if name not in ("num_tokens", "num_reqs")}


def _partial_sets(tables: Tables, count: int, points_per_layer: int, layers: range) -> list[CUDAGraphSet]:
    """Return the sets with some of the taps. Later sets have fewer taps, so their graphs take precedence."""
    sites = range(tables.num_sites)
    between = tuple(tables.points[site % points_per_layer] in _BETWEEN_LAYERS for site in sites)
    by_point = [
        CUDAGraphSet(between, "the taps between layers", MEDIUM_BATCH_TOKENS),
        CUDAGraphSet(tuple(not each for each in between), "the taps within layers", SMALL_BATCH_TOKENS),
    ][: max(count - 2, 0)]
    by_layer = [
        CUDAGraphSet(
            tuple(first <= site // points_per_layer < stop for site in sites),
            f"the taps of layers {first} to {stop - 1}",
            SMALL_BATCH_TOKENS,
        )
        for first, stop in _split_layers(layers, count - 4)
    ]
    return [*by_point, *by_layer]


def _split_layers(layers: range, count: int) -> list[tuple[int, int]]:
    """Return ``count`` ranges ``(first, stop)`` of nearly equal length that cover ``layers``, none if ``count`` < 1."""
    edges = [layers.start + round(i * len(layers) / count) for i in range(count + 1)] if count > 0 else []
    return [(first, stop) for first, stop in pairwise(edges) if first < stop]


def _piecewise_wrappers() -> list[Any]:
    # vLLM creates wrappers during the first capture, so they are looked up again for each set.
    return [*CUDAGraphWrapper._all_instances, *BreakableCUDAGraphWrapper._all_instances]


def _entries_attribute(wrapper: Any) -> str:
    return "concrete_cudagraph_entries" if isinstance(wrapper, CUDAGraphWrapper) else "entries"
