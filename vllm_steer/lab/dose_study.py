# SPDX-License-Identifier: Apache-2.0
"""Dose studies: the effect and the cost of a vector at layers and doses, beside controls."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.lab.activations import collect, described_tokens
from vllm_steer.lab.dose_result import DoseResult
from vllm_steer.lab.examples import Examples, Source, Text, read_examples, read_prompts
from vllm_steer.lab.methods import METHODS, Method, directions_of
from vllm_steer.lab.ray_engines import RayEngines
from vllm_steer.lab.samples import Kind, Sample, SampleFile, Study
from vllm_steer.lab.scores import ProbeScore, Reading, Score, read_again, repetition, score_name
from vllm_steer.lab.text_rows import check_model, read_site_layers
from vllm_steer.params import SamplingParams
from vllm_steer.patching.progress import Progress
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.request.scalars import read_dose, read_integer

DOSES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
CONTROLS, SHUFFLES = 20, 5
_LEAST_PROMPTS = 8
_QUEUE = 256
"""Most requests that are submitted, scored and written together."""
_PARTS_PER_ENGINE = 8
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Cell:
    """Texts with one direction and dose, one per prompt."""

    kind: Kind
    number: int
    direction: Direction | None
    dose: float
    prompts: Sequence[int]

    def key(self, prompt: int) -> tuple[Kind, int, int, float, int]:
        """Return the key of the sample of a prompt."""
        return self.kind, self.number, -1 if self.direction is None else self.direction.layer, self.dose, prompt


def dose(
    llm: Any,
    vectors: Directions | str | Path,
    prompts: Source,
    *,
    score: Score,
    doses: Sequence[float] = DOSES,
    layers: Any = None,
    examples: Source | Examples | None = None,
    controls: int = CONTROLS,
    max_tokens: int = 48,
    chat: bool = False,
    tokens: Any = "all",
    sampling: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    use_tqdm: bool = False,
) -> DoseResult:
    """Measure what a vector does at each layer and dose, choose one, and compare it with controls on other prompts.

    Half of the prompts choose layer and dose: the largest effect of coherent text. The other half, held out, are
    answered at all doses of this layer with the vector, with the opposite sign, with random directions of the same
    length and, given the examples, with directions of shuffled labels.

    Args:
        llm: An `LLM` with steering, or `RayEngines`.
        vectors: Directions that `make` returned, or a file of vectors in any format.
        prompts: A file of JSON lines or a list, with at least 8 prompts; see `read_prompts`.
        score: What is to increase: `Keywords`, `ProbeScore` or a function of prompt and text.
        doses: Positive numbers: length of the added vector, in median lengths of the stream on the prompts.
        layers: Layers to try; all of the vectors' by default.
        examples: The examples of the vectors, for controls with shuffled labels.
        controls: Number of random directions.
        max_tokens: Most tokens of a text.
        chat: Whether strings are messages of a user.
        tokens: Tokens that are steered, as in `Edit`.
        sampling: Further arguments of `SamplingParams`; texts are greedy by default.
        out: File of JSON lines to which texts are added as they come. An interrupted study goes on where it was.
        seed: Seed of the split of the prompts and of the controls.
        use_tqdm: Whether to show a progress bar.

    Raises:
        SteeringError: An argument is invalid or made for another model, the score fails, or ``out`` has the results of
            another study or is written by another process.
    """
    read = read_prompts(prompts, chat=chat)
    if len(read) < _LEAST_PROMPTS:
        problem = f"has the length {len(read)}; give at least {_LEAST_PROMPTS} prompts, half of which are held out"
        raise SteeringError("prompts", problem)
    seen: dict[str, int] = {}
    for i, each in enumerate(read):
        if (first := seen.setdefault(json.dumps(each), i)) < i:  # a held-out prompt would also choose
            raise SteeringError(f"prompts[{i}]", f"is prompts[{first}] again; give each prompt once")
    grid = tuple(sorted({read_dose(each, f"doses[{i}]") for i, each in enumerate(doses)}))
    if not grid or grid[0] <= 0:
        raise SteeringError("doses", f"must be positive numbers, not {list(doses)}; controls have the negative ones")
    read_integer(controls, 2, 1000, "controls")
    shown = None if examples is None else read_examples(examples)
    made = vectors if isinstance(vectors, Directions) else Directions.load(vectors)
    probe = score if isinstance(score, ProbeScore) else None
    model, at = _on(llm, _placed, made, layers, read, max_tokens, probe.model if probe else None)
    order = np.random.default_rng(seed).permutation(len(read)).tolist()
    choosing, held_out = sorted(order[: len(read) // 2]), tuple(sorted(order[len(read) // 2 :]))
    study = Study(
        model=model, vectors=_digest([each.unit.tolist() for each in at.values()]), point=made.point, layers=tuple(at),
        doses=grid, score=score_name(score), prompts=_digest(read), held_out=held_out, controls=controls,
        shuffles=0 if shown is None else SHUFFLES, seed=seed, max_tokens=max_tokens,
        tokens=json.dumps(tokens, default=str), sampling=json.dumps(dict(sampling or {}), sort_keys=True, default=str),
    )  # fmt: skip
    with (
        nullcontext() if out is not None else tempfile.TemporaryDirectory() as folder,
        closing(SampleFile(Path(out) if out is not None else Path(str(folder), "samples.jsonl"), study)) as file,
    ):
        answer = _Answer(read, probe, tokens, {"temperature": 0.0, **(sampling or {}), "max_tokens": max_tokens})
        runner = _Runner(llm, read, score, answer, file, use_tqdm)
        cells = [_Cell("plain", 0, None, 0.0, range(len(read)))]
        cells += [_Cell("vector", 0, each, amount, choosing) for each in at.values() for amount in grid]
        runner.run(cells)
        chosen = at[DoseResult(study, tuple(file.samples)).chosen[0]]
        tried: list[tuple[Kind, list[Direction]]] = [("random", chosen.random(controls, seed))]
        if shown is not None:
            tried.append(("shuffled", _on(llm, _shuffled, shown, made, chosen, seed)))
        cells = [_Cell("vector", 0, chosen, sign * amount, held_out) for amount in grid for sign in (1, -1)]
        for kind, directions in tried:
            cells += [_Cell(kind, n, each, amount, held_out) for n, each in enumerate(directions) for amount in grid]
        runner.run(cells)
        return DoseResult(study, tuple(file.samples))


def _on(llm: Any, function: Callable[..., Result], *arguments: Any) -> Result:
    """Return ``function(llm, *arguments)``, which one of several engines computes."""
    return llm.call(function, *arguments) if isinstance(llm, RayEngines) else function(llm, *arguments)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]


def _placed(
    llm: Any, made: Directions, layers: Any, prompts: Sequence[Text], max_tokens: int, scored: str | None
) -> tuple[str, dict[int, Direction]]:
    """Return the model's name and the directions by layer, with the length of the stream on the prompts.

    ``scored`` is the name of the model that the probe of the score was trained on, if it is known.
    """
    facts, point, numbers = read_site_layers(llm, made.point, sorted(made) if layers is None else layers)
    if missing := [layer for layer in numbers if layer not in made]:
        raise SteeringError("layers", f"has no vector of layer {missing[0]}; use some of {sorted(made)}")
    if (width := len(made[numbers[0]].unit)) != facts.hidden_size:
        problem = f"have {width} numbers, and the stream of {facts.model} {facts.hidden_size}"
        raise SteeringError("vectors", f"{problem}; start the model that they were made for")
    check_model(llm, made.model, "vectors", "were made for")
    check_model(llm, scored, "score", "is a probe that was trained on")
    found = collect(llm, prompts, point=point, layers=numbers, answer=True)
    needed = found.longest + max_tokens + 1
    if facts.max_model_len is not None and needed > facts.max_model_len:
        problem = f"is {max_tokens}, with which a prompt needs {needed} tokens to be read again"
        raise SteeringError("max_tokens", f"{problem}; max_model_len is {facts.max_model_len}")
    return facts.model, {layer: replace(made[layer], stream=found.streams[layer]) for layer in numbers}


def _shuffled(llm: Any, examples: Examples, made: Directions, at: Direction, seed: int) -> list[Direction]:
    """Return directions of examples with shuffled labels, made as ``made`` was, with the site of ``at``."""
    positions, pool = described_tokens(made.provenance)
    found = collect(llm, examples.texts, point=at.point, layers=[at.layer], positions=positions, pool=pool)
    method: Method = next((name for name in METHODS if name == made.method), "mean")
    shuffled = [directions_of(found, examples.shuffled(seed + i), method)[at.layer] for i in range(SHUFFLES)]
    return [replace(at, unit=each.unit) for each in shuffled]


@dataclass(frozen=True, eq=False)
class _Answer:
    """Generates the texts of cells and reads them again, on an engine."""

    prompts: Sequence[Text]
    probe: ProbeScore | None
    tokens: Any
    sampling: Mapping[str, Any]

    def __call__(self, llm: Any, work: Sequence[tuple[_Cell, int]]) -> list[tuple[str, tuple[int, ...], Reading]]:
        """Return text, token ids and reading for each cell and prompt."""
        params = []
        for cell, _ in work:
            edit = None if cell.direction is None else cell.direction.add(cell.dose, tokens=self.tokens)
            params.append(SamplingParams(steering=edit, **self.sampling))
        texts = [self.prompts[prompt] for _, prompt in work]
        chats = isinstance(texts[0][0], dict)
        outputs = (llm.chat if chats else llm.generate)(texts, params, use_tqdm=False)
        made = (each.outputs[0] for each in outputs)
        readings = read_again(llm, outputs, self.probe)
        return [(each.text, tuple(each.token_ids), reading) for each, reading in zip(made, readings, strict=True)]


@dataclass(frozen=True, eq=False)
class _Runner:
    """Scores the texts of cells and adds them to the file."""

    llm: Any
    prompts: Sequence[Text]
    score: Score
    answer: _Answer
    file: SampleFile
    use_tqdm: bool

    def run(self, cells: Sequence[_Cell]) -> None:
        """Generate and score the texts that the file does not have."""
        done = {sample.key for sample in self.file.samples}
        work = [(cell, prompt) for cell in cells for prompt in cell.prompts if cell.key(prompt) not in done]
        total = sum(len(cell.prompts) for cell in cells)
        size = _QUEUE
        if isinstance(self.llm, RayEngines):
            size = max(1, min(_QUEUE, math.ceil(len(work) / (self.llm.count * _PARTS_PER_ENGINE))))
        parts = (work[start : start + size] for start in range(0, len(work), size))
        if isinstance(self.llm, RayEngines):
            answers = self.llm.map(self.answer, parts)
        else:
            answers = ((part, self.answer(self.llm, part)) for part in parts)
        with Progress("dose") if self.use_tqdm else nullcontext() as bar:
            if bar is not None:
                bar.count(total, total - len(work), 0)
            with closing(answers):
                for part, found in answers:
                    self.file.add([self._sample(*each) for each in zip(part, found, strict=True)])
                    if bar is not None:
                        bar.count(total, len(part), 0)

    def _sample(self, place: tuple[_Cell, int], answer: tuple[str, tuple[int, ...], Reading]) -> Sample:
        cell, prompt = place
        text, tokens, reading = answer
        loss = float(np.mean(reading.losses)) if reading.losses else None
        value = self._scored(prompt, text, reading.probe)
        return Sample(*cell.key(prompt), text, value, loss, len(reading.losses), repetition(tokens))

    def _scored(self, prompt: int, text: str, probe: float) -> float:
        given = self.prompts[prompt]
        try:
            value = probe
            if not isinstance(self.score, ProbeScore):
                value = float(self.score(given if isinstance(given, str) else json.dumps(given), text))
        except Exception as error:  # of the user's code
            raise SteeringError("score", f"failed for prompt {prompt}: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise SteeringError("score", f"is {value} for prompt {prompt}; it must be a finite number")
        return value
