# SPDX-License-Identifier: Apache-2.0
"""Round after round: a workload, its references, and several engines that are put under pressure with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np

from vllm_steer.testing.fuzz.compare import Counts, Tolerance
from vllm_steer.testing.fuzz.draw import draw_requests, draw_settings
from vllm_steer.testing.fuzz.drive import Run, run
from vllm_steer.testing.fuzz.model import alone, engine, facts_of, with_points
from vllm_steer.testing.fuzz.shrink import Bench, shrink
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload


@dataclass(frozen=True)
class Finding:
    """Something that went wrong: in which round, what, and with which workload."""

    round: int
    problems: dict[str, str]
    workload: Workload


@dataclass
class Report:
    """A session's outcome."""

    seed: int
    seconds: float = 0.0
    seconds_without_a_finding: float = 0.0
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)

    def to_builtins(self) -> dict[str, Any]:
        """For JSON; findings by what they say."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds),
            "seconds_without_a_finding": round(self.seconds_without_a_finding),
            "counts": asdict(self.counts),
            "findings": [
                {"round": f.round, "problems": f.problems, "workload": f.workload.to_json()} for f in self.findings
            ],
        }


@dataclass
class Session:
    """One run of the fuzzer. Rounds are a function of the seed and their number alone.

    ``rounds`` or ``minutes`` end it, whichever comes first; it ends at the first finding unless ``keep_going``.
    ``points``: those that all its engines have, and its requests use, beside the ones on the stream.
    """

    model: str
    dtype: str = "float32"
    seed: int = 0
    minutes: float | None = None
    rounds: int | None = None
    requests: int = 48
    settings_per_round: int = 4
    graphs: bool = False
    points: tuple[str, ...] = ()
    keep_going: bool = False
    say: Callable[[str], None] = lambda _: None

    def run(self) -> Report:
        """Raises whatever keeps an engine from starting at all."""
        report = Report(self.seed)
        started = time.monotonic()
        with engine(self.model, self.dtype, alone(self.points)) as llm:
            self._facts = facts_of(llm)
        self._bench = Bench(self.model, self.dtype, self._facts.hidden, Tolerance.of(self.dtype), self.points)
        number = 0
        while not self._over(number, started) and (self.keep_going or not report.findings):
            found = len(report.findings)
            self._round(number, report, lambda: self._over(None, started))
            number += 1
            report.counts.rounds += 1
            report.seconds = time.monotonic() - started
            if found == len(report.findings) == 0:
                report.seconds_without_a_finding = report.seconds
            self.say(f"round {number}, {report.seconds:.0f} s: {asdict(report.counts)}")
        return report

    def _over(self, number: int | None, started: float) -> bool:
        if number is not None and self.rounds is not None and number >= self.rounds:
            return True
        return self.minutes is not None and time.monotonic() - started > 60 * self.minutes

    def _round(self, number: int, report: Report, over: Callable[[], bool]) -> None:
        rng = np.random.default_rng([self.seed, number])
        drawn = draw_requests(rng, self.requests, self._facts)
        all_settings = [draw_settings(rng, self._facts, self.graphs) for _ in range(self.settings_per_round)]
        for settings in all_settings:
            settings.steering.update(with_points(self.points))
        requests, right = self._bench.references(drawn)
        if right.broken:
            self._found(report, number, {"": f"the reference engine: {right.broken}"}, alone(), requests, None)
            return
        for settings in all_settings:
            if over():
                return
            problems = self._try(settings, requests, right, report.counts)
            if problems:
                self._found(report, number, problems, settings, requests, right)
                if not self.keep_going:
                    return
        problems = self._twins(requests, all_settings[0])
        if problems:
            self._found(report, number, problems, all_settings[0], requests, None)

    def _try(self, settings: Settings, requests: list[Request], right: Run, counts: Counts) -> dict[str, str]:
        with engine(self.model, self.dtype, settings) as llm:
            return self._bench.judge(llm, requests, right, counts)

    def _twins(self, requests: list[Request], settings: Settings) -> dict[str, str]:
        """Plain requests in the same batches beside steered ones and, in an engine without steering, beside plain ones.

        Batches are the same only where nothing depends on what is asked: no cache, no lack of room, no aborts.
        """
        calm = Settings(
            engine={
                "enable_prefix_caching": False,
                "block_size": settings.engine["block_size"],
                "max_num_seqs": 64,
                "max_num_batched_tokens": 2048,
            },
            # Enough for every site of every token of a step, and for all requests at a time.
            steering={"capture_rows": 1 << 15, "capture_mib": 1 << 20, **with_points(self.points)},
        )
        beside = [msgspec.structs.replace(request, abort_after=None) for request in requests]
        stripped = [
            msgspec.structs.replace(request, edits=[], globally=[], capture=None, module=False) for request in beside
        ]
        with engine(self.model, self.dtype, calm) as llm:
            ours = run(llm, beside, self._facts.hidden)
        with engine(self.model, self.dtype, calm, steering=False) as llm:
            stock = run(llm, stripped, self._facts.hidden)
        broken = ours.broken or stock.broken
        if broken:
            return {"": broken}
        return {
            request.name: "a plain request's log-probabilities are not bit by bit those of stock vLLM"
            for request in beside
            if request.plain and ours.answers[request.name].samples != stock.answers[request.name].samples
        }

    def _found(
        self, report: Report, number: int, problems: dict[str, str], settings: Settings, requests: list[Request],
        right: Run | None,
    ) -> None:  # fmt: skip
        name, problem = next(iter(problems.items()))
        self.say(f"round {number}: {len(problems)} wrong, first {name or 'the engine'}: {problem}")
        workload = Workload(settings=settings, requests=requests)
        if right is not None:
            workload = shrink(self._bench, workload, right, self.say)
        report.findings.append(Finding(number, problems, workload))


def replay(model: str, dtype: str, workload: str | bytes) -> dict[str, str]:
    """Run a workload from JSON: what is wrong, by request; the empty name is that of the engine as a whole.

    Raises ``msgspec.ValidationError`` where it is not a workload.
    """
    parsed = Workload.from_json(workload)
    points = tuple(parsed.settings.steering.get("points", ()))
    with engine(model, dtype, alone(points)) as llm:
        hidden = facts_of(llm).hidden
    return Bench(model, dtype, hidden, Tolerance.of(dtype), points).replay(parsed)
