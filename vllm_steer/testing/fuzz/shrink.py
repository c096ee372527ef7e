# SPDX-License-Identifier: Apache-2.0
"""Shrink a failing workload.

Requests are removed by halves, settings are reset to defaults one by one and the remaining requests are simplified as
long as the workload still fails. The reference runs each request alone, so removing requests needs no new reference
run; a new engine starts only if settings or requests change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.testing.fuzz.compare import Counts, Tolerance, compare_runs
from vllm_steer.testing.fuzz.drive import Run, run, run_each_alone
from vllm_steer.testing.fuzz.model import engine, reference_settings
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload, sampling_params

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
PASSES = 4
"""Maximum number of passes over the remaining requests; one pass starts three engines."""


@dataclass
class Comparator:
    """Runs workloads on a model and compares the answers with references."""

    model: str
    dtype: str
    hidden: int
    tolerance: Tolerance
    points: tuple[str, ...] = ()
    """Hook points on the branches to enable."""

    def references(self, requests: list[Request]) -> tuple[list[Request], Run]:
        """Run each request alone, plain ones on stock vLLM; return requests with resolved prompts, and the answers."""
        with engine(self.model, self.dtype, reference_settings(self.points)) as llm:
            resolved, right = run_each_alone(requests, llm, self.hidden)
        plain = [request for request in resolved if request.plain]
        if plain and not right.broken:
            with engine(self.model, self.dtype, reference_settings(), steering=False) as llm:
                _, stock = run_each_alone(plain, llm, self.hidden)
            right.answers.update(stock.answers)
            right.broken = stock.broken
        return resolved, right

    def judge(self, llm: Any, requests: list[Request], right: Run, counts: Counts | None = None) -> dict[str, str]:
        """Run ``requests`` together and return the problems by request name."""
        got = run(llm, requests, self.hidden)
        return compare_runs(requests, got, right, self.tolerance, counts or Counts())

    def replay(self, workload: Workload) -> dict[str, str]:
        """Run the references, then the engine under test; return the problems by request name."""
        resolved, right = self.references(workload.requests)
        if right.broken:
            return {"": f"the reference engine failed: {right.broken}"}
        with engine(self.model, self.dtype, workload.settings) as llm:
            return self.judge(llm, resolved, right)


def shrink(
    comparator: Comparator,
    workload: Workload,
    right: Run,
    log: Callable[[str], None] = lambda _: None,
    passes: int = PASSES,
) -> Workload:
    """Return the smallest failing workload found; ``workload`` itself if nothing can be removed."""
    requests = _drop_requests(comparator, workload, right)
    log(f"{len(requests)} of {len(workload.requests)} requests reproduce it")
    settings = _drop_settings(comparator, Workload(settings=workload.settings, requests=requests), right)
    log(f"{len(settings.engine) + len(settings.steering)} settings remain")
    for _ in range(passes):
        simpler = _simplify_requests(comparator, settings, requests)
        if simpler == requests:
            break
        requests = simpler
    return Workload(settings=settings, requests=requests)


class _TrialEngine:
    """An engine for repeated trials: its cache is reset between them, and a broken engine is replaced."""

    def __init__(self, comparator: Comparator, settings: Settings) -> None:
        self._comparator, self._settings = comparator, settings
        self._open = ExitStack()
        self._llm: Any = None

    def __enter__(self) -> _TrialEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def fails(self, requests: list[Request], right: Run) -> bool:
        """Return whether running ``requests`` together fails."""
        if self._llm is None:
            self._llm = self._open.enter_context(engine(self._comparator.model, self._comparator.dtype, self._settings))
        self._llm.reset_prefix_cache()
        problems = self._comparator.judge(self._llm, requests, right)
        if "" in problems:
            self._open.close()
            self._llm = None
        return bool(problems)


def _drop_requests(comparator: Comparator, workload: Workload, right: Run) -> list[Request]:
    """Remove requests by halves, quarters and so on."""
    requests = list(workload.requests)
    with _TrialEngine(comparator, workload.settings) as trial_engine:
        if not trial_engine.fails(requests, right):
            return requests  # the failure is not deterministic
        size = len(requests) // 2
        while size:
            start = 0
            while start < len(requests):
                fewer = requests[:start] + requests[start + size :]
                if fewer and trial_engine.fails(fewer, right):
                    requests = fewer
                else:
                    start += size
            size //= 2
    return requests


def _drop_settings(comparator: Comparator, workload: Workload, right: Run) -> Settings:
    """Reset each setting that the failure does not need; an engine that cannot start keeps its setting."""
    settings = workload.settings
    for part in ("engine", "steering"):
        for name in list(getattr(settings, part)):
            rest = {key: value for key, value in getattr(settings, part).items() if key != name}
            candidate = _with(settings, **{part: rest})
            if _fails_in_new_engine(comparator, candidate, workload.requests, right):
                settings = candidate
    return settings


def _simplify_requests(comparator: Comparator, settings: Settings, requests: list[Request]) -> list[Request]:
    """Try every simpler form of each request once, with the other requests unchanged."""
    candidates = [
        (i, simpler) for i, request in enumerate(requests) for simpler in _simpler_forms(request, comparator.hidden)
    ]
    named = [_with(simpler, name=f"candidate{i}") for i, (_, simpler) in enumerate(candidates)]
    _, right = comparator.references([*requests, *named])
    if right.broken:
        return requests
    with _TrialEngine(comparator, settings) as trial_engine:
        for (i, simpler), alias in zip(candidates, named, strict=True):
            if not _size(simpler) < _size(requests[i]):
                continue
            trial = [*requests[:i], simpler, *requests[i + 1 :]]
            answers = {**right.answers, simpler.name: right.answers[alias.name]}
            if trial_engine.fails(trial, Run(answers=answers)):
                requests = trial
                right.answers = answers
    return requests


def _simpler_forms(request: Request, hidden: int) -> Iterator[Request]:
    """Yield valid forms of the request with one property removed, or with fewer tokens."""
    forms = list(_without_one(request))
    tokens, prompt = request.max_tokens, request.prompt
    forms += [_with(request, max_tokens=each) for each in sorted({1, tokens // 4, tokens // 2} - {0, tokens})]
    lengths = sorted({8, len(prompt) // 4, len(prompt) // 2} - {0})
    forms += [_with(request, prompt=prompt[:length]) for length in lengths if length < len(prompt)]
    for simpler in forms:
        with suppress(SteeringError, KeyError, TypeError):  # a field that is not optional is missing
            sampling_params(simpler.standalone, hidden)
            yield simpler


def _without_one(request: Request) -> Iterator[Request]:
    """Yield forms of a request in which one field has its default, or one item of a field is removed or simpler."""
    for field in msgspec.structs.fields(request):
        now = getattr(request, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        forms = [] if default is msgspec.NODEFAULT or now == default else [default]
        if field.name != "prompt":
            forms += _without_item(now)
        yield from (_with(request, **{field.name: form}) for form in forms)


def _without_item(form: Any) -> Iterator[Any]:
    """Yield copies of nested lists and dicts with one item less."""
    if not isinstance(form, (list, dict)) or (isinstance(form, dict) and "seed" in form and "rows" not in form):
        return
    items = list(form.items() if isinstance(form, dict) else enumerate(form))
    for i, (key, value) in enumerate(items):
        for rest in ([], *([(key, simpler)] for simpler in _without_item(value))):
            kept = [*items[:i], *rest, *items[i + 1 :]]
            if kept:
                yield dict(kept) if isinstance(form, dict) else [each for _, each in kept]


def _with(value: _Struct, **changes: Any) -> _Struct:
    return msgspec.structs.replace(value, **changes)


def _size(request: Request) -> int:
    """Return the size of a request: its JSON length plus the tokens to generate."""
    return len(msgspec.json.encode(request)) + 8 * request.max_tokens


def _fails_in_new_engine(comparator: Comparator, settings: Settings, requests: list[Request], right: Run) -> bool:
    try:
        with engine(comparator.model, comparator.dtype, settings) as llm:
            return bool(comparator.judge(llm, requests, right))
    except ValueError:
        return False  # The engine does not start with these settings.
