# SPDX-License-Identifier: Apache-2.0
"""Choice of the CUDA graphs that a step replays, with stand-ins for vLLM's graph manager and wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from tests.engine.steps import make_tables
from vllm_steer.compat.stages import GRAPHS
from vllm_steer.compat.wraps import install
from vllm_steer.config import SteeringConfig
from vllm_steer.engine import cudagraph_sets
from vllm_steer.engine.cudagraph_sets import CUDAGraphSetManager
from vllm_steer.engine.untapped_model import UntappedModelUnavailableError
from vllm_steer.taps.tables import Tables

LAYERS, POINTS = 8, 3


@dataclass(frozen=True)
class Batch:
    """Stand-in for vLLM's descriptor of a full graph."""

    num_tokens: int


SMALL, LARGE = Batch(cudagraph_sets.SMALL_BATCH_TOKENS), Batch(cudagraph_sets.SMALL_BATCH_TOKENS + 1)


class Wrapper:
    """Stand-in for a piecewise wrapper. The model's manager never captures a drafter's wrapper."""

    def __init__(self, drafter: bool = False) -> None:
        self.entries: dict[str, Any] = {"drafter": "graph"} if drafter else {}
        self.drafter = drafter


class Manager:
    """Stand-in for vLLM's graph manager: records the taps that each full graph and piece launches."""

    def __init__(self, tables: Tables, wrappers: list[Wrapper]) -> None:
        self.graphs: dict[Any, Any] = {}
        self._capture_descs = {
            CUDAGraphMode.FULL: [LARGE, SMALL],
            CUDAGraphMode.PIECEWISE: [],
        }
        self._tables, self._wrappers = tables, wrappers
        self.use_breakable_cg = False
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(use_kda_recoverssm=False))
        self.untapped: Any = None
        self.ran: list[bool] = []

    def capture(self, model: str, *, has_lora: bool) -> None:
        assert (model, has_lora) == ("model", False)
        launched = tuple(bool(site) for site in self._tables.active_sites)
        if self.untapped is not None:
            self.ran.append(self.untapped.tapped)
            assert self.untapped.tapped == any(launched)
        for step in self._capture_descs[CUDAGraphMode.FULL]:
            assert step not in self.graphs
            self.graphs[step] = launched
        if CUDAGraphMode.PIECEWISE in self._capture_descs:
            for wrapper in self._wrappers:
                if not wrapper.drafter:
                    assert "step" not in wrapper.entries
                    wrapper.entries["step"] = launched


@pytest.fixture
def tables() -> Tables:
    config = SteeringConfig(max_rows=1, max_vectors=1, max_instructions=1, capture_rows=1)
    return make_tables(config, num_sites=LAYERS * POINTS, max_tokens=4, max_requests=1)


class FakeUntappedModel:
    """Stand-in for the untapped model that records the selected model."""

    def __init__(self) -> None:
        self.tapped = True
        self.problem = ""

    def compile(self, run: Any, max_tokens: int) -> None:
        if self.problem:
            raise UntappedModelUnavailableError(self.problem)

    def switch(self, *, tapped: bool) -> None:
        self.tapped = tapped


def captured(
    tables: Tables, count: int, monkeypatch: pytest.MonkeyPatch, layers: range = range(LAYERS), untapped: Any = ""
) -> tuple[CUDAGraphSetManager, Manager, Wrapper, Wrapper]:
    own, drafter = Wrapper(), Wrapper(drafter=True)
    monkeypatch.setattr(cudagraph_sets, "_piecewise_wrappers", lambda: [own, drafter])
    monkeypatch.setattr(cudagraph_sets, "_entries_attribute", lambda wrapper: "entries")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    sets, manager = CUDAGraphSetManager(tables, count, POINTS, layers, untapped), Manager(tables, [own, drafter])
    manager.untapped = untapped or None
    sets.wrap_capture(manager, lambda: True)
    manager.capture("model", has_lora=False)
    return sets, manager, own, drafter


def using(*sites: int) -> list[int]:
    return [int(site in sites) for site in range(LAYERS * POINTS)]


def launched_by(graph: tuple[bool, ...]) -> set[int]:
    return {site for site, launches in enumerate(graph) if launches}


EVERY = set(range(LAYERS * POINTS))


BETWEEN = {site for site in EVERY if site % POINTS != 1}
"""``pre_attn`` and ``post_block``."""
FIRST, SECOND = set(range(12)), set(range(12, 24))


@pytest.mark.parametrize(
    ("count", "used", "small", "large"),
    [
        (1, None, EVERY, EVERY),
        (1, using(4), EVERY, EVERY),
        (2, None, set(), set()),
        (2, using(4), EVERY, EVERY),
        (3, using(3), BETWEEN, BETWEEN),
        (3, using(4), EVERY, EVERY),
        (4, using(0, 23), BETWEEN, BETWEEN),
        (4, using(4, 22), EVERY - BETWEEN, EVERY),
        (4, using(3, 4), EVERY, EVERY),
        (6, None, set(), set()),
        (6, using(4), FIRST, EVERY),
        (6, using(12, 23), SECOND, BETWEEN),
        (6, using(12, 13), SECOND, EVERY),
        (6, using(9, 12), BETWEEN, BETWEEN),
        (6, using(4, 12), EVERY, EVERY),
    ],
)  # fmt: skip
def test_selects_the_smallest_set_with_all_taps(
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    used: list[int] | None,
    small: set[int],
    large: set[int],
) -> None:
    """Catches a step whose edits are in no graph, and an idle step that replays taps."""
    sets, manager, own, _ = captured(tables, count, monkeypatch)
    if used is None:
        sets.select_idle()
    else:
        sets.select(used, 1)
    assert launched_by(manager.graphs[SMALL]) == small
    assert launched_by(manager.graphs[LARGE]) == large
    # Partial sets use the piecewise graphs of all taps.
    assert launched_by(own.entries["step"]) == (EVERY if large else set())


def test_selection_follows_the_sites_in_use(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a selection that outlives the edits it was made for."""
    sets, manager, _, _ = captured(tables, 6, monkeypatch)
    sets.select(using(0), 1)
    assert launched_by(manager.graphs[SMALL]) == set(range(12))
    sets.select(using(0, 20), 2)
    assert launched_by(manager.graphs[SMALL]) == BETWEEN
    sets.select_idle()
    assert launched_by(manager.graphs[SMALL]) == set()


def test_layer_ranges_cover_the_own_stage(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sets of another stage's layers, and taps in a step whose edits are all on another stage."""
    sets, manager, _, _ = captured(tables, 6, monkeypatch, range(4, 8))
    sets.select(using(12), 1)
    assert launched_by(manager.graphs[SMALL]) == set(range(12, 18))
    sets.select(using(), 2)
    assert launched_by(manager.graphs[SMALL]) == set()


@pytest.mark.parametrize(("count", "others"), [(1, 0), (2, 5), (3, 5 + 2), (4, 5 + 2 + 1), (6, 5 + 2 + 1 + 1 + 1)])
def test_memory_of_all_sets(tables: Tables, count: int, others: int) -> None:
    """Catches (1) graphs that vLLM does not count when it sizes its cache and (2) the shared pool counted per set.

    All taps have 2 full graphs and 3 sizes with pieces; the taps between layers have the full ones, other sets one.
    """
    sets, manager = CUDAGraphSetManager(tables, count, POINTS, range(LAYERS), "eager"), Manager(tables, [])
    manager._capture_descs[CUDAGraphMode.PIECEWISE] = [LARGE, SMALL, Batch(1)]
    sets.observe_profiling(manager)
    assert sets.memory_of_all_sets(1000 << 20) == (1000 << 20) + others * LAYERS * (96 << 10)


class Streams:
    """Stand-in for the CUDA streams of torch and for vLLM's context of a capture, which makes a stream each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = "main"
        self.waited: list[tuple[Any, Any]] = []
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "stream", self.switch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)

    def make(self, device: torch.device) -> Any:
        made = SimpleNamespace()
        made.wait_stream = lambda other: self.waited.append((made, other))
        return made

    @contextmanager
    def switch(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph_capture(self, device: torch.device) -> Iterator[Any]:
        with self.switch(self.make(device)):
            yield SimpleNamespace(stream=self.current)


def test_all_sets_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pool whose memory no other set can use, because each capture allocates on a stream of its own."""
    device, streams, used = torch.device("cuda", 7), Streams(monkeypatch), []
    for _ in range(2):
        with cudagraph_sets.capture_on_one_stream(streams.graph_capture, device) as context:
            assert context.stream is streams.current is streams.waited[-1][0]
            used.append(streams.current)
        assert streams.current == "main"
    assert used[0] is used[1] and streams.waited[0][1] is not streams.waited[1][1]
    cudagraph_sets._capture_stream.cache_clear()


def test_vllm_captures_on_our_stream() -> None:
    """Catches a release of vLLM whose graph manager takes its context from elsewhere."""
    from vllm.v1.worker.gpu import cudagraph_utils

    install(GRAPHS)
    capture = inspect.unwrap(cudagraph_utils.CudaGraphManager.capture)
    assert capture.__globals__["graph_capture"] is cudagraph_utils.graph_capture
    assert "graph_capture" in capture.__code__.co_names and hasattr(cudagraph_utils.graph_capture, "__wrapped__")


def test_drafter_keeps_its_graphs(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a drafter without its graphs, and capture sizes that stay reduced."""
    sets, manager, _, drafter = captured(tables, 6, monkeypatch)
    sets.select(using(1), 1)
    assert drafter.entries == {"drafter": "graph"}
    assert len(manager._capture_descs) == 2
    assert "capture" not in vars(manager)


def test_eager_steps_launch_only_used_taps(tables: Tables) -> None:
    """Catches eager steps that launch taps at unused sites."""
    sets = CUDAGraphSetManager(tables, 2, POINTS, range(LAYERS), "eager")
    used = using(5)
    sets.select(used, 1)
    assert tables.active_sites is used
    sets.select_idle()
    assert not any(tables.active_sites)
    with sets.capture_all_taps():
        sets.select_idle()
        assert all(tables.active_sites)


def test_graphs_without_taps_run_the_untapped_model(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches idle graphs of the model with taps, and edited steps of the untapped model."""
    untapped = FakeUntappedModel()
    sets, manager, _, _ = captured(tables, 6, monkeypatch, range(4, 8), untapped)
    assert manager.ran == [False, True, True, True, True, True] and untapped.tapped
    for act, tapped in (
        (sets.select_idle, False),
        (lambda: sets.select(using(12), 1), True),
        # All edits are on another stage.
        (lambda: sets.select(using(), 2), False),
    ):
        act()
        assert untapped.tapped is tapped
        sets.restore_model()
        assert untapped.tapped


def test_code_for_one_batch_size_is_not_used(tables: Tables) -> None:
    """Catches steps that run a copy which the compiler made for a single batch size, and a reason that is not given."""
    untapped: Any = FakeUntappedModel()
    sets = CUDAGraphSetManager(tables, 2, POINTS, range(LAYERS), untapped)
    assert sets.no_plain_code is None
    sets.compile_untapped(lambda tokens: None, 64)
    sets.select_idle()
    assert not untapped.tapped
    untapped.problem = "only compiles for batches of 64 tokens"
    sets.compile_untapped(lambda tokens: None, 64)
    assert untapped.tapped and sets.no_plain_code == untapped.problem
    sets.select_idle()
    assert untapped.tapped


def test_idle_steps_without_graphs_run_the_untapped_model(tables: Tables) -> None:
    """Catches compiled steps without graphs that run the untapped model although there are edits."""
    untapped: Any = FakeUntappedModel()
    sets = CUDAGraphSetManager(tables, 2, POINTS, range(LAYERS), untapped)
    sets.select_idle()
    assert not untapped.tapped
    sets.select(using(5), 1)
    assert untapped.tapped
    sets.select_idle()
    with sets.capture_all_taps():
        sets.select_idle()
        assert untapped.tapped


@dataclass(frozen=True)
class Size:
    """Stand-in for vLLM's descriptor with all fields that tell kinds of graphs apart."""

    num_tokens: int
    num_reqs: int | None
    kind: str = "decode"
    cg_mode: Any = CUDAGraphMode.FULL


VLLM_SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
"""Batch sizes that vLLM captures by default."""
TAPPED_SIZES = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, 513, 32)]


def test_every_batch_has_a_larger_one_with_taps() -> None:
    """Catches a size without a graph, a replacement that is too small, of another kind, or replaced itself."""
    batches = [Size(n, reqs, kind) for n in VLLM_SIZES for reqs, kind in ((n, "decode"), (None, "mixed"))]
    larger = cudagraph_sets.larger_batches(batches[::-1])
    assert sorted({batch.num_tokens for batch in batches if batch not in larger}) == TAPPED_SIZES
    for batch, used in larger.items():
        assert used not in larger and used.kind == batch.kind
        assert batch.num_tokens < used.num_tokens < batch.num_tokens + 32
        assert used.num_reqs is None or used.num_reqs >= batch.num_reqs
    # Custom sizes without a larger one in the same range.
    assert cudagraph_sets.larger_batches([Size(n, n) for n in (3, 12, 70, 300)]) == {}


@pytest.mark.parametrize("steered", [False, True])
def test_steered_steps_choose_sizes_with_graphs(tables: Tables, monkeypatch: pytest.MonkeyPatch, steered: bool) -> None:
    """Catches a steered step of a size without a graph, and plain steps that are padded more than stock vLLM's."""
    monkeypatch.setattr(cudagraph_sets, "_piecewise_wrappers", list)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    sets = CUDAGraphSetManager(tables, 3, POINTS, range(LAYERS), "eager", fewer_sizes=True)
    manager: Any = Manager(tables, [])
    batches = {n: Size(n, n) for n in VLLM_SIZES}
    manager._capture_descs = {CUDAGraphMode.FULL: list(batches.values())[::-1]}
    eager = Size(513, 1, cg_mode=CUDAGraphMode.NONE)
    manager.dispatch = lambda tokens: batches.get(tokens, eager)
    sets.wrap_capture(manager, lambda: steered)
    manager.capture("model", has_lora=False)
    if steered:
        sets.select(using(4), 1)
    else:
        sets.select_idle()
    for size in VLLM_SIZES:
        assert manager.dispatch(size) in manager.graphs
        assert manager.dispatch(size).num_tokens == (min(n for n in TAPPED_SIZES if n >= size) if steered else size)
    assert manager.dispatch(513) is eager
    assert len(manager.graphs) == len(TAPPED_SIZES if steered else VLLM_SIZES)


class Pieces(Manager):
    """Stand-in for a graph manager with piecewise graphs, whose wrapper has an entry for each size."""

    sizes = (512, 496, 8)

    def __init__(self, tables: Tables, wrappers: list[Wrapper]) -> None:
        super().__init__(tables, wrappers)
        mixed = [Size(n, None, "mixed", CUDAGraphMode.PIECEWISE) for n in self.sizes]
        self._capture_descs = {CUDAGraphMode.PIECEWISE: mixed}
        self.hidden_states: Any = None
        self.aux_hidden_states: list[Any] = []

    def capture(self, model: str, *, has_lora: bool) -> None:
        launched = tuple(bool(site) for site in self._tables.active_sites)
        for each in self._capture_descs.get(CUDAGraphMode.PIECEWISE, []):
            if self.hidden_states is None:
                self.hidden_states = each.num_tokens
            assert each.num_tokens <= self.hidden_states, "vLLM's warm-up copies its output to this buffer"
            self._wrappers[0].entries[each.num_tokens] = launched

    def dispatch(self, tokens: int) -> Size:
        fitting = [n for n in self.sizes if n >= tokens]
        if not fitting:
            return Size(tokens, 3, "mixed", CUDAGraphMode.NONE)
        return Size(min(fitting), None, "mixed", CUDAGraphMode.PIECEWISE)


@pytest.mark.parametrize("breakable", [False, True])
def test_large_steered_steps_replay_pieces_with_all_taps(monkeypatch: pytest.MonkeyPatch, breakable: bool) -> None:
    """Catches steered steps beyond vLLM's sizes without graphs, and such steps with the graphs of another set."""
    tables = Tables(
        SteeringConfig(max_rows=1, max_vectors=1, max_instructions=1, capture_rows=1), num_sites=LAYERS * POINTS,
        hidden_size=8, max_tokens=900, max_requests=1, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    wrapper, untapped, steered = Wrapper(), FakeUntappedModel(), True
    monkeypatch.setattr(cudagraph_sets, "_piecewise_wrappers", lambda: [wrapper])
    monkeypatch.setattr(cudagraph_sets, "_entries_attribute", lambda wrapper: "entries")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    sets = CUDAGraphSetManager(tables, 3, POINTS, range(LAYERS), untapped, fewer_sizes=True)  # type: ignore[arg-type]
    manager: Any = Pieces(tables, [wrapper])
    manager.use_breakable_cg = breakable
    sets.observe_profiling(manager)
    # vLLM counts the sizes of the first set; the other has 2 of them and the larger ones.
    assert sets.memory_of_all_sets(0) == (2 + (0 if breakable else 10)) * LAYERS * (96 << 10)
    sets.wrap_capture(manager, lambda: steered)
    manager.capture("model", has_lora=False)
    if breakable:
        assert manager.dispatch(513).cg_mode == CUDAGraphMode.NONE
        return
    assert manager.hidden_states == 512
    for tokens, size in ((513, 544), (544, 544), (545, 576), (768, 768), (769, 832), (832, 832)):
        # With edits, with edits on other pipeline stages only, and with a program whose edits are at other positions.
        for select in (lambda: sets.select(using(3), 1), lambda: sets.select(using(), 2), sets.select_idle):
            chosen = manager.dispatch(tokens)
            assert (chosen.num_tokens, chosen.cg_mode) == (size, CUDAGraphMode.PIECEWISE)
            select()
            assert launched_by(wrapper.entries[size]) == EVERY
            assert untapped.tapped
            sets.restore_model()
            sets.select_idle()  # a forward pass whose size vLLM does not choose
            assert launched_by(wrapper.entries[8]) == set()
            sets.restore_model()
    assert manager.dispatch(897).cg_mode == CUDAGraphMode.NONE  # no step has more than 900 tokens
    manager.dispatch(600)
    sets.select_idle()
    assert manager.dispatch(8).num_tokens == 8
    sets.select_idle()
    assert launched_by(wrapper.entries[8]) == set()
    steered = False
    assert manager.dispatch(600) == Size(600, 3, "mixed", CUDAGraphMode.NONE)
    sets.select_idle()
    assert launched_by(wrapper.entries[8]) == set()
    assert not untapped.tapped
    assert 544 not in wrapper.entries
