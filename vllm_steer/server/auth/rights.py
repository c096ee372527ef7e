# SPDX-License-Identifier: Apache-2.0
"""Rights of API keys. This module is imported by the command line and does not load any server code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Right(StrEnum):
    """A right that an API key may have. Every steering route requires one, as the OpenAPI document states."""

    READ = "read"
    DATA = "data"
    STEER = "steer"
    CAPTURE = "capture"
    REGISTER = "register"
    GLOBAL = "global"
    ADMIN = "admin"


RIGHT_DESCRIPTIONS: Mapping[Right, str] = MappingProxyType(
    {
        Right.READ: "list modules, and show global steering and the engine's capabilities",
        Right.DATA: "with `read`: download vectors (`?data=true`)",
        Right.STEER: "steer your own requests, with your own vectors or with modules by name, and change their live "
        "strengths; with `capture`: run patching studies",
        Right.CAPTURE: "capture activations of your own requests, also projected on named probes, and fetch them; read "
        "and stop on readouts",
        Right.REGISTER: "register, replace and delete modules, which all keys share",
        Right.GLOBAL: "change global steering, which applies to the requests of all keys",
        Right.ADMIN: "use the vLLM routes that change the server: sleep, LoRA adapters, weights, profiles",
    }
)
