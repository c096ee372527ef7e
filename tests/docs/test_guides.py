# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the guides on modules, capture and the doctor run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.docs.markdown import blocks
from tests.docs.runner import blocks_of, offline_blocks, run_python, run_with_fake_curl
from tests.repo.tree import ROOT, read
from vllm_steer.cli import doctor
from vllm_steer.cli.main import app
from vllm_steer.patching.request import check_fields
from vllm_steer.request import parse_capture
from vllm_steer.request.capture_source import StoredRowsForm
from vllm_steer.server.http.row_sources import take_store_option
from vllm_steer.server.routes.capabilities import ROUTE
from vllm_steer.settings import SWITCHES


@pytest.mark.slow
def test_modules_guide_runs() -> None:
    """Catches an example that no longer runs, a module without effect, and unreported global steering."""
    applied = "steered.steering_applied.global_steering == status.digest, unsteered.steering_applied is None"
    differ = "steered.outputs[0].text != unsteered.outputs[0].text"
    names = "[module.name for module in llm.steering.list().data]"
    shown = run_python(offline_blocks("docs/guides/modules.md"), f"[{applied}, {differ}, {names}]")
    assert shown == [True, True, True, ["calm", "risk", "terse", "warm"]]


CAPTURE = "docs/guides/capture.md"
PATCHING = "docs/guides/patching.md"


@pytest.mark.slow
def test_capture_guide_runs() -> None:
    """Catches an example that no longer runs, a consumer that receives no rows, and requests or rows out of order."""
    streamed = "[len(streamed) > 4, streamed == complete]"
    shown = run_python(
        offline_blocks(CAPTURE),
        f"[rows.status, result.status, [request.tag for request in captures], captures.missing(), {streamed}]",
    )
    assert shown == ["ok", "ok", [None, "The list of", "Return the value of"], [], [True, True]]


@pytest.mark.slow
def test_hooks_guide_runs() -> None:
    """Catches an example that no longer runs, and a hook that is not called or changes nothing."""
    differ = "plain[0].outputs[0].text != sparse[0].outputs[0].text"
    calls = "[seen[0][1:] == (1, list(range(len(plain[0].prompt_token_ids)))), len(seen)]"
    shown = run_python(offline_blocks("docs/guides/hooks.md"), f"[{differ}, {calls}]")
    assert shown == [True, [True, 2 * 2 * 8]]


@pytest.mark.slow
def test_readout_guides_run() -> None:
    """Catches an example that no longer runs, a gate that never opens, a stop or a live strength without effect."""
    lens = "list(looked.readouts['lens'].token_ids.shape), list(chosen.readouts['given'].logprobs.shape)"
    live = "live.live['calm'].tolist() == [float(p < position) for p in live.positions.tolist()] and position > 4"
    gates = "float(trace.gates.max())"
    factors = "inside.outputs[0].steering_trace.gates[:, 0]"
    part = f"float({factors}[0]), float({factors}[-1]), len(scored.outputs[0].readouts['deep'].values)"
    part = f"[{part}]"
    values = "len(output.token_ids) - len(scores.values), output.readouts['topics'].values.shape[1]"
    shown = run_python(
        [block for name in ("readouts", "gates", "live") for block in offline_blocks(f"docs/guides/{name}.md")],
        f"[{gates}, {values}, stopped.finish_reason, stopped.stop_reason[:16], {live}, {lens}, {part}]",
    )
    assert shown == [1.0, 1, 2, "stop", "readout refusal ", True, [3, 2, 3], [3, 6, 2], [1.0, 0.0, 7]]


@pytest.mark.slow
def test_patching_guide_finds_the_circuit() -> None:
    """Catches an example that no longer runs, and grids that contradict the guide's description of the circuit."""
    key, word = "keys.grid('attn_out')[0, [3, 5]].min() > 0.3", "result.grid('attn_out')[1, 9] > 0.9"
    cells = "[[0, 0, 1, 1], [3, 9, 3, 9]]"
    moved = f"result.grid('post_block')[*{cells}].round().tolist()"
    necessary = "noised.grid('attn_out')[1, 9] < 0.1 and noised.grid('attn_out')[1, 8] > 0.9"
    shown = run_python(
        offline_blocks(PATCHING), f"[bool({key}), bool({word}), {moved}, bool({necessary}), result.failed()]"
    )
    assert shown == [True, True, [1.0, 0.0, 0.0, 1.0], True, []]


def test_patching_guide_studies_are_accepted() -> None:
    """Catches a study over HTTP or in a file with a field that is refused."""
    body, capturing, naming = (json.loads(block.code) for block in blocks_of(PATCHING, "json"))
    assert take_store_option(capturing, "memory")[1]
    assert set(naming["steering"][0]["vector"]) == set(StoredRowsForm.__struct_fields__)
    (file,) = (msgspec.yaml.decode(block.code) for block in blocks_of(PATCHING, "yaml"))
    for study in (body, file):
        check_fields(study)
    assert body | {"points": ["post_block"]} == file


def test_capture_guide_bodies_are_accepted(tmp_path: Path) -> None:
    """Catches a body of a request or of a batch line that is not JSON or whose capture is refused."""
    (curl,) = (block for block in blocks_of(CAPTURE, "bash") if block.code.startswith("curl"))
    (line,) = (block.code for block in blocks_of(CAPTURE, "json") if "custom_id" in block.code)
    bodies = [json.loads(run_with_fake_curl(curl, tmp_path)), json.loads(line)["body"]]
    consumers = [dict(parse_capture(body["capture"])).keys() for body in bodies]
    assert consumers == [{"memory"}, {"filesystem"}]


DOCTOR = "docs/guides/doctor.md"


@pytest.mark.slow
def test_doctor_guide_runs() -> None:
    """Catches an example that no longer runs, and an engine that skipped the self-check."""
    assert run_python(blocks_of(DOCTOR, "python"), "facts['self_check']['ran']") is True


def test_doctor_guide_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an unknown flag. tests/cli covers what the commands do."""
    calls: list[Any] = []
    monkeypatch.setattr(doctor, "run", lambda *args, **kwargs: calls.append((args, kwargs)))
    lines = [block.code.strip() for block in blocks(read(DOCTOR)) if block.language == "bash"]
    commands = [line for line in lines if line.startswith(".venv/bin/vllm-steer ")]
    for line in commands:
        result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert len(calls) == len(commands) == 3
    assert [line for line in lines if line not in commands] == [f"curl -s http://localhost:8000{ROUTE}"]


def test_doctor_guide_names_the_switches() -> None:
    """Catches a switch that the guide does not mention."""
    assert all(switch.flag in read(DOCTOR) for switch in SWITCHES)


LAB = "docs/guides/lab.md"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".models/SmolLM2-135M-Instruct").exists(), reason="run `make model`")
def test_lab_guide_runs() -> None:
    """Catches an example that no longer runs, and a vector without effect."""
    made, studied = "sorted(directions)[::13], directions[12].auroc > 0.8", "len(result.choice), len(result.held_out)"
    written = "result.verdict in open('dose.html').read(), str(expression)"
    stored = "found.stored, found.rows == len(dataset), captures[3].tag, seen == 3 * len(dataset)"
    trained = "trained.result.better_than_chance, checked.better_than_chance, len(output.readouts['praise'].values)"
    rolled = "tuple(sampled.rows.shape), len(reward)"
    shown = run_python(offline_blocks(LAB), f"[{made}, {studied}, {written}, {stored}, {trained}, {rolled}]")
    assert shown[:6] == [[6, 19], True, 2, 2 * (2 + 4 + 5), True, "0.2 happy@first:20 + 0.5 ablate happy@after:20"]
    assert shown[6:] == [16, True, "negative", True, True, True, 15, [2 * 2 * 7, 576], 2 * 2 * 7]
