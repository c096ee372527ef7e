# SPDX-License-Identifier: Apache-2.0
"""Rows of many texts as capture files, which an interrupted run goes on with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from vllm_steer.capture.files.directory import CaptureDirectory, CaptureWriteError
from vllm_steer.capture.files.reader import Captures
from vllm_steer.capture.files.rotation import ROTATION_LIMITS, RotatingLayout
from vllm_steer.capture.files.run_lock import RunLock
from vllm_steer.capture.results import CapturedRequest
from vllm_steer.errors import SteeringError
from vllm_steer.fs.dirfd import open_dir, write_atomic
from vllm_steer.lab.examples import read_texts
from vllm_steer.lab.ray_engines import RayEngines
from vllm_steer.lab.shards import RUN, ShardTask, remove_parts, write_behind
from vllm_steer.lab.text_rows import TextRows, Texts
from vllm_steer.patching.progress import Progress
from vllm_steer.registry.directions import WITHOUT_FIRST
from vllm_steer.request.scalars import shown

MANIFEST = "harvest.json"
_VISIBLE_SECONDS = 90.0
"""Time after which a file that another node has written is visible: NFS caches the list of a folder for a minute."""


class Harvest(msgspec.Struct, frozen=True):
    """Settings and counts of a harvest: the file ``harvest.json``. A folder has rows of equal settings only."""

    model: str
    hooks: dict[str, Any]
    """Layers by hook point."""
    positions: Any
    """Tokens of each text, as in a capture spec."""
    dtype: str
    """Dtype of the rows."""
    texts: int
    digest: str
    """Hash of the texts and tags, in order."""
    sample: int | None
    seed: int
    answer: bool
    truncate: int | None
    """Number of tokens to which longer texts were cut; None if there were to be none."""
    stored: int = 0
    """Texts whose rows are in the files."""
    rows: int = 0
    """Rows per layer in the files."""
    version: int = 1


def harvest(
    llm: Any,
    texts: Texts,
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

    Each text is one request of the run ``harvest``. Its ``request_id`` is its number among the texts, and its ``tag``
    that of the text. All texts are checked before the first one runs. The same call goes on where an earlier one ended,
    even if that was killed: no row is lost or stored twice.

    Args:
        llm: An `LLM` with steering, or `RayEngines`, whose nodes share the folder.
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
        SteeringError: An argument is invalid for the model, a text is too long or has no tokens at the positions, the
            folder has another harvest or is written by another process, or it cannot be written.
    """
    given: dict[str, Any] = {
        "point": point, "layers": layers, "positions": positions, "dtype": dtype, "answer": answer,
        "truncate": truncate, "sample": sample, "seed": seed,
    }  # fmt: skip
    rows: TextRows | ShardTask
    if isinstance(llm, RayEngines):
        rows = ShardTask(read_texts(texts), given, _settings)
        settings: Harvest = rows.settings(llm)
    else:
        rows = TextRows(llm, texts, **given)
        settings = _settings(rows, given)
    with _opened(Path(out), settings) as (folder, writer, done), Progress(RUN) if use_tqdm else nullcontext() as bar:
        left = [number for number in range(settings.texts) if number not in done]
        if bar is not None:
            bar.count(settings.texts, len(done), 0)

        def write(text: Sequence[CapturedRequest]) -> None:
            writer.write(text[0])
            done[text[0].submission] = len(next(iter(text[0].sites.values())).positions)

        if isinstance(rows, TextRows):
            stored = write_behind(rows.batches([[number] for number in left]), write)
        else:
            stored = rows.run(llm, folder, settings, left)
        with closing(stored):
            for number in stored:
                if bar is not None:
                    bar.count(settings.texts, number, 0)
        if left and isinstance(rows, ShardTask):
            done.update(_all_stored(folder, settings))
    return _counted(settings, done)


def _settings(rows: TextRows, given: Mapping[str, Any]) -> Harvest:
    """Return the settings of a harvest of these rows."""
    chosen = {name: given[name] for name in ("sample", "seed", "answer")}
    cut = rows.longest if given["truncate"] else None
    return Harvest(rows.facts.model, **rows.settings, **chosen, texts=len(rows), digest=rows.digest, truncate=cut)


def _stored(folder: Path) -> dict[Any, int]:
    """Return the number of rows of each stored text."""
    return {each.submission: each.shape(*each.sites[0])[0] for each in Captures(folder, RUN)}


def _all_stored(folder: Path, settings: Harvest) -> dict[Any, int]:
    """Return the number of rows of each text, all of which other nodes have stored."""
    end = time.monotonic() + _VISIBLE_SECONDS
    while len(done := _stored(folder)) < settings.texts:
        if time.monotonic() > end:
            problem = f"{folder} has the rows of {len(done)} of {settings.texts} texts"
            raise SteeringError("out", f"{problem}, though all were written. All nodes must share this folder")
        time.sleep(1)
    return done


@contextmanager
def _opened(out: Path, settings: Harvest) -> Iterator[tuple[Path, RotatingLayout, dict[Any, int]]]:
    """Open a folder for one process; yield its path, its writer and the number of rows of each stored text."""
    try:
        directory = CaptureDirectory(str(out))
        lock = RunLock(directory, RUN, resume=True, advice="or use another folder")
    except SteeringError as error:
        raise SteeringError("out", error.problem) from None
    try:
        _check_manifest(directory.path / MANIFEST, settings, lock.next_submission > 0)
        remove_parts(directory.path)
        done = _stored(directory.path)
        _write_manifest(directory.path, _counted(settings, done))
        writer = RotatingLayout(directory, "sharded", ROTATION_LIMITS["sharded"], RUN)
        try:
            yield directory.path, writer, done
        except CaptureWriteError as error:
            problem = f"{error}; {out} has the rows of {len(done)} of {settings.texts} texts"
            raise SteeringError("out", f"{problem}. Run the same harvest again when it can be written") from None
        finally:
            writer.close()
        _write_manifest(directory.path, _counted(settings, done))
    finally:
        lock.release()


def _counted(settings: Harvest, done: dict[Any, int]) -> Harvest:
    return msgspec.structs.replace(settings, stored=len(done), rows=sum(done.values()))


def _check_manifest(path: Path, settings: Harvest, has_rows: bool) -> None:
    """Raise SteeringError if the folder has a harvest with other settings, or rows without a manifest."""
    if not path.exists():
        if has_rows:
            raise SteeringError("out", f"{path.parent} has a run {RUN!r} without {MANIFEST}; use another folder")
        return
    found = read_manifest(path.parent)
    there, here = (msgspec.to_builtins(_counted(each, {})) for each in (found, settings))
    if names := [name for name in here if there[name] != here[name]]:
        values = ", ".join(f"{name} {shown(there[name])} instead of {shown(here[name])}" for name in names)
        problem = f"{path.parent} has the rows of another harvest: {values}"
        raise SteeringError("out", f"{problem}; use another folder, or remove this one")


def read_manifest(folder: Path) -> Harvest:
    """Return settings and counts of the harvest in a folder; raise SteeringError if there is none."""
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Harvest)
    except (msgspec.MsgspecError, OSError) as error:
        raise SteeringError("out", f"{path} cannot be read: {error}; use another folder") from None


def _write_manifest(folder: Path, settings: Harvest) -> None:
    try:
        descriptor = open_dir(folder)
        try:
            text = msgspec.json.format(msgspec.json.encode(settings)) + b"\n"
            write_atomic(MANIFEST, text, descriptor, 0o644)
        finally:
            os.close(descriptor)
    except OSError as error:
        problem = f"{folder / MANIFEST} cannot be written: {error.strerror or error}"
        raise SteeringError("out", f"{problem}. Run the same harvest again when it can") from None
