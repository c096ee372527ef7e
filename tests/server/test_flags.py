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

from tests.conftest import SET_BY_FLAGS, SET_BY_MODELS, pytest_runtest_setup
from vllm_steer.config import (
    SCHEDULER_CLS,
    WORKER_CLS,
    SteeringConfig,
)
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import RegistryOptions
from vllm_steer.limits import ENGINE_LIMITS, MAX_BODY_MIB
from vllm_steer.server.apply_flags import MIDDLEWARE, apply_flags
from vllm_steer.server.flags import add_flags
from vllm_steer.server.settings import capture_store_name, max_body_bytes, store_limits
from vllm_steer.settings import CONSUMERS_VARIABLE, CONTROLLER_VARIABLE, REGISTRY_VARIABLE, SETTINGS, SWITCHES, Switch

SIZES = [limit.flag for limit in (*ENGINE_LIMITS.values(), MAX_BODY_MIB)]
OF_CAPTURE = ["--capture-inline-kib", "--capture-store-mib", "--capture-expiry-s"]


def server_parser(middleware: bool = True) -> argparse.ArgumentParser:
    """Return a parser with our flags and those of vLLM's that they affect."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-cls", default="auto")
    parser.add_argument("--scheduler-cls", default=None)
    parser.add_argument("--tool-call-parser", default=None)
    parser.add_argument("--additional-config", type=json.loads, default={})
    if middleware:
        parser.add_argument("--middleware", action="append", default=[])
    add_flags(parser)
    return parser


def error_of(capsys: pytest.CaptureFixture[str], *words: str, middleware: bool = True) -> str:
    """Return the error message of a command line."""
    with pytest.raises(SystemExit) as end:
        server_parser(middleware).parse_args(words)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_enable_steering_sets_the_engine_arguments() -> None:
    """Catches a flag that is accepted and has no effect."""
    args = server_parser().parse_args(["--enable-steering"])
    assert (args.worker_cls, args.scheduler_cls) == (WORKER_CLS, SCHEDULER_CLS)
    section = args.additional_config["steering"]
    assert {name: section[name] for name in ENGINE_LIMITS} == {n: limit.default for n, limit in ENGINE_LIMITS.items()}
    assert args.middleware == [MIDDLEWARE]


def test_limits_reach_the_engine() -> None:
    """Catches a limit that is dropped, or stored under another name."""
    words = [word for n, flag in enumerate(SIZES) for word in (flag, str(n + 7))]
    args = server_parser().parse_args(["--enable-steering", *words])
    section = args.additional_config["steering"]
    assert [section[name] for name in ENGINE_LIMITS] == [n + 7 for n in range(len(ENGINE_LIMITS))]
    assert max_body_bytes(args) == (len(ENGINE_LIMITS) + 7) << 20


def test_every_setting_has_a_flag() -> None:
    """Catches a setting of the engine without a row in the table; functions of the user run offline only."""
    named = [setting.name for setting in SETTINGS if setting.of_engine]
    assert {*named, "user_hooks", "tool_parser", "chat_template"} == set(SteeringConfig.__struct_fields__)


def test_flags_and_settings_have_names_of_their_own() -> None:
    """Catches two rows of the table of which the second is never read."""
    assert len({setting.flag for setting in SETTINGS}) == len({setting.name for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_only_its_flag_changes_a_switch(switch: Switch) -> None:
    """Catches a flag without effect, and a default that differs from the engine's."""
    for words, value in (([], switch.default), ([switch.flag], not switch.default)):
        args = server_parser().parse_args(["--enable-steering", *words])
        assert args.additional_config["steering"][switch.name] is value
        assert getattr(SteeringConfig.parse(None), switch.name) is switch.default


def test_negative_flag_overrides_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a negative flag that leaves the choice to the engine, or one without a steered engine that is ignored."""
    args = server_parser().parse_args(["--enable-steering", "--no-steering-plain-code"])
    assert args.additional_config["steering"]["plain_code"] is False
    assert "--steering-plain-code" in error_of(capsys, "--no-steering-plain-code")


def test_switches_require_enable_steering(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is ignored."""
    with pytest.raises(SystemExit):
        server_parser().parse_args(["--steering-skip-self-check"])
    assert "--steering-skip-self-check" in capsys.readouterr().err


def test_parts_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches markers that are dropped, an id that is taken for text, and a tool parser that is ignored."""
    words = [
        "--steering-part",
        "thinking=<a>,<b,c>",
        "--steering-part",
        "tool_call=5,6",
        "--tool-call-parser",
        "hermes",
    ]
    section = server_parser().parse_args(["--enable-steering", *words]).additional_config["steering"]
    parts = {name: list(markers) for name, markers in section["parts"].items()}
    assert parts == {"thinking": ["<a>", "<b,c>"], "tool_call": [5, 6]}
    assert section["tool_parser"] == "hermes"
    for wrong in ("thinking", "thinking=<a>", "answer=<a>,<b>", "thinking=<a>,<a>"):
        with pytest.raises(SystemExit):
            server_parser().parse_args(["--enable-steering", "--steering-part", wrong])
        assert "--steering-part" in capsys.readouterr().err


def test_points_flag_selects_optional_points() -> None:
    """Catches a dropped point, a point that was not requested, and settings that depend on the order."""
    for words, points in (([], ()), (["--steering-points", "mlp_out,attn_out"], ("attn_out", "mlp_out"))):
        args = server_parser().parse_args(["--enable-steering", *words])
        section = {name: value for name, value in args.additional_config["steering"].items() if name != "version"}
        assert SteeringConfig.parse(section).points == points


@pytest.mark.parametrize("text", ["", "post_mlp", "attn_out,", "attn_out,attn_out", "pre_attn", "attn_out mlp_in"])
def test_refuses_unknown_points(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without a requested point; points on the stream are always present."""
    message = error_of(capsys, "--enable-steering", f"--steering-points={text}")
    assert "must be some of attn_out, mlp_in, mlp_out" in message
    with pytest.raises(
        SteeringError,
        match=r"steering_config\.points: must be a list of distinct names out of attn_out, mlp_in, mlp_out",
    ):
        SteeringConfig.parse({"points": text.split(",")})


def test_points_require_enable_steering(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is ignored."""
    assert "--steering-points" in error_of(capsys, "--steering-points", "attn_out")


def test_flags_leave_a_stock_server_unchanged() -> None:
    """Catches a plugin that changes the engine although steering is not enabled."""
    args = server_parser().parse_args([])
    assert (args.worker_cls, args.scheduler_cls, args.additional_config) == ("auto", None, {})
    assert args.middleware == []


@pytest.mark.parametrize("flag", [*SIZES, *OF_CAPTURE])
def test_limits_require_enable_steering(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without steering although its command line sets a steering limit."""
    message = error_of(capsys, flag, "8")
    assert flag in message
    assert "--enable-steering" in message


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "٣", " ", "true", "9" * 30, "9" * 5000])
def test_limits_are_integers_in_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a limit of zero, and a traceback instead of a message."""
    assert "--steering-max-rows" in error_of(capsys, "--enable-steering", f"--steering-max-rows={text}")


@pytest.mark.parametrize("flag", ["--worker-cls", "--scheduler-cls"])
def test_refuses_other_worker_and_scheduler_classes(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a user's own class that is silently replaced."""
    assert flag in error_of(capsys, "--enable-steering", flag, "some.where.Class")


def test_keeps_additional_config() -> None:
    """Catches a user's settings for other plugins that are lost."""
    args = server_parser().parse_args(["--enable-steering", "--additional-config", '{"other": 1}'])
    assert args.additional_config["other"] == 1
    assert "steering" in args.additional_config


def test_refuses_a_steering_section_in_additional_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a section of the additional config that flags silently overwrite."""
    words = ["--enable-steering", "--additional-config", '{"steering": {"max_rows": 3}}']
    assert "--additional-config" in error_of(capsys, *words)


def test_the_body_limit_requires_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a limit accepted by a command that serves no HTTP requests."""
    words = ["--enable-steering", "--steering-max-body-mib", "3"]
    assert "--steering-max-body-mib" in error_of(capsys, *words, middleware=False)


def test_applying_twice_has_no_effect() -> None:
    """Catches errors or duplicates in spawned API servers, which apply the parent's flags again."""
    args = server_parser().parse_args(["--enable-steering", "--steering-max-rows", "9"])
    child = pickle.loads(pickle.dumps(args))  # noqa: S301
    apply_flags(child)
    assert vars(child) == vars(args)


def test_parsing_applies_the_flags() -> None:
    """Catches multi-port data parallelism, whose processes use parsed flags before any plugin runs."""
    parent = argparse.ArgumentParser()
    serve = parent.add_subparsers(dest="command").add_parser("serve")
    add_flags(serve)
    assert parent.parse_args(["serve", "--enable-steering"]).worker_cls == WORKER_CLS


def test_apply_flags_checks_namespaces() -> None:
    """Catches `AsyncEngineArgs.from_cli_args(Namespace(...))` bypassing the checks of the parser."""
    with pytest.raises(SteeringError, match="--steering-max-rows"):
        apply_flags(argparse.Namespace(enable_steering=False, steering_max_rows=8, middleware=[]))


def test_store_limits() -> None:
    """Catches a limit that is dropped, or converted from a wrong unit."""
    limits = store_limits(server_parser().parse_args(["--enable-steering"]))
    assert (limits.inline_bytes, limits.budget_bytes, limits.expiry_seconds) == (1 << 20, 1 << 30, 300)
    words = ["--capture-inline-kib", "0", "--capture-store-mib", "3", "--capture-expiry-s", "9"]
    limits = store_limits(server_parser().parse_args(["--enable-steering", *words]))
    assert (limits.inline_bytes, limits.budget_bytes, limits.expiry_seconds) == (0, 3 << 20, 9)


def test_consumers_reach_the_environment() -> None:
    """Catches a consumer that is never created, a lost option, and an option that stays a string."""
    words = ["--capture-consumers", "filesystem:root=/a/b,quota=2MiB,fsync=true", "--capture-consumers", "logging"]
    args = server_parser().parse_args(["--enable-steering", *words])
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
def test_refuses_wrong_consumers(texts: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without a consumer from its command line."""
    message = error_of(capsys, "--enable-steering", *(f"--capture-consumers={text}" for text in texts))
    assert "--capture-consumers" in message
    assert words in message
    assert CONSUMERS_VARIABLE not in os.environ


def test_consumers_require_steering_and_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches consumers configured where no request can use them."""
    words = ["--capture-consumers", "logging"]
    assert "--enable-steering" in error_of(capsys, *words)
    assert "no HTTP" in error_of(capsys, "--enable-steering", *words, middleware=False)


def test_all_processes_of_a_server_share_the_store() -> None:
    """Catches a capture id that only one process can resolve, and servers that share a store."""
    args, other = (server_parser().parse_args(["--enable-steering"]) for _ in range(2))
    name = capture_store_name(args)
    apply_flags(args)
    assert capture_store_name(pickle.loads(pickle.dumps(args))) == name  # noqa: S301
    assert capture_store_name(other) != name


def test_run_batch_supports_consumers_but_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches captures to files refused in a batch run, and flags that have no effect there."""

    def parser() -> argparse.ArgumentParser:
        made = server_parser(middleware=False)
        made.add_argument("-o", dest="output_file")
        return made

    parser().parse_args(["--enable-steering", "--capture-consumers", "logging", "--capture-inline-kib", "8"])
    assert json.loads(os.environ[CONSUMERS_VARIABLE]) == {"logging": {}}
    with pytest.raises(SystemExit):
        parser().parse_args(["--enable-steering", "--capture-store-mib", "8"])
    assert "no HTTP" in capsys.readouterr().err


def test_the_capture_policy_reaches_the_engine() -> None:
    """Catches a flag without effect."""
    args = server_parser().parse_args(["--enable-steering", "--steering-capture-policy", "fail"])
    assert args.additional_config["steering"]["capture_policy"] == "fail"


def test_creates_a_private_registry_folder() -> None:
    """Catches processes of one server with separate registries, and a folder readable by other users."""
    args = server_parser().parse_args(["--enable-steering"])
    folder = Path(args.steering_registry)
    assert folder.stat().st_mode & 0o777 == 0o700
    options = msgspec.json.decode(os.environ[REGISTRY_VARIABLE], type=RegistryOptions)
    assert options == RegistryOptions(str(folder))
    apply_flags(copy.deepcopy(args))  # as another process of the server does
    assert json.loads(os.environ[REGISTRY_VARIABLE])["folder"] == str(folder)
    other = server_parser().parse_args(["--enable-steering"])
    assert other.steering_registry != args.steering_registry


def test_module_paths_are_absolute(tmp_path: Path) -> None:
    """Catches a relative path resolved in another directory, and a registry flag that is ignored."""
    (tmp_path / "calm.safetensors").write_bytes(b"")
    words = ["--steering-registry", str(tmp_path / "here"), "--steering-modules", f"calm={tmp_path}/calm.safetensors"]
    server_parser().parse_args(["--enable-steering", *words])
    options = msgspec.json.decode(os.environ[REGISTRY_VARIABLE], type=RegistryOptions)
    assert options == RegistryOptions(str(tmp_path / "here"), {"calm": str(tmp_path / "calm.safetensors")})


def test_lists_of_names_are_given_at_once_or_one_by_one(tmp_path: Path) -> None:
    """Catches a flag whose second value is taken for a model, and one that forgets what stood before it."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.touch()
    words = [f"{path.name}={path}" for path in paths]
    flags = ["--enable-steering", "--steering-modules", *words[:2], "--steering-modules", words[2]]
    args = server_parser().parse_args([*flags, "--steering-peers", "vllm-lens", "rhizonymph"])
    assert args.steering_modules == words and args.steering_peers == ["vllm-lens", "rhizonymph"]


def test_passwords_of_databases_are_not_arguments() -> None:
    """Catches a password in the arguments, which vLLM logs, and an API server process that lacks it."""
    url = "postgresql://user:s3cr3t@host/db"
    args = server_parser().parse_args(["--enable-steering", "--steering-registry", url])
    assert args.steering_registry == "postgresql://***@host/db"
    assert "s3cr3t" not in repr(vars(args))
    for _ in range(2):  # spawned processes apply the flags of their parent again
        assert json.loads(os.environ[REGISTRY_VARIABLE])["folder"] == url
        apply_flags(copy.deepcopy(args))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://***@host/db", "*** replaces user and password in logs"),
        ("mysql://user:s3cr3t@host/db", "scheme 'mysql' is not supported"),
        ("postgresql://user:s3c@r3t@host/db", "must be percent-encoded"),
    ],
)
def test_refuses_wrong_databases(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without the registry of its command line."""
    message = error_of(capsys, "--enable-steering", "--steering-registry", url)
    assert said in message
    assert "r3t" not in message


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
def test_refuses_wrong_modules(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server that starts without a module from its command line."""
    assert said in error_of(capsys, *words)


def test_no_test_inherits_what_flags_and_models_have_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a registry or graphs of an earlier test in the engines of later ones, which fail by file order."""
    assert set(SET_BY_FLAGS) == {CONSUMERS_VARIABLE, CONTROLLER_VARIABLE, REGISTRY_VARIABLE}
    for name in SET_BY_FLAGS + SET_BY_MODELS:
        monkeypatch.setenv(name, "1")
    pytest_runtest_setup()
    assert not os.environ.keys() & {*SET_BY_FLAGS, *SET_BY_MODELS}
