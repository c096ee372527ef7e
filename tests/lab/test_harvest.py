# SPDX-License-Identifier: Apache-2.0
"""Rows of texts in capture files: complete, exact, and resumed after kills and full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.lab.hf import Hooked
from tests.tiny import VOCAB
from vllm_steer import SteeringError, capture_hidden_states, open_captures
from vllm_steer.capture.files.rotation import RotatingLayout
from vllm_steer.cli import lab as commands
from vllm_steer.cli.main import app
from vllm_steer.lab import harvest, text_rows

RANDOM = np.random.default_rng(7)
TEXTS = [RANDOM.integers(0, VOCAB, RANDOM.integers(2, 20)).tolist() for _ in range(120)]
SITES: dict[str, Any] = {"layers": [1, 3]}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "_MOST_TEXTS", 4)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[np.ndarray]:
    """Rows of each text without the first token, ``[layers, tokens, hidden]``."""
    hooked = Hooked(folder)
    return [hooked.run(text)[:, 1:] for text in TEXTS]


def check(root: Path, rows: list[np.ndarray], *, whole: bool = True) -> int:
    """Check that no text is stored twice and each has its own rows; return their number."""
    captures = open_captures(root)
    numbers = [int(request.request_id) for request in captures]
    assert len(set(numbers)) == len(numbers), "stored twice"
    assert not whole or numbers == list(range(len(TEXTS)))
    for number, request in zip(numbers, captures, strict=True):
        assert request.sites == (("post_block", 1), ("post_block", 3)) and request.run == "harvest"
        assert request.token_ids("post_block", 1).tolist() == TEXTS[number][1:]
        for layer in (1, 3):
            np.testing.assert_allclose(request.numpy("post_block", layer), rows[number][layer], rtol=1e-3, atol=1e-3)
    return len(numbers)


def test_ten_kills_lose_and_double_nothing(llm: Any, tmp_path: Path, rows: list[np.ndarray]) -> None:
    """Catches rows that a SIGKILL loses or doubles, half a text shown as whole, and a harvest that begins anew.

    Each child of this process has the engine's copy and is killed while it works.
    """
    generator = random.Random(3)
    stored = 0
    for _ in range(10):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)  # the other threads of the pool are not in this process
                write = RotatingLayout.write

                def noted(self: Any, captured: Any, write: Any = write, pipe: int = writing) -> Any:
                    os.write(pipe, b".")
                    return write(self, captured)

                RotatingLayout.write = noted  # type: ignore[method-assign]
                harvest(llm, TEXTS, tmp_path, **SITES)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as begun:
            for _ in range(generator.randint(0, 12)):
                begun.read(1)
            for _ in range(generator.randrange(3000)):  # another moment of the next text
                pass
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it ended before it was killed"
        before, stored = stored, check(tmp_path, rows, whole=False)
        assert before <= stored < len(TEXTS)
    assert stored > 20
    found = harvest(llm, TEXTS, tmp_path, **SITES)
    assert check(tmp_path, rows) == found.stored == found.texts == len(TEXTS)
    assert found.rows == sum(len(text) - 1 for text in TEXTS)
    assert json.loads((tmp_path / "harvest.json").read_text())["rows"] == found.rows
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert harvest(llm, TEXTS, tmp_path, **SITES) == found
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}, "a whole harvest was run again"


@pytest.mark.parametrize("failing", ["the disk", "the engine", "a file"])
def test_a_failure_loses_nothing(
    llm: Any, tmp_path: Path, rows: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Catches a traceback instead of what to do, rows of a failed write, and texts that are not run again."""
    calls, original, rows_of = [0], os.pwritev, text_rows.rows_of_prompt

    def full(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 30:
            original(arguments[0], [b"a part of the rows"], arguments[2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    def interrupted(output: Any) -> Any:
        calls[0] += 1
        if calls[0] == 30:
            raise RuntimeError("the engine has ended")
        return rows_of(output)

    if failing == "a file":
        harvest(llm, TEXTS, tmp_path, **SITES)
        (stream,) = tmp_path.glob("*.arrows")
        content = bytearray(stream.read_bytes())
        content[len(content) // 2 - 4000 : len(content) // 2 + 4000] = bytes(8000)
        stream.write_bytes(content)
        message = "is damaged.*; move that file away, or use another folder"
    elif failing == "the disk":
        monkeypatch.setattr(os, "pwritev", full)
        message = r"No space left on device; .* has the rows of 29 of 120 texts\. Run the same harvest again"
    else:
        monkeypatch.setattr(text_rows, "rows_of_prompt", interrupted)
        message = r"texts\[29\]: the engine failed: the engine has ended"
    with pytest.raises(SteeringError, match=message) as caught:
        harvest(llm, TEXTS, tmp_path, **SITES)
    assert not llm.llm_engine.output_processor.request_states, f"{caught.value!r}, whose traceback has the iterators"
    if failing == "a file":
        stream.rename(tmp_path.parent / "damaged")
    else:
        assert check(tmp_path, rows, whole=False) == 29
    harvest(llm, TEXTS, tmp_path, **SITES)
    check(tmp_path, rows)


def test_an_interruption_leaves_the_engine_clean(llm: Any, tmp_path: Path, rows: list[np.ndarray]) -> None:
    """Catches rows of the requests of a call that Ctrl-C ended among those of the next call."""
    step, calls = llm.llm_engine.step, [0]

    def interrupted() -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        return step()

    llm.llm_engine.step = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            harvest(llm, TEXTS, tmp_path, **SITES)
        harvest(llm, TEXTS, tmp_path, **SITES)
    finally:
        llm.llm_engine.step = step
    check(tmp_path, rows)


def test_the_engine_has_the_next_texts_while_rows_are_written(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that waits for each write, unbounded texts in it, and texts of an abandoned run that stay."""
    enqueue, states, sent = llm.enqueue, llm.llm_engine.output_processor.request_states, [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        sent[0] += 1
        return enqueue(*arguments, **named)

    monkeypatch.setattr(llm, "enqueue", counted)
    stream = text_rows.TextRows(llm, TEXTS[:12], layers=[1]).stream([3, 1, *range(4, 12)])
    assert [(next(stream).submission, sent[0]) for _ in range(5)] == [(3, 5), (1, 6), (4, 7), (5, 8), (6, 9)]
    assert states
    stream.close()
    assert not states
    rows = text_rows.TextRows(llm, [[1, 2, 3]] * 4, layers=[1])
    monkeypatch.setattr(text_rows, "_MOST_BYTES", 2 * rows._row_bytes(0))
    sent[0] = 0
    assert [(each.submission, sent[0]) for each in rows.stream(range(4))] == [(0, 3), (1, 4), (2, 4), (3, 4)]


def test_other_requests_keep_their_outputs(llm: Any) -> None:
    """Catches outputs of the user's own requests that a harvest takes, and a harvest that waits for one of its own."""
    (waiting,) = llm.enqueue([{"prompt_token_ids": TEXTS[0]}], use_tqdm=False)
    with pytest.raises(SteeringError, match="llm: has 1 requests of enqueue; call wait_for_completion"):
        next(text_rows.TextRows(llm, TEXTS[:2], layers=[1]).stream([0]))
    with pytest.raises(SteeringError, match="llm: has 1 requests of enqueue; call wait_for_completion"):
        capture_hidden_states(llm, [{"prompt_token_ids": TEXTS[0]}], hooks={"post_block": [1]}, use_tqdm=False)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.prompt_token_ids == TEXTS[0] and waiting.startswith(output.request_id)
    stream = text_rows.TextRows(llm, TEXTS[:8], layers=[1]).stream(range(8))
    next(stream)
    llm.wait_for_completion(use_tqdm=False)
    with pytest.raises(SteeringError, match="the engine failed: another call of the engine has taken"):
        list(stream)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": TEXTS[:9]}, "texts 9 instead of 8, digest '.*' instead of "),
        ({"texts": [*TEXTS[:7], [1, 2]]}, "digest '.*' instead of '.*'; use another folder, or remove this one"),
        ({"layers": [1]}, "hooks .* instead of "),
        ({"positions": "last_prompt"}, r"positions 'last_prompt' instead of \[\[1, None\]\]"),
        ({"dtype": "float16"}, "dtype 'float16' instead of 'float32'"),
        ({"truncate": True}, "truncate 511 instead of None"),
        ({"sample": 8, "texts": TEXTS[:8]}, "sample 8 instead of None"),
    ],
)
def test_the_folder_of_another_harvest_is_refused(
    llm: Any, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    """Catches rows of two settings in one folder."""
    settings: dict[str, Any] = {"texts": TEXTS[:8], **SITES}
    harvest(llm, out=tmp_path, **{**settings, **changed})
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SteeringError, match=f"out: .* has the rows of another harvest: {message}"):
        harvest(llm, out=tmp_path, **settings)
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_folders_that_cannot_be_used(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a harvest of another model that is added to, two writers, rows of unknown origin, bad manifests."""
    harvest(llm, TEXTS[:4], tmp_path, **SITES)
    manifest = tmp_path / "harvest.json"
    text = manifest.read_text()
    for content, message in (
        (text.replace('"model": "', '"model": "other-'), "model 'other-.*' instead of '"),
        (text[:40], "harvest.json cannot be read: .*; use another folder"),
        (None, "has a run 'harvest' without harvest.json; use another folder"),
    ):
        manifest.unlink() if content is None else manifest.write_text(content)
        with pytest.raises(SteeringError, match=f"out: .*{message}"):
            harvest(llm, TEXTS[:4], tmp_path, **SITES)
    manifest.write_text(text)
    write = RotatingLayout.write

    def second(self: Any, captured: Any) -> Any:
        with pytest.raises(SteeringError, match=r"out: a running process writes .*; end it, or use another folder"):
            harvest(llm, TEXTS[:4], self._directory.path, **SITES)
        return write(self, captured)

    monkeypatch.setattr(RotatingLayout, "write", second)
    harvest(llm, TEXTS[:1], tmp_path / "new", **SITES)
    (tmp_path / "file").touch()
    with pytest.raises(SteeringError, match=r"out: cannot write captures to .*file: File exists"):
        harvest(llm, TEXTS[:4], tmp_path / "file", **SITES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": []}, "texts: is empty"),
        ({"texts": [[1, 2], 5]}, r"texts\[1\].text: must be a text, token ids, or messages"),
        ({"texts": [[1, 2], {"txt": "a"}]}, r"texts\[1\]: has no text"),
        ({"texts": [{"text": [1, 2], "tag": 5}]}, r"texts\[0\].tag: must be a text, not 5"),
        ({"texts": [[1, 2], [1]]}, r"texts\[1\]: has 1 tokens, and none at the positions \[\[1, None\]\]; remove it"),
        ({"texts": [[1, 2, 3], [1]], "positions": [-2]}, r"texts\[1\]: has 1 tokens: "),
        ({"positions": "all_generated"}, r"texts\[0\]: has \d+ tokens, and none at the positions generated"),
        ({"positions": "user"}, r"texts\[0\]: is not a conversation, so that it has no user"),
        ({"positions": "last"}, "positions: 'last' is not"),
        ({"texts": [[1, VOCAB]]}, r"texts\[0\]: has token ids from 1 to 128, and .* has 0 to 127"),
        ({"texts": [[1] * 512]}, r"has 512 tokens, and .* reads at most 511 here\. Shorten it, set truncate"),
        ({"texts": ["a text"]}, "is a text, but the engine was started without a tokenizer"),
        ({"layers": [4]}, "layers: 4 is not a layer of .*, which has layers 0 to 3"),
        ({"point": "post_blok"}, "point: .*post_blok"),
        ({"dtype": "int8"}, "dtype: .*int8"),
        ({"sample": 121}, "sample: must be 1 to 120, not 121"),
        ({"sample": 3, "seed": -1}, "seed: must be 0 to"),
        ({"texts": Path("none.jsonl")}, r"none\.jsonl cannot be read: No such file"),
    ],
)
def test_bad_input_is_refused(llm: Any, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """Catches an error in the middle of a harvest, or without the argument or the text that caused it."""
    with pytest.raises(SteeringError, match=message):
        harvest(llm, **{"texts": TEXTS, "out": tmp_path / "acts", **SITES, **changed})
    assert not (tmp_path / "acts").exists()


def test_long_texts_and_samples(llm: Any, tmp_path: Path, folder: Path) -> None:
    """Catches the end of a text instead of its beginning, a draw that is not repeated, and numbers within the draw."""
    texts = [{"text": [n + 1] * 600, "tag": f"tag {n}"} for n in range(6)]
    found = harvest(llm, texts, tmp_path, layers=[2], truncate=True, sample=3, seed=5, dtype="float16")
    assert (found.stored, found.rows, found.truncate) == (3, 3 * 510, 511)
    stored = list(open_captures(tmp_path))
    assert len({each.request_id for each in stored}) == 3
    for each in stored:
        assert each.tag == f"tag {each.request_id}" and each.num_prompt_tokens == 511
        assert set(each.token_ids("post_block", 2).tolist()) == {int(each.request_id) + 1}
        assert each.tensor("post_block", 2).dtype == torch.float16
    assert harvest(llm, texts, tmp_path, layers=[2], truncate=True, sample=3, seed=5, dtype="float16") == found


def test_the_command(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches options that do not arrive, and a model that is loaded before the file is read."""
    monkeypatch.setattr(commands, "start_engine", lambda model, words, command: llm)
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text, "tag": f"n{i}"}) for i, text in enumerate(TEXTS[:8])]
    Path("texts.jsonl").write_text("\n\n".join(lines))
    command = ["harvest", "texts.jsonl", "--model", "m", "--out", "acts", "--layers", "1:3"]
    options = ["--positions", "last_prompt", "--row-dtype", "bfloat16", "--sample", "5", "--seed", "1", "--truncate"]
    for _ in range(2):
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0 and "acts: 5 rows per layer of 5 texts" in done.output, done.output
    given: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(commands, "start_engines", lambda *arguments: given.append(arguments) or nullcontext(llm))
        done = CliRunner().invoke(app, [*command, *options, "--ray", "--dtype", "float32"])
    assert done.exit_code == 0 and given == [("m", ["--dtype", "float32"], "harvest")], done.output
    for request in open_captures("acts"):
        assert request.tag == f"n{request.request_id}" and request.positions("post_block", 2).tolist() == [
            len(TEXTS[int(request.request_id)]) - 1
        ]
        assert request.tensor("post_block", 1).dtype == torch.bfloat16
    done = CliRunner().invoke(app, [*command, *options[:-1]])
    assert done.exit_code == 1 and "truncate 511 instead of None" in done.output
    Path("bad.jsonl").write_text(f"{lines[0]}\n\n{lines[1][:-1]}\n")
    Path("bad.txt").write_bytes(b"a\xff\n")
    monkeypatch.setattr(commands, "start_engine", lambda *arguments: pytest.fail("loaded the model"))
    for name, layers, message in (
        ("bad.jsonl", "1:3", "bad.jsonl:3: cannot be parsed as JSON"),
        ("bad.txt", "1:3", "use UTF-8 text or .jsonl"),
        ("texts.jsonl", "x", "layers: 'x' is not 12"),
    ):
        done = CliRunner().invoke(app, ["harvest", name, *command[2:-1], layers])
        assert done.exit_code == 1 and message in done.output, done.output
