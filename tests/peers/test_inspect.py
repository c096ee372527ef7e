# SPDX-License-Identifier: Apache-2.0
"""The provider, solvers and scorers for Inspect AI: the real inspect_ai on a real server."""

from __future__ import annotations

import copy
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("inspect_ai")

from inspect_ai import Task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

from examples.peers import inspect_tasks
from tests.docs.runner import blocks_of
from tests.peers.conftest import hidden_states, steered_states
from tests.server.server import MODEL
from vllm_steer import Client, SteeringError
from vllm_steer.peers.inspect import LinearProbe, ask_oracle, probe_scorer, read_activations, steer
from vllm_steer.peers.inspect.fields import prepare
from vllm_steer.peers.vllm_lens import SteeringVector, VLLMLensClient

pytestmark = pytest.mark.slow
LAYER = 1
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
WEIGHT = torch.randn(64, generator=torch.Generator().manual_seed(5))
ROW = torch.randn(64, generator=torch.Generator().manual_seed(6))
QUESTION = "Is this positive?"
PLACEHOLDER = ord("#") - ord("!")
"""Token of "#": the tokenizer's vocabulary is the alphabet of bytes, which begins with "!"."""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect Inspect's files to the test's folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    # Inspect's vLLM provider changes these for the whole process when it starts a server; without its logging
    # configuration, vLLM writes no audit records.
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "False")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "probe.safetensors"
    save_file({"weight": WEIGHT, "bias": torch.tensor(0.5)}, path)
    return path


def model(url: str, **arguments: Any) -> Any:
    return get_model(f"vllm-steer/{MODEL}", base_url=url, memoize=False, **arguments)


def run(task: Task, url: str, folder: Path) -> Any:
    """Run a task and return its log as read from the file."""
    (log,) = run_eval(task, model=model(url), log_dir=str(folder / "logs"), log_format="json", log_model_api=True)
    assert log.status == "success", log.error
    return read_eval_log(log.location)


def _written(folder: Path, code: str) -> Path:
    """Write a script and return its path."""
    script = folder / "page.py"
    script.write_text(code)
    return script


def states_of(hf: Any, metadata: dict[str, Any]) -> list[torch.Tensor]:
    """Return HF's hidden states of the tokens that were forwarded."""
    return hidden_states(hf, [*metadata["prompt_token_ids"], *metadata["token_ids"]][:-1])


async def test_activations_in_this_process(url: str, hf: Any, tmp_path: Path) -> None:
    """Catches rows of another layer or token, and rows that reach the logged call."""
    extra = {"output_residual_stream": [2, 0]}
    config = GenerateConfig(max_tokens=3, temperature=0, extra_body={"extra_args": extra})
    output = await model(url, activations_dir=str(tmp_path)).generate(
        "a prompt that needs a capture file", config=config
    )
    stream = output.metadata["activations"]["residual_stream"]
    states = states_of(hf, output.metadata)
    torch.testing.assert_close(stream, torch.stack([states[1], states[3]]), **TOLERANCE, check_device=False)
    assert type(stream[0].mean(0)) is torch.Tensor
    assert stream.reference["layers"] == [0, 2]
    logged = json.loads(output.model_dump_json())["metadata"]["activations"]["residual_stream"]
    assert logged["path"].startswith(str(tmp_path))
    assert logged["shape"] == list(stream.shape)
    again = read_activations({"activations": {"residual_stream": logged}})["residual_stream"]
    assert torch.equal(again, stream)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(SteeringError, match="digest differs"):
        read_activations({"activations": {"residual_stream": logged}})


def test_the_probe_scores_a_dataset(
    url: str, hf: Any, probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows of the prompt in the mean, another layer, swapped labels, rows in the log, and a page that fails."""
    log = run(inspect_tasks.probed(str(probe), LAYER), url, tmp_path)
    values: dict[str, list[float]] = {"0": [], "1": []}
    for sample in log.samples:
        metadata = sample.output.metadata
        rows = states_of(hf, metadata)[LAYER + 1][len(metadata["prompt_token_ids"]) :]
        assert len(rows) == 3
        expected = float(rows.mean(0) @ WEIGHT) + 0.5
        assert sample.scores["probe_scorer"].value == pytest.approx(expected, rel=1e-3, abs=1e-2)
        values[sample.target].append(expected)
        reference = metadata["activations"]["residual_stream"]
        assert reference["shape"] == [1, len(metadata["prompt_token_ids"]) + 3, 64]
        stored = read_activations(sample.output, log)["residual_stream"]
        torch.testing.assert_close(stored[0], states_of(hf, metadata)[LAYER + 1], **TOLERANCE, check_device=False)
    wins = sum(high > low for high in values["1"] for low in values["0"])
    assert log.results.scores[0].metrics["auroc"].value == wins / 4
    text = Path(log.location.removeprefix("file://")).read_text()
    assert '"data":' not in text
    assert "capture_results" not in text
    monkeypatch.chdir(tmp_path)
    _, reading = blocks_of("docs/peers/inspect.md", "python")
    page = runpy.run_path(str(_written(tmp_path, reading.code)))
    assert page["stream"].shape == tuple(read_activations(log.samples[0].output, log)["residual_stream"].shape)


def test_a_solver_steers(url: str, hf: Any, tmp_path: Path) -> None:
    """Catches steering that is lost, that removes the task's capture, or whose vectors are logged."""
    vector = SteeringVector(activations=ROW[None], layer_indices=[LAYER], scale=4.0)
    samples = [Sample(input="one", target="x"), Sample(input="two words", target="x")]
    log = run(
        Task(samples, solver=steer(vectors=vector), config=inspect_tasks.config(LAYER), scorer=includes()),
        url,
        tmp_path,
    )
    for sample in log.samples:
        metadata = sample.output.metadata
        tokens = [*metadata["prompt_token_ids"], *metadata["token_ids"]][:-1]
        states = steered_states(hf, tokens, LAYER, dict.fromkeys(range(len(tokens)), 4.0 * ROW), norm_match=False)
        found = read_activations(sample.output, log)["residual_stream"]
        torch.testing.assert_close(found[0], states[LAYER + 1], **TOLERANCE, check_device=False)
        assert metadata["steering_applied"]
        with VLLMLensClient(url, model=MODEL) as client:
            messages = [{"role": "user", "content": sample.input}]
            answer = client.chat(messages, 4, steering_vectors=vector)
        assert sample.output.completion == answer.text
    text = Path(log.location.removeprefix("file://")).read_text()
    encoded = vector.model_dump()["activations"]["data"]
    assert encoded[:40] not in text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_an_oracle_is_asked(system: str | None, url: str, tmp_path: Path) -> None:
    """Catches a question without its rows, with other rows, at another position, or to another adapter."""
    task = inspect_tasks.asked("oracle", LAYER, "#")
    task.config.system_message = system
    log = run(task, url, tmp_path)
    for sample in log.samples:
        answered, asked = (event for event in sample.events if event.event == "model")
        stream = read_activations(answered.output, log)["residual_stream"]
        rows = stream[0, len(answered.output.metadata["prompt_token_ids"]) :]
        assert len(rows) == 3
        vector = SteeringVector(
            activations=rows.float().mean(0, keepdim=True)[None],
            layer_indices=[1],
            norm_match=True,
            position_indices=[asked.output.metadata["prompt_token_ids"].index(PLACEHOLDER)],
        )
        expected = prepare({"extra_args": {"apply_steering_vectors": [vector]}, "return_token_ids": True})
        request = asked.call.request
        assert (request["model"], request["extra_body"]) == ("oracle", expected.logged)
        with VLLMLensClient(url, model=MODEL) as client:
            messages = [{"role": "user", "content": f"#\n{QUESTION}"}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            answer = client.chat(messages, 4, steering_vectors=vector, lora_request={"lora_name": "oracle"})
        assert sample.metadata["oracle"] == sample.output.completion == answer.text
        # Digests of the compiled edits: their vectors, layers and positions.
        applied = asked.output.metadata["steering_applied"]["request"]
        assert applied
        assert applied == answer.document["steering_applied"]["request"]


def test_readouts_and_modules(url: str, probe: Path, tmp_path: Path) -> None:
    """Catches readouts that are dropped, and modules that are not applied."""
    with Client(url) as client:
        client.register("tilt", base={"post_block": {LAYER: (4.0 * ROW).tolist()}})
    body = {"readouts": {"tone": {"probe": WEIGHT.tolist(), "point": "post_block", "layer": LAYER}}}
    config = GenerateConfig(max_tokens=4, temperature=0, extra_body=body)
    scores = []
    for solver in (generate(), steer(modules={"tilt": 0.5}), steer(modules="tilt")):
        task = Task(
            [Sample(input="one", target="1")], solver=solver, config=config, scorer=probe_scorer(readout="tone")
        )
        log = run(task, url, tmp_path)
        metadata = log.samples[0].output.metadata
        assert metadata["readouts"]["tone"]["values"]["path"]
        assert metadata["hook_results"] == metadata["readouts"]
        scores.append(log.samples[0].scores["probe_scorer"].value)
    assert len(set(scores)) == 3
    capture = run(inspect_tasks.probed(str(probe), LAYER), url, tmp_path)
    first = next(sample for sample in capture.samples if sample.input == inspect_tasks.SAMPLES[0].input)
    assert first.scores["probe_scorer"].value not in scores


async def test_samples_and_streams(url: str) -> None:
    """Catches one sample's rows for another, and streams, which lose the rows."""
    seen: list[Any] = []
    extra = {"capture": {"memory": {"hooks": {"post_attn": [2]}, "positions": "last_prompt"}}}
    config = GenerateConfig(max_tokens=8, num_choices=2, temperature=2.0, extra_body={"extra_args": extra})
    output = await model(url).generate("one", config=config, on_stream=seen.append)
    first, second = output.metadata["choices"]
    assert first["token_ids"] != second["token_ids"]
    assert first["activations"]["post_attn.2"].shape == (1, 64)
    assert first["activations"]["post_attn.2"].reference["path"] is None
    plain = await model(url).generate("one", config=GenerateConfig(max_tokens=2))
    assert plain.metadata is None


async def test_no_answer_comes_from_the_cache(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a cached answer of other global steering or an older module, and one that refers to rows elsewhere."""
    body = {"extra_args": {"output_residual_stream": [LAYER]}}
    config = GenerateConfig(max_tokens=3, temperature=0, extra_body=body)
    found = []
    with Client(url) as client:
        for i, rows in enumerate((ROW, WEIGHT)):
            client.register("cached", base={"post_block": {LAYER: (4.0 * rows).tolist()}})
            steered = config.model_copy(update={"extra_body": {**body, "steering_modules": ["cached"]}})
            for each in (config, steered):
                folder = tmp_path / f"{i}-{len(found)}"
                output = await model(url, activations_dir=str(folder)).generate("one", config=each, cache=True)
                found.append(output.metadata["activations"]["residual_stream"])
                assert Path(found[-1].reference["path"]).is_relative_to(folder)
                assert copy.deepcopy(output).completion == output.completion
            client.set(base={"post_block": {LAYER: ROW.tolist()}})
        client.clear()
    assert len({tuple(each.flatten().tolist()) for each in found}) == 4
    assert "not cached" in caplog.text


@pytest.mark.parametrize(
    ("extra_body", "field"),
    [
        ({"extra_args": {"apply_hooks": ["gASV"]}}, "extra_args.apply_hooks"),
        ({"extra_args": {"output_residual_stream": 3}}, "extra_args.output_residual_stream"),
        ({"extra_args": {"steering_name": "x"}}, "extra_body.steering_name"),
        ({"output_residual_stream": [1]}, "extra_body.output_residual_stream"),
        ({"extra_args": {"steering": []}, "steering": []}, "extra_args.steering"),
        ({"extra_args": {"a": 1}, "vllm_xargs": {"a": 1}}, "vllm_xargs.a"),
        ({"extra_args": 1}, "extra_body.extra_args"),
        ({"lora_request": {"lora_path": "/x"}}, "lora_request"),
    ],
)
async def test_refusals_name_the_key(extra_body: dict[str, Any], field: str) -> None:
    """Catches keys that are ignored."""
    with pytest.raises(SteeringError) as caught:
        await model("http://127.0.0.1:9").generate("one", config=GenerateConfig(extra_body=extra_body))
    assert caught.value.field == field


def test_bad_arguments() -> None:
    """Catches solvers and scorers without effect."""
    for call in (
        steer,
        probe_scorer,
        lambda: probe_scorer(WEIGHT, readout="tone"),
        lambda: ask_oracle("?", source="prompt"),
        lambda: LinearProbe.read(torch.ones(2, 2)),
    ):
        with pytest.raises(SteeringError):
            call()


def test_the_command_line_and_the_alias(url: str, probe: Path, tmp_path: Path) -> None:
    """Catches an entry point that Inspect does not find, and an alias that is on by itself or cannot be switched on."""
    command = [
        sys.executable, "-m", "inspect_ai._cli.main", "eval", "examples/peers/inspect_tasks.py@probed", "-T",
        f"probe={probe}", "--model", f"vllm-steer/{MODEL},vllm-lens/{MODEL}", "--model-base-url", url, "--log-dir",
        str(tmp_path / "logs"), "--limit", "2",
    ]  # fmt: skip
    on = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_STEER_INSPECT_ALIASES": "vllm-lens"},
        check=False,
    )
    assert on.returncode == 0, on.stdout + on.stderr
    logs = [read_eval_log(str(path)) for path in sorted((tmp_path / "logs").glob("*.eval"))]
    assert sorted(log.eval.model for log in logs) == [f"vllm-lens/{MODEL}", f"vllm-steer/{MODEL}"]
    for log in logs:
        assert log.status == "success", log.error
        assert read_activations(log.samples[0].output, log)["residual_stream"].shape[0] == 1
    values = [[sample.scores["probe_scorer"].value for sample in log.samples] for log in logs]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    with pytest.raises(Exception, match="vllm-lens"):
        get_model(f"vllm-lens/{MODEL}", base_url=url, memoize=False)


def test_the_page_configures_requests(tmp_path: Path) -> None:
    """Catches fields in docs/peers/inspect.md that are refused."""
    script = _written(tmp_path, blocks_of("docs/peers/inspect.md", "python")[0].code)
    prepared = prepare(runpy.run_path(str(script))["config"].extra_body)
    assert (sorted(prepared.body), prepared.model) == (["capture", "readouts", "return_token_ids"], "adapter")
    assert prepared.logged["readouts"]["tone"]["probe"]["numbers"] == 256


def test_importing_needs_no_engine() -> None:
    """Catches a provider that imports vLLM, which the machine of an evaluation does not need."""
    code = "import sys, vllm_steer.peers.inspect.api; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


_FAKE_SERVER = """\
#!{python}
import http.server, json, sys
open({log!r}, "w").write(json.dumps(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{{"data": []}}')
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_flags_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches True sent as the text "True", and a server without steering."""
    log, script = tmp_path / "arguments.json", tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(_FAKE_SERVER.format(python=sys.executable, log=str(log)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    api = get_model("vllm-steer/x", memoize=False, host="127.0.0.1", enforce_eager=True, max_model_len=64).api
    try:
        api._resolve_server()
    finally:
        api.close()
    arguments = json.loads(log.read_text())
    assert arguments[:2] == ["serve", "x"]
    assert "--enable-steering" in arguments
    assert arguments[arguments.index("--max-model-len") + 1] == "64"
    assert arguments[arguments.index("--enforce-eager") + 1 :][:1] != ["True"]
