# SPDX-License-Identifier: Apache-2.0
"""Rows of many texts as capture files, which an interrupted run goes on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.format import CaptureFileError, spec_to_dict
from vllm_steer.capture.files.reader import Captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS, RotatingLayout
from vllm_steer.capture.files.run_lock import RunLock
from vllm_steer.capture.hidden_states import capture_hidden_states
from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import open_dir, write_atomic
from vllm_steer.lab.activations import WITHOUT_FIRST, read_site_layers
from vllm_steer.lab.examples import Source, Text, read_texts
from vllm_steer.patching.offline import OfflineRunner
from vllm_steer.patching.progress import Progress
from vllm_steer.patching.runner import ModelFacts
from vllm_steer.request import CaptureSpec
from vllm_steer.request.scalars import read_integer

RUN = "harvest"
"""Name of the run in the folder's files."""
MANIFEST = "harvest.json"
_BATCH_TEXTS, _BATCH_BYTES = 256, 1 << 29
"""Most texts, and about the most bytes of rows, that are in memory together."""


class Harvest(msgspec.Struct, frozen=True):
    """Settings and counts of a harvest: the file ``harvest.json``. A folder has rows of equal settings only."""

    model: str
    spec: dict[str, Any]
    """Hook point, layers, positions and dtype, as in a capture spec."""
    texts: int
    digest: str
    """Hash of the texts and tags, in order."""
    sample: int | None
    seed: int
    answer: bool
    truncate: bool
    stored: int = 0
    """Texts whose rows are in the files."""
    rows: int = 0
    """Rows per layer in the files."""
    version: int = 1


def harvest(
    llm: Any,
    texts: Source,
    out: str | Path,
    *,
    point: str = "post_block",
    layers: Any = "all",
    positions: Any = WITHOUT_FIRST,
    dtype: Any = None,
    answer: bool = False,
    truncate: bool = False,
    sample: int | None = None,
    seed: int = 0,
    use_tqdm: bool = False,
) -> Harvest:
    """Run texts through a model and write their rows to capture files, which `open_captures` reads.

    Each text is one request of the run ``harvest``; ``submission`` is its number among the texts, and ``tag`` its tag.
    The same call goes on where an earlier one ended, even if that was killed: no row is lost or stored twice.

    Args:
        llm: An `LLM` with steering.
        texts: A file of texts or an iterable; see `read_texts`.
        out: Folder of the files. It is created if it does not exist.
        point: Hook point.
        layers: Layers, or ``"all"``.
        positions: Tokens of each text, as in a capture spec: all but the first by default.
        dtype: Dtype of the rows; the model's by default.
        answer: Whether conversations end with the tokens that begin an answer.
        truncate: Whether to use the beginning of texts that are too long for the model, instead of refusing them.
        sample: Number of texts to draw at random; all by default.
        seed: Seed of the draw.
        use_tqdm: Whether to show a progress bar.

    Raises:
        SteeringError: An argument is invalid for the model, a text is too long or has no rows, the folder has another
            harvest, or it cannot be written.
    """
    given = read_texts(texts)
    if sample is not None:
        read_integer(sample, 1, len(given), "sample")
        given = [given[i] for i in sorted(np.random.default_rng(seed).permutation(len(given))[:sample].tolist())]
    facts, name, numbers = read_site_layers(llm, point, layers)
    if not isinstance(positions, str):
        positions = [list(each) if isinstance(each, tuple) else each for each in positions]
    spec = {"hooks": {name: list(numbers)}, "positions": positions, "dtype": dtype}
    stored = spec_to_dict(CaptureSpec(**spec))
    digest = hashlib.sha256(json.dumps(given, separators=(",", ":")).encode()).hexdigest()[:16]
    settings = Harvest(facts.model, stored, len(given), digest, sample, seed, answer, truncate)
    ready, sizes = _tokenized(llm, [text for text, _ in given], facts, answer, truncate, positions)
    most = max(1, _BATCH_BYTES // (4 * facts.hidden_size * len(numbers)))
    with _writer(Path(out), settings) as (writer, done), Progress(RUN) if use_tqdm else nullcontext() as bar:
        if bar is not None:
            bar.count(len(given), len(done), 0)
        for batch in _batches([i for i in range(len(given)) if i not in done], ready, sizes, most):
            chat = {"add_generation_prompt": answer} if isinstance(ready[batch[0]][0], dict) else None
            try:
                states = capture_hidden_states(llm, [ready[i] for i in batch], **spec, chat_kwargs=chat, use_tqdm=False)
            except (RuntimeError, SteeringError) as error:  # such as a text without a token at the positions
                raise SteeringError("texts", f"of the batch from text {batch[0]} on: {error}") from None
            for number, captured in zip(batch, states, strict=True):
                tag = {} if (text := given[number][1]) is None else {"tag": text}
                whole = CaptureSpec(**spec, **tag)
                writer.write(replace(captured, request_id=str(number), submission=number, spec=whole))
                done[number] = len(captured.positions(name, numbers[0]))
            if bar is not None:
                bar.count(len(given), len(batch), 0)
    return msgspec.structs.replace(settings, stored=len(done), rows=sum(done.values()))


@contextmanager
def _writer(out: Path, settings: Harvest) -> Iterator[tuple[RotatingLayout, dict[int, int]]]:
    """Open a folder, and yield its writer and the number of rows of each stored text; keep the manifest."""
    directory = CaptureDirectory(str(out))
    lock = RunLock(directory, RUN, advice="or use another folder")
    writer = RotatingLayout(directory, "sharded", ROTATION_LIMITS["sharded"], RUN)
    done: dict[int, int] = {}
    try:
        path = directory.path / MANIFEST
        try:
            _check_manifest(path, settings)
            for request in Captures(directory.path, RUN):
                if request.submission is not None:
                    done[request.submission] = request.shape(*request.sites[0])[0]
        except CaptureFileError as error:
            raise SteeringError("out", f"{error}; remove that file and run the same harvest again") from None
        _write_manifest(directory.path, settings, done)
        try:
            yield writer, done
        except CaptureWriteError as error:
            problem = f"{out}: {error}; the rows of {len(done)} of {settings.texts} texts are stored"
            raise SteeringError("out", f"{problem}. Make room and run the same harvest again: it goes on") from None
        finally:
            writer.close()
        _write_manifest(directory.path, settings, done)
    except OSError as error:
        problem = f"{out} cannot be used: {error.strerror or error}"
        raise SteeringError("out", f"{problem}. Run the same harvest again when it can: it goes on") from None
    finally:
        lock.release()


def _check_manifest(path: Path, settings: Harvest) -> None:
    """Raise SteeringError if the folder has a harvest with other settings, or captures without a manifest."""
    if not path.exists():
        if len(Captures(path.parent, RUN)):
            raise SteeringError(
                "out", f"{path.parent} has rows of a harvest, but not its {MANIFEST}; use another folder"
            )
        return
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Harvest)
    except msgspec.MsgspecError as error:
        raise SteeringError("out", f"{path} is damaged: {error}; use another folder") from None
    fields = [name for name in settings.__struct_fields__ if name not in ("stored", "rows")]
    if names := [name for name in fields if getattr(found, name) != getattr(settings, name)]:
        problem = f"{path.parent} has the rows of another harvest (other {', '.join(names)})"
        raise SteeringError("out", f"{problem}; use another folder, or remove this one")


def _write_manifest(folder: Path, settings: Harvest, done: dict[int, int]) -> None:
    counted = msgspec.structs.replace(settings, stored=len(done), rows=sum(done.values()))
    descriptor = open_dir(folder)
    try:
        write_atomic(MANIFEST, msgspec.json.format(msgspec.json.encode(counted)) + b"\n", descriptor, 0o644)
    finally:
        os.close(descriptor)


def _tokenized(
    llm: Any, texts: Sequence[Text], facts: ModelFacts, answer: bool, truncate: bool, positions: Any
) -> tuple[list[Text], list[int]]:
    """Return the texts with strings as token ids, and their lengths; raise SteeringError for one that does not fit."""
    runner = OfflineRunner(llm)
    most = None if facts.max_model_len is None else facts.max_model_len - 1
    least = 2 if positions == [[1, None]] else 1
    ready: list[Text] = []
    sizes = []
    for number, text in enumerate(texts):
        tokens: Any = runner.encode(text, True) if isinstance(text, str) else text
        chat = isinstance(text[0], dict)
        if chat:
            tokens = runner.tokenizer.apply_chat_template(text, add_generation_prompt=answer, return_dict=False)
        if most is not None and len(tokens) > most:
            if chat or not truncate:
                hint = "shorten it" if chat else "shorten it, or set truncate to use its beginning"
                problem = f"has {len(tokens)} tokens; {facts.model} reads {most} here"
                raise SteeringError(
                    f"texts[{number}]", f"{problem}. {hint[0].upper()}{hint[1:]}, or raise max_model_len"
                )
            tokens = tokens[:most]
        if len(tokens) < least:
            problem = f"has {len(tokens)} token, and rows are taken from the second on"
            raise SteeringError(f"texts[{number}]", f'{problem}; remove it, or use positions="all_prompt"')
        ready.append(text if chat else tokens)
        sizes.append(len(tokens))
    return ready, sizes


def _batches(numbers: Sequence[int], texts: Sequence[Text], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield numbers of texts that run together: of one form, and of at most ``most`` tokens if there are several."""
    batch: list[int] = []
    tokens = 0
    for number in numbers:
        other = batch and isinstance(texts[number][0], dict) != isinstance(texts[batch[0]][0], dict)
        if batch and (other or len(batch) == _BATCH_TEXTS or tokens + sizes[number] > most):
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += sizes[number]
    if batch:
        yield batch
