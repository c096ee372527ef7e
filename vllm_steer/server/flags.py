# SPDX-License-Identifier: Apache-2.0
"""Steering flags of ``vllm serve`` and ``vllm run-batch``, from the table :data:`vllm_steer.settings.SETTINGS`."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_steer.errors import SteeringError
from vllm_steer.settings import ENABLE, ENABLE_HELP, SETTINGS


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``Steering`` to ``parser`` and apply the flags whenever it parses.

    Flags are applied during parsing because vLLM passes parsed flags to processes that load no plugin before they use
    them (``--data-parallel-multi-port-external-lb``). A wrong flag ends the command like any error of the parser: with
    a message and exit status 2.
    """
    from vllm_steer.server.apply_flags import apply_flags

    group = parser.add_argument_group("Steering", "Activation steering and capture per request (vllm-steer).")
    group.add_argument(ENABLE, action="store_true", default=False, help=ENABLE_HELP)
    for setting in SETTINGS:
        # No default, so that flags without --enable-steering can be refused.
        group.add_argument(setting.flag, default=argparse.SUPPRESS, help=setting.text, **setting.options)
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        try:
            apply_flags(parsed)
        except SteeringError as error:
            parser.error(str(error))
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
