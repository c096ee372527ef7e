# SPDX-License-Identifier: Apache-2.0
"""The flags of `vllm serve`: what they set, and what they refuse."""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
from pathlib import Path

import msgspec
import pytest

from vllm_steer.config import MULTI_CHOICES, SCHEDULER_CLS, SWITCHES, WORKER_CLS, SteeringConfig, Switch
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import CONSUMERS_VARIABLE, REGISTRY_VARIABLE, RegistryOptions
from vllm_steer.limits import ENGINE_LIMITS, MAX_BODY_MIB
from vllm_steer.server.apply_flags import MIDDLEWARE, apply_flags
from vllm_steer.server.flags import add_flags
from vllm_steer.server.settings import capture_store_name, max_body_bytes, store_limits

SIZES = [limit.flag for limit in (*ENGINE_LIMITS.values(), MAX_BODY_MIB)]
OF_CAPTURE = ["--capture-inline-kib", "--capture-store-mib", "--capture-expiry-s"]


@pytest.fixture(autouse=True)
def no_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test puts into the environment is taken out again."""
    for name in (CONSUMERS_VARIABLE, REGISTRY_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def parser_of_a_server(middleware: bool = True) -> argparse.ArgumentParser:
    """The flags of vLLM's own that ours touch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-cls", default="auto")
    parser.add_argument("--scheduler-cls", default=None)
    parser.add_argument("--additional-config", type=json.loads, default={})
    if middleware:
        parser.add_argument("--middleware", action="append", default=[])
    add_flags(parser)
    return parser


def error_of(capsys: pytest.CaptureFixture[str], *words: str, middleware: bool = True) -> str:
    with pytest.raises(SystemExit) as end:
        parser_of_a_server(middleware).parse_args(words)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_enable_steering_sets_what_the_engine_needs() -> None:
    """Catches a flag that is accepted and switches nothing on."""
    args = parser_of_a_server().parse_args(["--enable-steering"])
    assert (args.worker_cls, args.scheduler_cls) == (WORKER_CLS, SCHEDULER_CLS)
    section = args.additional_config["steering"]
    assert {name: section[name] for name in ENGINE_LIMITS} == {n: limit.default for n, limit in ENGINE_LIMITS.items()}
    assert args.middleware == [MIDDLEWARE]


def test_sizes_reach_the_engine() -> None:
    """Catches a size that is dropped, or one that lands under another name."""
    words = [word for n, flag in enumerate(SIZES) for word in (flag, str(n + 7))]
    args = parser_of_a_server().parse_args(["--enable-steering", *words])
    section = args.additional_config["steering"]
    assert [section[name] for name in ENGINE_LIMITS] == [n + 7 for n in range(len(ENGINE_LIMITS))]
    assert max_body_bytes(args) == (len(ENGINE_LIMITS) + 7) << 20


def test_every_setting_has_a_flag() -> None:
    """Catches a setting of the engine that the command line lost."""
    named = (entry.name for entry in (*ENGINE_LIMITS.values(), *SWITCHES, *MULTI_CHOICES))
    assert {*named, "capture_policy"} == set(SteeringConfig.__struct_fields__)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_a_switch_is_turned_by_its_flag_only(switch: Switch) -> None:
    """Catches a flag that does nothing, and a default that is another on the command line."""
    for words, value in (([], switch.default), ([switch.flag], not switch.default)):
        args = parser_of_a_server().parse_args(["--enable-steering", *words])
        assert args.additional_config["steering"][switch.name] is value
        assert getattr(SteeringConfig.parse(None), switch.name) is switch.default


def test_a_switch_without_enable_steering_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is ignored."""
    with pytest.raises(SystemExit):
        parser_of_a_server().parse_args(["--steering-skip-self-check"])
    assert "--steering-skip-self-check" in capsys.readouterr().err


def test_points_on_the_branches_are_named_by_their_flag() -> None:
    """Catches a point that is dropped, one that is there unasked, and settings that differ by their order alone."""
    for words, points in (([], ()), (["--steering-points", "mlp_out,attn_out"], ("attn_out", "mlp_out"))):
        args = parser_of_a_server().parse_args(["--enable-steering", *words])
        section = {name: value for name, value in args.additional_config["steering"].items() if name != "version"}
        assert SteeringConfig.parse(section).points == points


@pytest.mark.parametrize("text", ["", "post_mlp", "attn_out,", "attn_out,attn_out", "pre_attn", "attn_out mlp_in"])
def test_unknown_points_end_the_start(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server without a point that it was told to have; the points on the stream are always there."""
    message = error_of(capsys, "--enable-steering", f"--steering-points={text}")
    assert "must be some of attn_out, mlp_in, mlp_out" in message
    with pytest.raises(
        SteeringError,
        match=r"steering_config\.points: must be a list of distinct names out of attn_out, mlp_in, mlp_out",
    ):
        SteeringConfig.parse({"points": text.split(",")})


def test_points_without_enable_steering_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is ignored."""
    assert "--steering-points" in error_of(capsys, "--steering-points", "attn_out")


def test_a_stock_server_stays_stock() -> None:
    """Catches a plug-in that changes the engine of somebody who did not ask for it."""
    args = parser_of_a_server().parse_args([])
    assert (args.worker_cls, args.scheduler_cls, args.additional_config) == ("auto", None, {})
    assert args.middleware == [MIDDLEWARE]  # which only refuses there


@pytest.mark.parametrize("flag", [*SIZES, *OF_CAPTURE])
def test_a_size_without_enable_steering_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without steering although its command line is about steering."""
    message = error_of(capsys, flag, "8")
    assert flag in message
    assert "--enable-steering" in message


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "٣", " ", "true", "9" * 30, "9" * 5000])
def test_sizes_are_whole_numbers_in_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a size of nothing, and a traceback in place of a sentence."""
    assert "--steering-max-rows" in error_of(capsys, "--enable-steering", f"--steering-max-rows={text}")


@pytest.mark.parametrize("flag", ["--worker-cls", "--scheduler-cls"])
def test_classes_of_others_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a user's own class that is replaced without a word."""
    assert flag in error_of(capsys, "--enable-steering", flag, "some.where.Class")


def test_additional_config_is_kept() -> None:
    """Catches a user's settings for other plug-ins that are lost."""
    args = parser_of_a_server().parse_args(["--enable-steering", "--additional-config", '{"other": 1}'])
    assert args.additional_config["other"] == 1
    assert "steering" in args.additional_config


def test_two_answers_to_one_question_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a section of the additional config that the flags overwrite without a word."""
    words = ["--enable-steering", "--additional-config", '{"steering": {"max_rows": 3}}']
    assert "--additional-config" in error_of(capsys, *words)


def test_the_body_limit_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a limit that is accepted by a command that serves no HTTP and can only ignore it."""
    words = ["--enable-steering", "--steering-max-body-mib", "3"]
    assert "--steering-max-body-mib" in error_of(capsys, *words, middleware=False)


def test_applying_twice_changes_nothing() -> None:
    """Catches spawned API servers, which apply the parent's flags again, refusing or doubling them."""
    args = parser_of_a_server().parse_args(["--enable-steering", "--steering-max-rows", "9"])
    child = pickle.loads(pickle.dumps(args))  # noqa: S301
    apply_flags(child)
    assert vars(child) == vars(args)


def test_flags_are_applied_by_parsing_alone() -> None:
    """Catches multi-port data parallelism, whose processes get the parsed flags before any plug-in runs."""
    parent = argparse.ArgumentParser()
    serve = parent.add_subparsers(dest="command").add_parser("serve")
    add_flags(serve)
    assert parent.parse_args(["serve", "--enable-steering"]).worker_cls == WORKER_CLS


def test_flags_in_python_are_refused_with_our_error() -> None:
    """Catches `AsyncEngineArgs.from_cli_args(Namespace(...))` going past the checks of the parser."""
    with pytest.raises(SteeringError, match="--steering-max-rows"):
        apply_flags(argparse.Namespace(enable_steering=False, steering_max_rows=8, middleware=[]))


def test_limits_of_captures() -> None:
    """Catches a limit that is dropped, or read in another unit than its name says."""
    limits = store_limits(parser_of_a_server().parse_args(["--enable-steering"]))
    assert (limits.inline_bytes, limits.budget_bytes, limits.expiry_seconds) == (1 << 20, 1 << 30, 300)
    words = ["--capture-inline-kib", "0", "--capture-store-mib", "3", "--capture-expiry-s", "9"]
    limits = store_limits(parser_of_a_server().parse_args(["--enable-steering", *words]))
    assert (limits.inline_bytes, limits.budget_bytes, limits.expiry_seconds) == (0, 3 << 20, 9)


def test_consumers_reach_the_processes_that_serve() -> None:
    """Catches a consumer that is accepted and never made, an option that is lost, and one that stays a string."""
    words = ["--capture-consumers", "filesystem:root=/a/b,quota=2MiB,fsync=true", "--capture-consumers", "logging"]
    args = parser_of_a_server().parse_args(["--enable-steering", *words])
    expected = {"filesystem": {"root": "/a/b", "quota": 2 << 20, "fsync": True}, "logging": {}}
    assert json.loads(os.environ[CONSUMERS_VARIABLE]) == expected
    del os.environ[CONSUMERS_VARIABLE]
    apply_flags(pickle.loads(pickle.dumps(args)))  # noqa: S301
    assert json.loads(os.environ[CONSUMERS_VARIABLE]) == expected


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["s3:bucket=x"], "unknown consumer"),
        (["filesystem"], "root"),
        (["filesystem:root=/a,rot=/b"], "rot"),
        (["filesystem:root=/a,root=/b"], "twice"),
        (["filesystem:root"], "key=value"),
        (["filesystem:root=/a,quota=much"], "quota"),
        (["filesystem:root=/a", "filesystem:root=/b"], "twice"),
        (["memory:size=1"], "size"),
        ([""], "unknown consumer"),
    ],
)
def test_wrong_consumers_end_the_start(texts: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without what it was told to capture with."""
    message = error_of(capsys, "--enable-steering", *(f"--capture-consumers={text}" for text in texts))
    assert "--capture-consumers" in message
    assert words in message
    assert CONSUMERS_VARIABLE not in os.environ


def test_consumers_need_steering_and_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches captures that are set up where none can be asked for."""
    words = ["--capture-consumers", "logging"]
    assert "--enable-steering" in error_of(capsys, *words)
    assert "no HTTP" in error_of(capsys, "--enable-steering", *words, middleware=False)


def test_all_processes_of_a_server_have_one_folder() -> None:
    """Catches a handle that only the process which gave it knows, and servers that share a folder."""
    args, other = (parser_of_a_server().parse_args(["--enable-steering"]) for _ in range(2))
    name = capture_store_name(args)
    apply_flags(args)
    assert capture_store_name(pickle.loads(pickle.dumps(args))) == name  # noqa: S301
    assert capture_store_name(other) != name


def test_the_batch_runner_has_consumers_and_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches captures to files being refused where there is no server, and flags that do nothing there."""

    def parser() -> argparse.ArgumentParser:
        made = parser_of_a_server(middleware=False)
        made.add_argument("-o", dest="output_file")
        return made

    parser().parse_args(["--enable-steering", "--capture-consumers", "logging", "--capture-inline-kib", "8"])
    assert json.loads(os.environ[CONSUMERS_VARIABLE]) == {"logging": {}}
    with pytest.raises(SystemExit):
        parser().parse_args(["--enable-steering", "--capture-store-mib", "8"])
    assert "no HTTP" in capsys.readouterr().err


def test_the_capture_policy_reaches_the_engine() -> None:
    """Catches a flag that is read and forgotten."""
    args = parser_of_a_server().parse_args(["--enable-steering", "--steering-capture-policy", "fail"])
    assert args.additional_config["steering"]["capture_policy"] == "fail"


def test_a_server_has_a_folder_for_modules() -> None:
    """Catches processes of one server that each keep modules of their own, and a folder that others can read."""
    args = parser_of_a_server().parse_args(["--enable-steering"])
    folder = Path(args.steering_registry)
    assert folder.stat().st_mode & 0o777 == 0o700
    options = msgspec.json.decode(os.environ[REGISTRY_VARIABLE], type=RegistryOptions)
    assert options == RegistryOptions(str(folder))
    apply_flags(copy.deepcopy(args))  # as another process of the server does
    assert json.loads(os.environ[REGISTRY_VARIABLE])["folder"] == str(folder)
    other = parser_of_a_server().parse_args(["--enable-steering"])
    assert other.steering_registry != args.steering_registry


def test_modules_from_files(tmp_path: Path) -> None:
    """Catches a path that means another file in a process with another folder, and a folder of one's own ignored."""
    (tmp_path / "calm.safetensors").write_bytes(b"")
    words = ["--steering-registry", str(tmp_path / "here"), "--steering-modules", f"calm={tmp_path}/calm.safetensors"]
    parser_of_a_server().parse_args(["--enable-steering", *words])
    options = msgspec.json.decode(os.environ[REGISTRY_VARIABLE], type=RegistryOptions)
    assert options == RegistryOptions(str(tmp_path / "here"), {"calm": str(tmp_path / "calm.safetensors")})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--enable-steering", "--steering-modules", "calm"], "name=path"),
        (["--enable-steering", "--steering-modules", "../calm=/dev/null"], "ASCII"),
        (["--enable-steering", "--steering-modules", "calm=nowhere"], "file not found: nowhere"),
        (["--steering-registry", "x"], "no effect without --enable-steering"),
        (["--steering-modules", "calm=x"], "no effect without --enable-steering"),
    ],
)
def test_wrong_modules_end_the_start(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without a module that it was told to have."""
    assert said in error_of(capsys, *words)
