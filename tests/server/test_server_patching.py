# SPDX-License-Identifier: Apache-2.0
"""Activation patching over a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.server.server import LAYERS
from vllm_steer import AsyncClient, Client
from vllm_steer.patching import PatchingResult, PatchingStudy

PROMPTS = {"clean": "the cat sat", "corrupt": "the dog sat", "answer": "ab", "foil": "c"}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def steering(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def hook_grid(model: Path) -> np.ndarray:
    """Return the difference of answer and foil, patched at `post_block` by hooks in HF Transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    clean, corrupt, answer, foil = (tokenizer.encode(PROMPTS[part]) for part in PROMPTS)
    scored = [(target[:i], token, sign) for target, sign in ((answer, 1), (foil, -1)) for i, token in enumerate(target)]
    grid = np.empty((LAYERS, len(corrupt)))
    with torch.no_grad():
        for layer, position in np.ndindex(grid.shape):
            block, rows = network.model.layers[layer], []
            reader = block.register_forward_hook(lambda *given, rows=rows: rows.append(_stream(given[-1]).clone()))
            network(torch.tensor([clean]))
            reader.remove()

            def patch(*given: Any, row: Any = rows[0][0, position], position: int = position) -> None:
                _stream(given[-1])[0, position] = row

            writer = block.register_forward_hook(patch)
            logprobs = [
                network(torch.tensor([corrupt + before])).logits[0, -1].log_softmax(-1) for before, *_ in scored
            ]
            writer.remove()
            pairs = zip(scored, logprobs, strict=True)
            grid[layer, position] = sum(sign * after[token].item() for (_, token, sign), after in pairs)
    return grid


def _stream(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def test_a_study_over_completions(steering: Client, hook_grid: np.ndarray) -> None:
    """Catches rows, edits or scores that change on the way over HTTP, and a text that is tokenised differently."""
    study = PatchingStudy(steering, **PROMPTS)
    result = study.sweep(points=["post_block"], metric="recovered", progress=False, kl_tokens=20)
    assert not result.failed() and result.info.column_names[4] == "4 d"
    np.testing.assert_allclose(result.grid("post_block", "logit_diff"), hook_grid, atol=TOLERANCE)
    assert np.abs(hook_grid - np.roll(hook_grid, 1, axis=1)).max() > 0.1
    assert result.control("logit_diff") < TOLERANCE
    assert np.isfinite(result.grid("post_block", "kl")).all()


def test_a_study_on_the_server(steering: Client, hook_grid: np.ndarray) -> None:
    """Catches a study that the server runs differently, and events that lack cells."""
    study = {**PROMPTS, "points": ["post_block"], "metric": "recovered"}
    result = steering.patch(**study, kl_tokens=20)
    assert not result.failed() and np.isfinite(result.grid("post_block", "kl")).all()
    np.testing.assert_allclose(result.grid("post_block", "logit_diff"), hook_grid, atol=TOLERANCE)
    start, *cells, summary = steering.stream_patch(**study)
    assert start["cells"] == len(cells) == hook_grid.size
    grid = np.full(hook_grid.shape, np.nan)
    for cell in cells:
        grid[cell["row"], cell["column"]] = cell["value"]
    np.testing.assert_allclose(grid, result.grid("post_block"), atol=1e-3)
    np.testing.assert_allclose(np.array(summary["grids"]["post_block"]), grid, atol=1e-6)


INVALID = {
    "a misspelt field": ({"positon": "all"}, 400, "positon"),
    "a prompt of numbers": ({"clean": [1, "a"]}, 400, "clean"),
    "a token that the model lacks": ({"answer": [4096]}, 400, "answer[0]"),
    "a text that the prompt lacks": ({"positions": [{"span": "horse"}]}, 400, "positions[0].span"),
    "a layer that the model lacks": ({"layers": [0, LAYERS]}, 400, "layers[1]"),
    "a point that is off": ({"points": ["attn_out"]}, 400, "points[0]"),
    "a metric that does not exist": ({"metric": "loss"}, 400, "metric"),
    "a flag that is a text": ({"control": "no"}, 400, "control"),
    "equal prompts": ({"corrupt": "the cat sat", "metric": "recovered"}, 400, "metric"),
    "a prompt that is too long": ({"clean": "a" * 300, "corrupt": "b" * 300}, 400, "clean"),
    "another model": ({"model": "other"}, 400, "model"),
    "too many cells": (
        {"pairs": [["the cat sat", "the dog sat", "a", "c"]] * 2000} | dict.fromkeys(PROMPTS),
        413,
        "study",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_study_is_refused(client: httpx.Client, case: str) -> None:
    """Catches a study that is run although a field is wrong, and an error without its field."""
    changes, status, field = INVALID[case]
    response = client.post("/v1/steering/patch", json={**PROMPTS, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (status, field), response.text


def test_the_study_ends_when_its_client_leaves(url: str, client: httpx.Client) -> None:
    """Catches cells that are computed for a client that has gone."""
    slow = {**PROMPTS, "pairs": [["the cat sat " * 4, "the dog sat " * 4, "a", "c"]] * 40} | dict.fromkeys(PROMPTS)
    with Client(url) as leaving:
        events = leaving.stream_patch(**slow)
        start = next(events)
        next(events)
        events.close()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/steering/patch", json={"pairs": slow["pairs"]}, timeout=1.5)
    for _ in range(200):
        metrics = client.get("/metrics").text
        if 'studies_total{model_name="tiny",outcome="cancelled"} 2' in metrics and _running(metrics) == 0:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the requests of the studies still run")
    cells = sum(
        float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("vllm_steer:study_cells_total")
    )
    assert cells < start["cells"]


def _running(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.split()[-1]) for line in lines)


SWEEP = {"prompt": "the dog sat", "clean_prompt": "the cat sat", "answer_token": 64, "foil_token": 66}


def test_the_alias(client: httpx.Client) -> None:
    """Catches an answer of another shape than the alias has, and a field that is ignored."""
    response = client.post("/v1/patch_sweep", json={**SWEEP, "hooks": ["pre_attn", "post_block"], "layers": [0, 2]})
    answer = response.json()
    assert response.status_code == 200, answer
    assert set(answer) == {
        "layers", "positions", "hook", "metric", "grid", "clean", "corrupt", "argmax", "skipped", "alignment",
        "noise_floor", "hook_grids", "failed",
    }  # fmt: skip
    assert (answer["layers"], answer["positions"], answer["hook"]) == ([0, 2], list(range(11)), "pre_attn")
    assert np.array(answer["grid"]).shape == (2, 11) and answer["grid"] == answer["hook_grids"]["pre_attn"]
    streamed = client.post("/v1/patch_sweep", json={**SWEEP, "layers": [0], "positions": [4, 5], "stream": True})
    names = [line.removeprefix("event: ") for line in streamed.text.splitlines() if line.startswith("event: ")]
    assert names == ["start", "cell", "cell", "summary"], streamed.text
    for change, field in (
        ({"source_run": "run-1"}, "source_run"),
        ({"clean_baseline": False}, "clean_baseline"),
        ({"clean_prompt": [-1]}, "clean_prompt[0]"),
        ({"hook": "nowhere"}, "hook[0]"),
        ({"source_position": 3}, "source_position"),
    ):
        response = client.post("/v1/patch_sweep", json={**SWEEP, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_the_command(url: str, tmp_path: Path, hook_grid: np.ndarray) -> None:
    """Catches a command that loses a field of its file, and an error without the path of the field."""
    from typer.testing import CliRunner

    from vllm_steer.cli.main import app

    study, plot, out = tmp_path / "study.yaml", tmp_path / "grid.png", tmp_path / "study.safetensors"
    study.write_text("clean: the cat sat\ncorrupt: the dog sat\nanswer: ab\nfoil: c\n")
    run = CliRunner().invoke(app, ["patch", str(study), "--url", url, "--plot", str(plot), "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert plot.read_bytes().startswith(b"\x89PNG") and "0 failed" in run.output
    np.testing.assert_allclose(PatchingResult.load(out).grid("post_block"), hook_grid, atol=TOLERANCE)
    for text, message in (
        ("clean: a\ncorrupt: b\nanswer: c\npositions: [{span: x}]\nmetric: logprob", "positions[0].span"),
        ("clean: a\nanswer: [", "cannot be parsed as YAML"),
        ("- 1", "must contain an object"),
    ):
        study.write_text(text)
        run = CliRunner().invoke(app, ["patch", str(study), "--url", url])
        assert run.exit_code == 1 and message in run.output and str(study) in run.output, run.output


def test_a_study_with_an_asynchronous_client(url: str, hook_grid: np.ndarray) -> None:
    """Catches a study that works with one of the clients only."""

    async def run() -> tuple[PatchingResult, PatchingResult]:
        async with AsyncClient(url) as client:
            study = await asyncio.to_thread(lambda: PatchingStudy(client, **PROMPTS))
            one = await asyncio.to_thread(lambda: study.sweep(positions=[4], progress=False))
            return one, await client.patch(**PROMPTS, positions=[4])

    for result in asyncio.run(run()):
        np.testing.assert_allclose(result.grid("post_block")[:, 0], hook_grid[:, 4], atol=TOLERANCE)
