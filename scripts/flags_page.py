# SPDX-License-Identifier: Apache-2.0
"""Page docs/reference/flags.md: flags of the server, options of the command line, and environment variables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import typer.main
from pages import table

import vllm_steer
from vllm_steer.cli.main import app
from vllm_steer.limits import Limit
from vllm_steer.server.flags import add_flags
from vllm_steer.settings import (
    BATCH_DESTS,
    CONSUMERS,
    CONSUMERS_VARIABLE,
    CONTROLLER,
    CONTROLLER_VARIABLE,
    ENABLE,
    MODULES,
    REGISTRY,
    REGISTRY_VARIABLE,
    SETTINGS,
    Setting,
    Switch,
)

PACKAGE: Final = Path(vllm_steer.__file__).parent
VARIABLES: Final = (
    ("VLLM_STEER_URL", "`vllm-steer` commands", "URL of the server; same as `--url`"),
    ("VLLM_STEER_API_KEY", "`vllm-steer` commands", "API key; same as `--api-key`"),
    ("VLLM_STEER_KEYS", "`vllm-steer keys`", "key file; same as `--file`"),
    (
        "VLLM_STEER_ALLOW_UNTESTED_VLLM",
        "every engine",
        "`1` starts an engine with steering on a version of vLLM that is neither tested nor unchanged "
        "([versions](../guides/releases.md#untested-versions))",
    ),
    (
        "VLLM_STEER_INSPECT_ALIASES",
        "the provider for Inspect AI",
        "names of other providers that it also answers to, separated by commas ([Inspect AI](../peers/inspect.md))",
    ),
    *(
        (name, "API server processes", f"set by the server from {flags}; do not set it")
        for name, flags in (
            (REGISTRY_VARIABLE, f"`{REGISTRY}` and `{MODULES}`"),
            (CONSUMERS_VARIABLE, f"`{CONSUMERS}`"),
            (CONTROLLER_VARIABLE, f"`{CONTROLLER}`"),
        )
    ),
)
"""Name, reader and meaning of each environment variable."""


def variables() -> str:
    """Return the table of environment variables.

    Raises:
        ValueError: The package names an environment variable that is not on the page, or the reverse.
    """
    found = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'"(VLLM_STEER_[A-Z_]+)"', path.read_text())}
    if found != (shown := {name for name, _, _ in VARIABLES}):
        raise ValueError(f"environment variables {sorted(found ^ shown)}")
    return table(("variable", "read by", "meaning"), [(f"`{name}`", *others) for name, *others in VARIABLES])


def _in_python(setting: Setting | Limit) -> str:
    """Return the equivalent of a flag in Python."""
    if not setting.of_engine:
        return getattr(setting, "python", "")
    return f"`{setting.name}`" + (": `False`" if isinstance(setting, Switch) and setting.default else "")


def _server_flags() -> Iterator[tuple[str, str, str]]:
    in_python = {ENABLE: "`enable_steering=True`"} | {each.flag: _in_python(each) for each in SETTINGS}
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    for action in parser._actions:
        flag = action.option_strings[0]
        values = action.metavar or ("|".join(action.choices) if action.choices else "")
        shown = (
            ", ".join(f"`{each}`" for each in action.option_strings) if len(action.option_strings) > 1 else f"`{flag}`"
        )
        batch = " Also for `vllm run-batch`." if action.dest in BATCH_DESTS else ""
        yield f"{shown} {_values(values)}".strip(), in_python[flag], f"{action.help}{batch}"


def _values(values: object) -> str:
    return f"`{values}`" if values else ""


def _commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name."""

    def walk(command: Any, path: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for name, each in command.commands.items():
            if getattr(each, "commands", None):
                yield from walk(each, [*path, name])
            else:
                yield " ".join([*path, name]), each

    return walk(typer.main.get_command(app), ["vllm-steer"])


def _sentence(command: Any) -> str:
    return str(command.help or "").partition("\n\n")[0].replace("\n", " ")


def _options() -> Iterator[tuple[str, str, str, str]]:
    for name, command in _commands():
        for option in command.params:
            if option.param_type_name == "argument":
                shown = f"`{option.metavar or option.name.upper()}`"
            else:
                shown = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
            given = option.default
            default = (
                "required"
                if option.required
                else ""
                if given is None or given is False or given == ""
                else f"`{given}`"
            )
            yield f"`{name}`", shown, default, option.help or ""


SECTIONS: Final = {
    "server": lambda: table(("flag", "in Python", "meaning"), list(_server_flags())),
    "commands": lambda: table(
        ("command", "purpose"), [(f"`{name}`", _sentence(command)) for name, command in _commands()]
    ),
    "options": lambda: table(("command", "option", "default", "meaning"), list(_options())),
    "variables": variables,
}
