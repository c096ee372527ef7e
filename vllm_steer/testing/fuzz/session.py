# SPDX-License-Identifier: Apache-2.0
"""Sessions of the fuzzer: in each round, a workload, its references and several loaded engines."""

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
from vllm_steer.testing.fuzz.model import engine, facts_of, reference_settings, with_points
from vllm_steer.testing.fuzz.shrink import Comparator, shrink
from vllm_steer.testing.fuzz.workload import Request, Settings, Workload


@dataclass(frozen=True)
class Finding:
    """A difference from the reference: round, problem by request name, and the workload that reproduces it."""

    round: int
    problems: dict[str, str]
    workload: Workload


@dataclass
class Report:
    """Result of a session."""

    seed: int
    seconds: float = 0.0
    seconds_without_a_finding: float = 0.0
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)

    def to_builtins(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data; each workload is a JSON string for ``--replay``."""
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
    """One run of the fuzzer. A round depends only on the seed and its number.

    Attributes:
        model: Name or folder of the model.
        minutes: Stop after this time, or after ``rounds``, whichever comes first.
        requests: Requests in each workload.
        settings_per_round: Engines under test in each round.
        graphs: Also use engines with compilation and CUDA graphs.
        points: Hook points on the branches, enabled in all engines and used by the requests.
        keep_going: Continue after a finding instead of stopping.
        log: Receives one line per round and finding.
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
    log: Callable[[str], None] = lambda _: None

    def run(self) -> Report:
        """Run the rounds and return the report. Errors of an engine's start are raised; later ones are findings."""
        report = Report(self.seed)
        started = time.monotonic()
        with engine(self.model, self.dtype, reference_settings(self.points)) as llm:
            self._facts = facts_of(llm)
        self._comparator = Comparator(self.model, self.dtype, self._facts.hidden, Tolerance.of(self.dtype), self.points)
        number = 0
        while not self._is_over(number, started) and (self.keep_going or not report.findings):
            found = len(report.findings)
            self._round(number, report, lambda: self._is_over(None, started))
            number += 1
            report.counts.rounds += 1
            report.seconds = time.monotonic() - started
            if found == len(report.findings) == 0:
                report.seconds_without_a_finding = report.seconds
            self.log(f"round {number}, {report.seconds:.0f} s: {asdict(report.counts)}")
        return report

    def _is_over(self, number: int | None, started: float) -> bool:
        if number is not None and self.rounds is not None and number >= self.rounds:
            return True
        return self.minutes is not None and time.monotonic() - started > 60 * self.minutes

    def _round(self, number: int, report: Report, over: Callable[[], bool]) -> None:
        rng = np.random.default_rng([self.seed, number])
        drawn = draw_requests(rng, self.requests, self._facts)
        all_settings = [draw_settings(rng, self._facts, self.graphs) for _ in range(self.settings_per_round)]
        for settings in all_settings:
            settings.steering.update(with_points(self.points))
        requests, right = self._comparator.references(drawn)
        if right.broken:
            problems = {"": f"the reference engine failed: {right.broken}"}
            self._record(report, number, problems, reference_settings(), requests, None)
            return
        for settings in all_settings:
            if over():
                return
            with engine(self.model, self.dtype, settings) as llm:
                problems = self._comparator.judge(llm, requests, right, report.counts)
            if problems:
                self._record(report, number, problems, settings, requests, right)
                if not self.keep_going:
                    return
        problems = self._compare_with_stock(requests, all_settings[0])
        if problems:
            self._record(report, number, problems, all_settings[0], requests, None)

    def _compare_with_stock(self, requests: list[Request], settings: Settings) -> dict[str, str]:
        """Compare plain requests bit by bit: batched with steered ones, and in stock vLLM with the same batches.

        Batches are equal only if scheduling does not depend on steering: no cache, no preemption, no aborts, no stops,
        and no lens, because the output layer multiplies its rows and the sampler's in one product.
        """
        uncontended = Settings(
            engine={
                "enable_prefix_caching": False,
                "block_size": settings.engine["block_size"],
                "max_num_seqs": 64,
                "max_num_batched_tokens": 2048,
            },
            # Room for every site of every token of a step, and for all requests at once.
            steering={"capture_rows": 1 << 15, "capture_mib": 1 << 20, **with_points(self.points)},
        )
        mixed = [
            msgspec.structs.replace(
                request,
                abort_after=None,
                stops=[],
                readouts={name: each for name, each in request.readouts.items() if "lens" not in each},
            )
            for request in requests
        ]
        stripped = [
            msgspec.structs.replace(request, edits=[], globally=[], capture=None, readouts={}, module=False)
            for request in mixed
        ]
        with engine(self.model, self.dtype, uncontended) as llm:
            steered = run(llm, mixed, self._facts.hidden)
        with engine(self.model, self.dtype, uncontended, steering=False) as llm:
            stock = run(llm, stripped, self._facts.hidden)
        broken = steered.broken or stock.broken
        if broken:
            return {"": broken}
        return {
            request.name: "log-probabilities of a plain request differ from those of stock vLLM"
            for request in mixed
            if request.plain and steered.answers[request.name].samples != stock.answers[request.name].samples
        }

    def _record(
        self, report: Report, number: int, problems: dict[str, str], settings: Settings, requests: list[Request],
        right: Run | None,
    ) -> None:  # fmt: skip
        name, problem = next(iter(problems.items()))
        self.log(f"round {number}: {len(problems)} problems, the first in {name or 'the engine'}: {problem}")
        workload = Workload(settings=settings, requests=requests)
        if right is not None:
            workload = shrink(self._comparator, workload, right, self.log)
        report.findings.append(Finding(number, problems, workload))


def replay(model: str, dtype: str, workload: str | bytes) -> dict[str, str]:
    """Run a workload from JSON and return the problems by request name; the empty name is the engine itself.

    Raises:
        msgspec.ValidationError: ``workload`` is not a workload in JSON.
    """
    parsed = Workload.from_json(workload)
    points = tuple(parsed.settings.steering.get("points", ()))
    with engine(model, dtype, reference_settings(points)) as llm:
        hidden = facts_of(llm).hidden
    return Comparator(model, dtype, hidden, Tolerance.of(dtype), points).replay(parsed)
