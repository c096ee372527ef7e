# SPDX-License-Identifier: Apache-2.0
"""The parser of ``vllm serve``, which vLLM 0.33 has moved."""

from __future__ import annotations

from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


def server_parser() -> Any:
    """Return vLLM's parser of the server's arguments."""
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
