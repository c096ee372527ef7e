# SPDX-License-Identifier: Apache-2.0
"""Module that Inspect loads through its entry point: the providers, and the names of solvers and scorers.

The provider's class, torch and the client are imported when a model is created.
"""

from __future__ import annotations

import os

from inspect_ai.model import ModelAPI, modelapi

from vllm_steer.errors import SteeringError
from vllm_steer.peers.inspect import scorers as scorers
from vllm_steer.peers.inspect import solvers as solvers

ALIAS_VARIABLE = "VLLM_STEER_INSPECT_ALIASES"
"""Environment variable with further names of the provider, separated by commas."""
ALIASES = ("vllm-lens",)


@modelapi(name="vllm-steer")
def vllm_steer() -> type[ModelAPI]:
    """Return the provider of ``vllm-steer/MODEL``."""
    return _provider()


def add_alias(name: str) -> None:
    """Serve models under the provider name of another project, such as ``vllm-lens/MODEL``.

    Raises:
        SteeringError: The interface of that project is not supported.
    """
    if name not in ALIASES:
        raise SteeringError(ALIAS_VARIABLE, f"{name!r} is not valid; use {', '.join(ALIASES)}")
    modelapi(name=name)(_provider)


def _provider() -> type[ModelAPI]:
    from vllm_steer.peers.inspect.api import VllmSteerAPI

    return VllmSteerAPI


for _name in filter(None, map(str.strip, os.environ.get(ALIAS_VARIABLE, "").split(","))):
    add_alias(_name)
