# SPDX-License-Identifier: Apache-2.0
"""Texts of one capture: checked as a whole before the first one runs, and run several at a time."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from vllm_steer.capture.files.format import spec_to_dict
from vllm_steer.capture.hidden_states import none_left_running, rows_of_prompt
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.engine.capabilities import DTYPE_BYTES
from vllm_steer.errors import SteeringError
from vllm_steer.lab.examples import Source, Text, TextLine, read_texts
from vllm_steer.models.sae_site import models_of, plain_name
from vllm_steer.patching.offline import OfflineRunner
from vllm_steer.patching.runner import ModelFacts
from vllm_steer.points import PointName
from vllm_steer.registry.directions import WITHOUT_FIRST
from vllm_steer.request import CaptureSpec
from vllm_steer.request.scalars import is_integer, read_integer, shown
from vllm_steer.request.sites import read_layers, read_point

Texts: TypeAlias = "Source | Iterable[Any]"
_MOST_TEXTS, _MOST_BYTES = 256, 1 << 30
"""Most texts, and about the most bytes of rows, that are in the engine at one time, or in one batch."""
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "detokenize": False}


def read_site_layers(llm: Any, point: str, layers: Any) -> tuple[ModelFacts, PointName, tuple[int, ...]]:
    """Return facts about the model, the hook point and its layers; raise SteeringError if the model lacks one."""
    facts = OfflineRunner(llm).facts
    name = read_point(point, "point")
    if name not in facts.points:
        raise SteeringError("point", f"{name} is not read by this engine; use one of {', '.join(facts.points)}")
    read = read_layers(layers, "layers")
    numbers = tuple(range(facts.num_layers)) if read == "all" else read
    if numbers[-1] >= facts.num_layers:
        problem = f"{numbers[-1]} is not a layer of {facts.model}, which has layers 0 to {facts.num_layers - 1}"
        raise SteeringError("layers", f"{problem}; name other layers, or start the model that they are of")
    return facts, name, numbers


def check_model(llm: Any, made_for: str | None, field: str, problem: str) -> None:
    """Raise SteeringError with ``problem`` if what was made for a model is used with another one.

    Files of other tools may name the model's type instead.
    """
    config = llm.llm_engine.vllm_config.model_config
    names = models_of(config)
    if made_for and plain_name(made_for) not in map(plain_name, (*names, config.hf_config.model_type)):
        problem = f"{problem} the model {shown(made_for)}, not {' or '.join(map(repr, names))}"
        raise SteeringError(field, f"{problem}; start that model, or give its name as served_model_name")


def read_layer(layer: Any) -> list[int]:
    """Return a layer in a list; raise SteeringError if it is not one number."""
    if not is_integer(layer):
        raise SteeringError("layer", f"must be one layer such as 12, not {shown(layer)}; call again for another layer")
    return [int(layer)]


def position_lists(positions: Any) -> Any:
    """Return positions of a capture spec with lists in the place of tuples."""
    return positions if isinstance(positions, str) else [list(e) if isinstance(e, tuple) else e for e in positions]


def digest_of(texts: Iterable[tuple[Text, str | None]]) -> str:
    """Return a hash of texts and tags, in order."""
    hashed = hashlib.sha256()
    for text, tag in texts:
        hashed.update(json.dumps([text, tag], separators=(",", ":")).encode())
    return hashed.hexdigest()[:16]


class TextRows:
    """Texts that fit the model, and what is captured of each: one request per text, numbered from 0."""

    def __init__(
        self,
        llm: Any,
        texts: Texts,
        *,
        point: str = "post_block",
        layers: Any = "all",
        positions: Any = WITHOUT_FIRST,
        dtype: Any = None,
        answer: bool = False,
        truncate: bool = False,
        sample: int | None = None,
        seed: int = 0,
    ) -> None:
        """Read and check all texts; see `harvest` for the arguments.

        Raises:
            SteeringError: An argument is invalid for the model, or a text is too long or has no token at the positions.
        """
        self._llm = llm
        lines = read_texts(texts)
        chosen = np.arange(len(lines))
        if sample is not None:
            read_integer(sample, 1, len(lines), "sample")
            random = np.random.default_rng(read_integer(seed, 0, 2**63 - 1, "seed"))
            chosen = np.sort(random.permutation(chosen)[:sample])
        self.places = chosen.tolist()
        """Number of each text among all that were given."""
        self.lines = [lines[i] for i in self.places]
        self.facts, self.point, self.layers = read_site_layers(llm, point, layers)
        self._runner = OfflineRunner(llm)
        dtype = dtype or self._runner.context.capabilities.dtype
        hooks = {self.point: list(self.layers)}
        self._spec = {"hooks": hooks, "positions": position_lists(positions), "dtype": dtype}
        self.spec = CaptureSpec(**self._spec)
        self.answer = answer
        most = self.facts.max_model_len
        self.longest = None if most is None else most - 1
        """Most tokens of a text, to which `harvest` cuts longer ones with ``truncate``."""
        checked = [self._check(line, truncate) for line in self.lines]
        self._ready: list[Any] = [text for text, _ in checked]
        self.sizes = [size for _, size in checked]
        """Tokens of each text."""

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def settings(self) -> dict[str, Any]:
        """What is captured, as JSON: hooks, positions and dtype."""
        return {key: value for key, value in spec_to_dict(self.spec).items() if key in self._spec}

    @property
    def digest(self) -> str:
        """Hash of the texts and tags, in order."""
        return digest_of((line.text, line.tag) for line in self.lines)

    def stream(self, numbers: Iterable[int]) -> Generator[CapturedRequest]:
        """Run texts and yield the rows of each, in order; ``submission`` is the text's number.

        The engine goes on with later texts meanwhile, so that it does not wait for the caller. They are ended with the
        iterator, which must not be interleaved with other calls of the engine.

        Raises:
            SteeringError: The engine refuses a text, or rows are missing.
        """
        from vllm_steer.llm import one_thread
        from vllm_steer.params import SamplingParams

        engine, params = self._llm.llm_engine, SamplingParams(capture={"memory": self._spec}, **_ONE_TOKEN)
        running: deque[tuple[int, str]] = deque()
        outputs: dict[str, Any] = {}
        left = deque(numbers)
        held = 0

        def fill() -> None:
            nonlocal held
            while left:
                more = self._row_bytes(left[0])
                if running and (len(running) == _MOST_TEXTS or held + more > _MOST_BYTES):
                    break
                held += more
                running.append((left[0], self._enqueue(left.popleft(), params)))

        def next_one() -> CapturedRequest:
            nonlocal held
            number, request_id = running.popleft()
            held -= self._row_bytes(number)
            try:
                while request_id not in outputs:
                    if not engine.has_unfinished_requests():
                        raise RuntimeError("another call of the engine has taken the text's output")
                    outputs.update((each.request_id, each) for each in engine.step() if each.finished)
                rows = rows_of_prompt(outputs.pop(request_id))
            except (RuntimeError, ValueError) as error:
                raise SteeringError(self.lines[number].place, f"the engine failed: {error}") from error
            return self._named(number, rows)

        with one_thread(self._llm, "stream"), none_left_running(self._llm):
            fill()
            while running:
                rows = next_one()
                fill()
                yield rows

    def batches(self, batches: Sequence[Sequence[int]]) -> Generator[list[CapturedRequest]]:
        """Run texts as `stream` does, and yield the rows of each batch; later texts are ended with the iterator."""
        with closing(self.stream(chain.from_iterable(batches))) as texts:
            for batch in batches:
                yield [next(texts) for _ in batch]

    def _enqueue(self, number: int, params: Any) -> str:
        """Send a text to the engine and return the id of its output.

        Raises:
            SteeringError: The engine refuses it.
        """
        text = self._ready[number]
        try:
            if isinstance(text, list):
                ids = self._llm.enqueue_chat([text], params, use_tqdm=False, add_generation_prompt=self.answer)
            else:
                ids = self._llm.enqueue([{"prompt_token_ids": text.tolist()}], params, use_tqdm=False)
        except (RuntimeError, ValueError) as error:
            raise SteeringError(self.lines[number].place, f"the engine failed: {error}") from error
        # vLLM adds random characters to the id; outputs have it without them.
        return str(self._llm.llm_engine.output_processor.request_states[ids[0]].external_req_id)

    def _named(self, number: int, captured: CapturedRequest) -> CapturedRequest:
        """Return the rows with the text's number and tag."""
        tag = self.lines[number].tag
        spec = self.spec if tag is None else CaptureSpec(**self._spec, options={"tag": tag})
        return replace(captured, request_id=str(self.places[number]), submission=number, spec=spec)

    def _check(self, line: TextLine, truncate: bool) -> tuple[Any, int]:
        """Return a text, as int32 token ids unless it is a conversation, and its length."""
        text, selector = line.text, self.spec.tokens
        chat = isinstance(text[0], dict)
        if chat:
            if self._runner.tokenizer is None:
                raise SteeringError(line.place, self._runner.no_tokenizer)
            template = self._runner.tokenizer.apply_chat_template
            tokens: Any = template(text, add_generation_prompt=self.answer, return_dict=False)
        else:
            tokens = self._runner.encode(text, True) if isinstance(text, str) else text
            low, high, last = min(tokens, default=0), max(tokens, default=0), self.facts.vocab_size - 1
            if not 0 <= low <= high <= last:
                problem = f"has token ids from {low} to {high}, and {self.facts.model} has 0 to {last}"
                raise SteeringError(line.place, f"{problem}; make them with its tokenizer")
            if selector.is_prompt_part:
                problem = f"is not a conversation, so that it has no {selector.to_wire()}; use other positions"
                raise SteeringError(line.place, problem)
        if self.longest is not None and len(tokens) > self.longest:
            if chat or not truncate:
                hint = "Shorten it" if chat else "Shorten it, set truncate to use its beginning"
                problem = f"has {len(tokens)} tokens, and {self.facts.model} reads at most {self.longest} here"
                raise SteeringError(line.place, f"{problem}. {hint}, or raise max_model_len")
            tokens = tokens[: self.longest]
        size = len(tokens)
        try:
            missing = selector.beyond(size, size) if size else ()
        except SteeringError as error:
            raise SteeringError(line.place, f"has {size} tokens: {error.problem}") from None
        if missing or not size:
            problem = f"has {size} tokens, and none at the positions {selector.to_wire()}"
            raise SteeringError(line.place, f"{problem}; remove it, or use other positions such as all_prompt")
        return (text if chat else np.array(tokens, np.int32)), size

    def split(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield numbers of texts in batches, within the limits if one has several."""
        batch: list[int] = []
        size = 0
        for number in numbers:
            more = self._row_bytes(number)
            if batch and (len(batch) == _MOST_TEXTS or size + more > _MOST_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(number)
            size += more
        if batch:
            yield batch

    def _row_bytes(self, number: int) -> int:
        """Return about the most bytes of the rows of a text."""
        row = self.facts.hidden_size * len(self.layers) * DTYPE_BYTES[self._spec["dtype"]]
        return row * (self.spec.tokens.num_positions or self.sizes[number])
