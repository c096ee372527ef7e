# SPDX-License-Identifier: Apache-2.0
"""From a workload that goes wrong to a small one that still does.

Requests are left out by halves, settings go back to their defaults one by one, and what is left of each request is made
plainer, for as long as something stays wrong. A request alone is its own reference, so leaving requests out needs no
new one; engines are started only where settings or requests change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_steer.testing.fuzz.compare import Counts, Tolerance, compare_runs
from vllm_steer.testing.fuzz.drive import Run, grown, run
from vllm_steer.testing.fuzz.model import alone, engine
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload

PASSES = 4
"""Most passes over the requests that are left; one pass starts three engines."""


@dataclass
class Bench:
    """Where workloads are tried: a model, and what counts as equal."""

    model: str
    dtype: str
    hidden: int
    tolerance: Tolerance
    points: tuple[str, ...] = ()
    """Those of its engines beside the ones on the stream."""

    def references(self, requests: list[Request]) -> tuple[list[Request], Run]:
        """Each request alone, plain ones in an engine without steering; and the requests with their whole prompts."""
        with engine(self.model, self.dtype, alone(self.points)) as llm:
            whole, right = grown(requests, llm, self.hidden)
        plain = [request for request in whole if request.plain]
        if plain and not right.broken:
            with engine(self.model, self.dtype, alone(), steering=False) as llm:
                _, stock = grown(plain, llm, self.hidden)
            right.answers.update(stock.answers)
            right.broken = stock.broken
        return whole, right

    def judge(self, llm: Any, requests: list[Request], right: Run, counts: Counts | None = None) -> dict[str, str]:
        """Run ``requests`` together; what is wrong, by request."""
        got = run(llm, requests, self.hidden)
        return compare_runs(requests, got, right, self.tolerance, counts or Counts())

    def replay(self, workload: Workload) -> dict[str, str]:
        """Everything anew: the references, then the engine under test. What is wrong, by request."""
        whole, right = self.references(workload.requests)
        if right.broken:
            return {"": f"the reference engine failed: {right.broken}"}
        with engine(self.model, self.dtype, workload.settings) as llm:
            return self.judge(llm, whole, right)


def shrink(
    bench: Bench, workload: Workload, right: Run, say: Callable[[str], None] = lambda _: None, passes: int = PASSES
) -> Workload:
    """The smallest workload found that still goes wrong, and at least as small as ``workload``."""
    requests = _fewer(bench, workload, right)
    say(f"{len(requests)} of {len(workload.requests)} requests are enough")
    settings = _plainer_settings(bench, Workload(settings=workload.settings, requests=requests), right)
    say(f"{len(settings.engine) + len(settings.steering)} settings are left")
    for _ in range(passes):
        plainer = _plainer_requests(bench, settings, requests)
        if plainer == requests:
            break
        requests = plainer
    return Workload(settings=settings, requests=requests)


class _Trials:
    """Trials in one engine, whose cache is emptied between them; a new one is started where one was broken."""

    def __init__(self, bench: Bench, settings: Settings) -> None:
        self._bench, self._settings = bench, settings
        self._open = ExitStack()
        self._llm: Any = None

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def wrong(self, requests: list[Request], right: Run) -> bool:
        """Whether ``requests`` go wrong together."""
        if self._llm is None:
            self._llm = self._open.enter_context(engine(self._bench.model, self._bench.dtype, self._settings))
        self._llm.reset_prefix_cache()
        problems = self._bench.judge(self._llm, requests, right)
        if "" in problems:
            self._open.close()
            self._llm = None
        return bool(problems)


def _fewer(bench: Bench, workload: Workload, right: Run) -> list[Request]:
    """Requests left out by halves, quarters, ..."""
    requests = list(workload.requests)
    with _Trials(bench, workload.settings) as trials:
        if not trials.wrong(requests, right):
            return requests  # it does not go wrong every time
        size = len(requests) // 2
        while size:
            start = 0
            while start < len(requests):
                fewer = requests[:start] + requests[start + size :]
                if fewer and trials.wrong(fewer, right):
                    requests = fewer
                else:
                    start += size
            size //= 2
    return requests


def _plainer_settings(bench: Bench, workload: Workload, right: Run) -> Settings:
    """Each setting left out that is not needed; those that an engine must have to hold its requests stay."""
    settings = workload.settings
    for part in ("engine", "steering"):
        for name in list(getattr(settings, part)):
            rest = {key: value for key, value in getattr(settings, part).items() if key != name}
            candidate = msgspec.structs.replace(settings, **{part: rest})
            if _wrong_in_fresh(bench, candidate, workload.requests, right):
                settings = candidate
    return settings


def _plainer_requests(bench: Bench, settings: Settings, requests: list[Request]) -> list[Request]:
    """One pass over all requests: every plainer form of one is tried, with the others as they are."""
    candidates = [(i, plainer) for i, request in enumerate(requests) for plainer in _plainer(request)]
    named = [msgspec.structs.replace(plainer, name=f"candidate{i}") for i, (_, plainer) in enumerate(candidates)]
    _, right = bench.references([*requests, *named])
    if right.broken:
        return requests
    with _Trials(bench, settings) as trials:
        for (i, plainer), alias in zip(candidates, named, strict=True):
            if not _weight(plainer) < _weight(requests[i]):
                continue
            trial = [*requests[:i], plainer, *requests[i + 1 :]]
            answers = {**right.answers, plainer.name: right.answers[alias.name]}
            if trials.wrong(trial, Run(answers=answers)):
                requests = trial
                right.answers = answers
    return requests


def _plainer(request: Request) -> Iterator[Request]:
    """Forms of a request with one thing less."""

    def without(**changes: Any) -> Request:
        return msgspec.structs.replace(request, **changes)

    if request.capture is not None:
        yield without(capture=None)
        yield without(capture=msgspec.structs.replace(request.capture, reduce=None, dtype=None, before=False))
        for point in request.capture.hooks if len(request.capture.hooks) > 1 else ():
            yield without(capture=msgspec.structs.replace(request.capture, hooks={point: request.capture.hooks[point]}))
    if request.edits:
        yield without(edits=[])
        for i in range(len(request.edits) if len(request.edits) > 1 else 0):
            yield without(edits=[edit for j, edit in enumerate(request.edits) if j != i])
    changes: dict[str, Any]
    for changes in (
        {"n": 1},
        {"globally": []},
        {"module": False},
        {"stream": False},
        {"salt": None},
        {"abort_after": None},
        {"gap": 0},
        {"grows": None},
        {"skip_cache": False},
    ):
        if any(getattr(request, name) != value for name, value in changes.items()):
            yield without(**changes)
    for length in sorted({1, request.max_tokens // 4, request.max_tokens // 2} - {0, request.max_tokens}):
        yield without(max_tokens=length)
    for length in sorted({8, len(request.prompt) // 4, len(request.prompt) // 2} - {0, len(request.prompt)}):
        if length < len(request.prompt):
            yield without(prompt=request.prompt[:length])


def _weight(request: Request) -> int:
    """How much there is to read of a request in JSON, tokens counted fully."""
    return len(msgspec.json.encode(request)) + 8 * request.max_tokens


def _wrong_in_fresh(bench: Bench, settings: Settings, requests: list[Request], right: Run) -> bool:
    try:
        with engine(bench.model, bench.dtype, settings) as llm:
            return bool(bench.judge(llm, requests, right))
    except ValueError:
        return False  # an engine with these settings does not start
