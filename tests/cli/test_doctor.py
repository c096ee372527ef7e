# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer doctor`` on models of which only the configuration exists."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, ValidationError
from transformers import BloomConfig, CohereConfig, DeepseekV32Config, FalconConfig, LlamaConfig, PretrainedConfig
from typer.testing import CliRunner

from tests.engine.conftest import close
from tests.models.test_sae import write as write_sae
from tests.tiny import HIDDEN, LAYERS, make_llm, save_tiny_llama
from tests.warm import RUN_MODULE, run_warm
from vllm_steer import SteeringConfig
from vllm_steer.cli import doctor as command
from vllm_steer.cli.doctor import print_report
from vllm_steer.cli.main import app
from vllm_steer.compat.version import CONFLICTS, OVERRIDE, VersionCheck
from vllm_steer.engine.report import CapabilityReport, make_report
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.models import dry_run, proofs
from vllm_steer.models.proofs import Proof, proofs_of
from vllm_steer.models.recipes import PROVEN, RECIPES
from vllm_steer.points import OPTIONAL_POINTS
from vllm_steer.registry.directions import save_module

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
start_module_cold = command._start_module


@pytest.fixture(autouse=True, scope="module")
def warm_children() -> Iterator[None]:
    """Let the command's children start with vLLM imported, except the reference, which must not import it."""

    def start_module(module: str, *arguments: str, stdin: str = "") -> Any:
        if not module.endswith((".dry_run", ".engine")):
            return start_module_cold(module, *arguments, stdin=stdin)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        return run_warm(RUN_MODULE, module, *arguments, environment=environment, folder=Path.cwd(), stdin=stdin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_start_module", start_module)
        yield


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)


def reported(*words: str) -> CapabilityReport:
    return CapabilityReport.model_validate_json(invoke(*words, "--json").stdout)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> CapabilityReport:
    """Return the report on a model with parallel blocks, whose configuration file has another name."""
    folder = tmp_path_factory.mktemp("cohere")
    CohereConfig(**SMALL, architectures=["CohereForCausalLM"]).save_pretrained(folder)
    return reported(str((folder / "config.json").rename(folder / "other.json")))


@pytest.fixture
def known(report: CapabilityReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the command return ``report`` without examining the model again."""
    monkeypatch.setattr(command, "examine", lambda model, settings, engine: report)


def test_reports_points_from_the_configuration(report: CapabilityReport) -> None:
    """Catches a point reported as editable whose edits are refused, and support for one configuration file only."""
    assert (report.architecture, report.num_layers, report.hidden_size) == ("CohereForCausalLM", LAYERS, HIDDEN)
    points = {point.name: point for point in report.points}
    assert [points[name].edits for name in ("pre_attn", "post_attn", "post_block")] == [True, False, True]
    assert set(points["post_attn"].refused) == set(range(LAYERS))
    assert [points[name].on for name in OPTIONAL_POINTS] == [False] * 3
    assert [bool(points[name].refused) for name in ("attn_out", "mlp_in", "mlp_out")] == [False, True, False]
    assert "CohereDecoderLayer" in points["post_attn"].refused[0]
    (recipe,) = report.recipes
    assert (recipe.layer_class.rpartition(".")[2], recipe.post_attn_in_front_of) == ("CohereDecoderLayer", None)
    assert [conflict.setting for conflict in report.conflicts] == [conflict.setting for conflict in CONFLICTS]
    assert not any(conflict.present for conflict in report.conflicts)


@pytest.mark.parametrize(
    ("config", "width", "problem"),
    [
        ({}, HIDDEN, None),
        ({}, HIDDEN + 1, f"has width {HIDDEN + 1}, but this model's hidden size is {HIDDEN}"),
        ({"normalize_activations": "layer_norm"}, HIDDEN, "normalize_activations 'layer_norm' is not supported"),
    ],
)
def test_refuses_autoencoders_like_the_engine(
    config: dict[str, str], width: int, problem: str | None, tmp_path: Path
) -> None:
    """Catches an autoencoder of another width or kind that doctor accepts and the engine refuses."""
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    tensors = {"W_enc": np.ones((width, 8), "f4"), "b_enc": np.ones(8, "f4"), "b_dec": np.ones(width, "f4")}
    folder = write_sae(tmp_path / "sae", "sae_weights.safetensors", tensors, config)
    report = reported(str(tmp_path), "--sae", f"topics={folder}")
    assert (report.problem is None) == (problem is None)
    assert problem is None or problem in str(report.problem)
    assert report.table_bytes.get("sae:topics") == (None if problem else 4 * (8 * width + 4 * 8 + width))


@pytest.mark.parametrize(
    ("config", "architecture"), [(BloomConfig(), "BloomForCausalLM"), (FalconConfig(alibi=True), "FalconForCausalLM")]
)
def test_examines_models_with_alibi(config: PretrainedConfig, architecture: str, tmp_path: Path) -> None:
    """Catches a model that vLLM cannot build without data, because it reads the slopes of ALiBi as numbers."""
    config.update({"architectures": [architecture], "num_hidden_layers": LAYERS})
    config.save_pretrained(tmp_path)
    report = reported(str(tmp_path))
    assert (report.problem, report.num_layers) == (None, LAYERS)


@pytest.mark.usefixtures("known")
def test_prints_refusals_and_conflicting_settings() -> None:
    """Catches text output that lacks parts of the JSON output."""
    result = invoke("demo/model")
    assert result.exit_code == 0
    assert f"post_attn cannot be edited on {LAYERS} layers: attention and MLP of CohereDecoderLayer" in result.stdout
    assert "proof: " in result.stdout
    assert "attn_out is off; enable it with --steering-points attn_out" in result.stdout
    assert "with --steering-points mlp_in" not in result.stdout
    assert (
        f"mlp_in cannot be edited on {LAYERS} layers: the MLP of CohereDecoderLayer runs in parallel" in result.stdout
    )
    for conflict in CONFLICTS:
        assert conflict.setting in result.stdout


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("check", "allowed", "status"),
    [
        (VersionCheck("0.99.0", "0.32.0", 9, ("Scheduler.schedule in scheduler.py",)), "0", 1),
        (VersionCheck("0.99.0", "0.32.0", 9, ("Scheduler.schedule in scheduler.py",)), "1", 0),
        (VersionCheck("0.99.0", "0.32.0", 9), "0", 0),
    ],
)
def test_fails_for_a_vllm_that_the_engine_refuses(
    check: VersionCheck, allowed: str, status: int, report: CapabilityReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches commands that succeed in a script although no engine starts."""
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    monkeypatch.setattr("vllm_steer.compat.version.compare_installed", lambda version: check)
    monkeypatch.setenv(OVERRIDE, allowed)
    monkeypatch.setattr(command, "examine", lambda *_: report.model_copy(update={"vllm": "0.99.0"}))
    results = invoke("demo/model"), CliRunner().invoke(app, ["version"])
    assert [result.exit_code for result in results] == [status] * 2
    assert all(("Install a supported version" in result.stderr) == bool(status) for result in results)


def test_fails_for_a_conflicting_setting(report: CapabilityReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exit status of 0 for settings with which the engine does not start."""
    first = report.conflicts[0].model_copy(update={"present": True})
    changed = report.model_copy(update={"conflicts": [first, *report.conflicts[1:]]})
    monkeypatch.setattr(command, "examine", lambda *_: changed)
    assert invoke("demo/model").exit_code == 1


@pytest.mark.usefixtures("known")
def test_shows_the_lengths_of_the_stream_of_a_module(tmp_path: Path) -> None:
    """Catches lengths of another layer, the strength of another vector, and a file without lengths."""
    told, untold = str(tmp_path / "told.safetensors"), str(tmp_path / "untold.safetensors")
    vectors = {"base": {"post_block": {"2": [2.0] + [0.0] * (HIDDEN - 1)}}}
    save_module(told, vectors, "", {"stream": '{"2": 48.5}'})
    save_module(untold, vectors, "", {})
    said = invoke("demo/model", "--module", told, "--module", untold).stdout
    assert re.search(r"post_block +2 +48.5 +24.25", said) and "untold.safetensors: has no length of the stream" in said
    found = json.loads(invoke("demo/model", "--module", told, "--json").stdout)["streams"]
    assert found == {told: [{"point": "post_block", "layer": 2, "length": 48.5, "strength": 24.25}]}
    done = invoke("demo/model", "--module", "none.safetensors")
    assert done.exit_code == 2 and "none.safetensors cannot be read" in done.stderr


def test_fails_for_an_unproven_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model that doctor accepts and the engine refuses."""
    # Doctor looks at the model in a process of its own, a new Python here.
    monkeypatch.setattr(command, "_start_module", start_module_cold)
    nothing_proven = "from vllm_steer.models import digests\ndigests.proven_digests = dict\n"
    (tmp_path / "sitecustomize.py").write_text(nothing_proven)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    result = invoke(str(tmp_path))
    assert result.exit_code == 1
    assert "cannot be steered: LlamaForCausalLM cannot be steered" in result.stdout
    assert "LlamaDecoderLayer are not proven in any version" in result.stdout


def test_distinguishes_an_unsuitable_machine_from_an_unsupported_model(tmp_path: Path) -> None:
    """Catches a model with proofs reported as one that cannot be steered, because vLLM has no CPU kernels for it."""
    settings = {**SMALL, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}
    DeepseekV32Config(**settings).save_pretrained(tmp_path)
    result = invoke(str(tmp_path))
    assert result.exit_code == 1
    assert "cannot be steered" not in result.stdout
    assert "cannot be examined on this machine, since vLLM refuses it: Sparse Attention" in result.stdout
    assert "run doctor where the model is to be served" in result.stdout
    assert "proof: identities inside vLLM on DeepseekV32ForCausalLM (rows within " in result.stdout


def test_reports_no_values_of_vllms_configuration() -> None:
    """Catches pydantic's own text, with a part of the configuration, in the reason."""

    class Config(BaseModel):
        block: int

    with pytest.raises(ValidationError) as caught:
        Config(block="secret")  # type: ignore[arg-type]
    reason = dry_run._reason(caught.value)
    assert reason.startswith("Input should be a valid integer")
    assert "secret" not in reason
    assert "pydantic" not in reason


@pytest.mark.parametrize("words", [("none/here",), ("demo/model", "--max-rows", "0")])
def test_reports_wrong_arguments(words: tuple[str, ...]) -> None:
    """Catches a traceback, or a download attempt, for a wrong argument."""
    result = invoke(*words)
    assert result.exit_code == 2
    assert words[0] in result.stderr or "max_rows" in result.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"architectures": [', "cannot be parsed as JSON: Expecting value"),
        ("", "cannot be parsed as JSON: Expecting value"),
        (b"\x8f", "cannot be parsed as JSON: 'utf-8' codec"),
        ("[1]", "must contain a JSON object"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures: must be a list of names"),
    ],
)
def test_reports_a_damaged_configuration(text: str | bytes, problem: str, tmp_path: Path) -> None:
    """Catches a damaged download that is reported as a model for which this machine lacks a GPU."""
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = invoke(str(tmp_path))
    assert result.exit_code == 2
    assert f"{tmp_path}/config.json: {problem}" in result.stderr


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sae", "topics"), "must be NAME=FOLDER, not 'topics'"),
        (("--sae", "topics="), "must be NAME=FOLDER, not 'topics='"),
        (("--sae", "topics=a", "--sae", "topics=b"), "the name 'topics' is given twice"),
        (("--max-num-seqs", "0"), "must be at least 1, not 0"),
        (("--max-num-batched-tokens", "0"), "must be at least 1, not 0"),
    ],
)
def test_refuses_arguments_like_the_server(words: tuple[str, ...], problem: str) -> None:
    """Catches an autoencoder in the present folder, one that is ignored, and limits reported as a model's problem."""
    result = invoke("demo/model", *words)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_examines_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a child process that imports packages of the present folder, such as a checkout of vLLM."""
    for name in ("vllm", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('of the present folder')")
    monkeypatch.chdir(tmp_path)
    done = command._start_module("vllm_steer.models.sae_files")  # imports numpy
    assert done.returncode == 0, done.stderr


def test_has_an_option_for_each_memory_limit() -> None:
    """Catches a memory limit without an option; the other limits are timeouts and graph sets."""
    text = invoke("--help").stdout
    of_memory = set(ENGINE_LIMITS) - {"graph_sets", "queue_timeout"}
    assert all(f"--{name.replace('_', '-')}" in text for name in of_memory)


def test_table_sizes_match_an_engine(tmp_path: Path) -> None:
    """Catches a memory formula that differs from the tables of a real engine."""
    save_tiny_llama(tmp_path)
    limits = {"max_rows": 50, "max_vectors": 60, "max_instructions": 70, "max_segments": 8, "capture_rows": 90}
    words = [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    report = reported(str(tmp_path), *words, "--max-num-seqs", "128", "--points", "attn_out")
    llm = make_llm(tmp_path, steering_config={**limits, "points": ["attn_out"]}, dtype="auto")
    (facts,) = llm.collective_rpc("steering_capabilities")
    close(llm)
    # The batch of a dry run is the default one of vLLM's LLM class, or of its engine arguments.
    of_batch = ("token_row", "token_base", "token_offset", "record", "replayed")
    assert {k: v for k, v in report.table_bytes.items() if k not in of_batch} == {
        k: v for k, v in facts["tables"].items() if k not in of_batch
    }
    assert report.limits["max_rows"] == 50


def test_prefers_proofs_of_the_same_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches another model's proof shown for a model with its own, and a missing proof of its layer class."""
    rows = tuple(Proof(name, ("LlamaDecoderLayer",), "0.33.0", "HF Transformers", 1e-6, 2e-6) for name in ("A", "B"))
    monkeypatch.setattr(proofs, "all_proofs", lambda: rows)
    names = ["vllm.model_executor.models.llama.LlamaDecoderLayer"]
    assert [proof.architecture for proof in proofs_of("B", names)] == ["B"]
    assert [proof.architecture for proof in proofs_of("C", names)] == ["A", "B"]
    assert proofs_of("C", ["x.OtherLayer"]) == []
    facts = {"vllm": "0.32.0", "architecture": "B", "recipes": [
        {"layer": names[0], "stream": "pair", "mid": "norm", "layers": [0]}]}  # fmt: skip
    (proof,) = make_report(facts, SteeringConfig()).proofs
    assert (proof.vllm, proof.kind, proof.value_error, proof.cause_error) == ("0.33.0", "HF Transformers", 1e-6, 2e-6)


@pytest.mark.usefixtures("known")
def test_prints_the_kind_of_proof(report: CapabilityReport) -> None:
    """Catches proof records that are missing from the package or not read."""
    (proof,) = report.proofs
    assert (proof.architecture, proof.kind, proof.dtype) == ("CohereForCausalLM", "HF Transformers", "float32")
    assert 0 < (proof.value_error or 0) < 1e-4
    assert 0 < (proof.cause_error or 0) < 1e-4
    assert "proof: HF Transformers on CohereForCausalLM (rows within " in (shown := invoke("demo/model").stdout)
    assert ", float32, vLLM 0.32.0)" in shown


def test_prints_no_proof_for_an_unknown_layer_class(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches another class's proof shown for an unproven class."""
    facts = {"vllm": "0.32.0", "architecture": "NewForCausalLM", "recipes": [
        {"layer": "vllm.model_executor.models.new.NewDecoderLayer", "stream": "pair", "mid": "norm", "layers": [0]}
    ]}  # fmt: skip
    print_report(make_report(facts, SteeringConfig()))
    assert "\nproof: none recorded\n" in capsys.readouterr().out


def test_every_proven_layer_class_has_a_proof() -> None:
    """Catches a class listed as proven that has no proof record."""
    rows = {layer for row in proofs.all_proofs() for layer in row.layers}
    short = {name.rpartition(".")[2]: name for name in PROVEN}
    inherited = {name.rpartition(".")[2] for name, recipe in RECIPES.items() if recipe.inherits}
    assert sorted(set(short) - rows - inherited) == []


@pytest.mark.slow
def test_prove_compares_a_shrunk_model(tmp_path: Path) -> None:
    """Catches a proof that compares nothing, or that fails on a correct model."""
    LlamaConfig(architectures=["LlamaForCausalLM"], num_key_value_heads=8).save_pretrained(tmp_path)
    result = invoke(str(tmp_path), "--prove", "--json")
    proof = json.loads(result.stdout)["proof_now"]
    assert result.exit_code == 0
    assert (proof["kind"], proof["hops"], proof["conclusive"], proof["agrees"]) == ("HF Transformers", 8, 8, True)
    assert 0 < proof["value_error"] < 1e-4
    assert 0 < proof["cause_error"] < 1e-4


@pytest.mark.usefixtures("known")
def test_a_failed_proof_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches exit status 0 after a failed proof."""
    wrong = {"kind": "HF Transformers", "hops": 4, "conclusive": 4, "value_error": 1.0, "cause_error": 1.0}
    monkeypatch.setattr(command, "prove", lambda model, trust: {**wrong, "agrees": False})
    result = invoke("demo/model", "--prove")
    assert result.exit_code == 1
    assert "DOES NOT AGREE" in result.stdout


@pytest.mark.usefixtures("known")
def test_errors_that_are_not_numbers_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches NaN in the JSON object, which parsers of JSON refuse."""
    wrong = {"kind": "HF Transformers", "hops": 4, "conclusive": 4, "value_error": float("nan"), "cause_error": 1.0}
    monkeypatch.setattr(command, "prove", lambda model, trust: {**wrong, "agrees": False})
    result = invoke("demo/model", "--prove", "--json")
    assert result.exit_code == 1
    assert msgspec.json.decode(result.stdout)["proof_now"]["value_error"] is None
