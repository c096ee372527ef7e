# SPDX-License-Identifier: Apache-2.0
"""The table of settings: server flags, keys of ``SteeringConfig``, and environment variables.

``SteeringConfig`` is checked, the flags of ``vllm serve`` with their help are made, and docs/reference/flags.md and
limits.md are written from :data:`SETTINGS`. A new setting of an engine is a row here and a field of ``SteeringConfig``.
Limits are rows of :mod:`vllm_steer.limits`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from vllm_steer.limits import ENGINE_LIMITS, INLINE_KIB, RESPONSE_MIB, SERVER_LIMITS, EngineLimit, Limit
from vllm_steer.points import OPTIONAL_POINTS, POINTS_FLAG
from vllm_steer.request.references import ANY_SITE_FLAG

CapturePolicy = Literal["wait", "fail"]
CAPTURE_POLICIES: tuple[CapturePolicy, ...] = get_args(CapturePolicy)

ENABLE: Final = "--enable-steering"
ENABLE_HELP: Final = (
    "Accept the request fields steering_vectors, prefill_steering_vectors, decode_steering_vectors, steering, "
    "steering_modules, capture, readouts and stop_on."
)
CONSUMERS: Final = "--capture-consumers"
REGISTRY: Final = "--steering-registry"
MODULES: Final = "--steering-modules"
KEYS: Final = "--steering-keys"
SAE: Final = "--steering-sae"
PART: Final = "--steering-part"
PEERS: Final = "--steering-peers"
STUDIO: Final = "--steering-studio"
CONTROLLER: Final = "--steering-controller"
PEER_MIDDLEWARE: Mapping[str, str] = MappingProxyType(
    {
        "vllm-lens": "vllm_steer.peers.vllm_lens.http.VllmLensMiddleware",
        "rhizonymph": "vllm_steer.peers.rhizonymph.http.RhizonymphMiddleware",
    }
)
"""Middleware that serves the request keys of another project, by its name."""

REGISTRY_VARIABLE: Final = "VLLM_STEER_REGISTRY"
"""Passes the registry's options, which can contain a password, to API server processes."""
CONSUMERS_VARIABLE: Final = "VLLM_STEER_CAPTURE_CONSUMERS"
CONTROLLER_VARIABLE: Final = "VLLM_STEER_CONTROLLER"


def dest_of(flag: str) -> str:
    """Return the name of ``flag`` among the parsed arguments."""
    return flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Setting:
    """A setting with a flag; ``name`` is its field of ``SteeringConfig`` if ``of_engine``."""

    name: str
    flag: str
    help: str

    of_engine = True

    @property
    def dest(self) -> str:
        """The name of the flag among the parsed arguments."""
        return dest_of(self.flag)

    @property
    def text(self) -> str:
        """The help of the flag."""
        return f"{self.help[0].upper()}{self.help[1:]}."

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of ``add_argument``."""
        raise NotImplementedError

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value for ``SteeringConfig``, or None."""
        raise NotImplementedError


@dataclass(frozen=True)
class Switch(Setting):
    """A boolean setting; the flag sets it to ``not default``.

    A default of None leaves the choice to the engine. The flag then has a negative form, ``--no-...``.
    """

    default: bool | None = False
    of_engine: bool = True

    @property
    def options(self) -> dict[str, Any]:
        if self.default is None:
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_const", "const": not self.default}

    def problem(self, value: object) -> str | None:
        known = isinstance(value, bool) or (value is None and self.default is None)
        return None if known else "must be true or false"


@dataclass(frozen=True)
class MultiChoice(Setting):
    """A setting with any number of names out of ``choices``; the flag takes them separated by commas."""

    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{super().text} Choices: {', '.join(self.choices)}. Default: none."

    @property
    def options(self) -> dict[str, Any]:
        return {"type": self._read, "metavar": "NAME,..."}

    def problem(self, value: object) -> str | None:
        if isinstance(value, (list, tuple)) and all(name in self.choices and value.count(name) == 1 for name in value):
            return None
        return f"must be a list of distinct names out of {', '.join(self.choices)}"

    def _read(self, text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if self.problem(given) is None:
            return given
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(self.choices)}, comma-separated, not {text!r}")


@dataclass(frozen=True)
class Text(Setting):
    """A setting that is a text, or with ``repeated`` any number of texts.

    Attributes:
        metavar: The form of the text.
        choices: The texts that are possible; none for any.
        python: The argument that sets it in Python; empty for a key of ``steering_config`` or if there is none.
        of_batch: Whether ``vllm run-batch`` has the flag.
    """

    metavar: str | None = None
    repeated: bool = False
    choices: tuple[str, ...] = ()
    of_engine: bool = False
    of_batch: bool = False
    python: str = ""

    @property
    def text(self) -> str:
        return f"{super().text} Default: {self.choices[0]}." if self.choices and not self.repeated else super().text

    @property
    def options(self) -> dict[str, Any]:
        options = {"metavar": self.metavar} if self.metavar else {"choices": self.choices}
        return {**options, **({"nargs": "+", "action": "extend"} if self.repeated else {})}


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "allow_unproven",
        "--steering-allow-unproven",
        "start with a warning if the source of a decoder-layer class differs from the tested source, if the class only "
        "inherits from a supported class, or if the model is split over ranks in an untested way",
    ),
    Switch(
        "self_check",
        "--steering-skip-self-check",
        "skip the forward passes at start that check the taps on the model itself",
        default=True,
    ),
    Switch(
        "sae_any_site",
        ANY_SITE_FLAG,
        "serve autoencoders at other sites, and with other models, than those that their files name",
    ),
    Switch(
        "plain_code",
        "--steering-plain-code",
        "compile the model a second time without taps and run that copy in steps without edits and captures, so that "
        "they launch stock vLLM's kernels; start takes longer. By default on a GPU for each model that allows it",
        default=None,
    ),
)


STUDIO_SWITCH: Final = Switch(
    "studio",
    STUDIO,
    "serve a page at /studio, on which people try out steering and readouts in a browser",
    of_engine=False,
)
MULTI_CHOICES: tuple[MultiChoice, ...] = (
    MultiChoice(
        "points",
        POINTS_FLAG,
        "additional hook points, on the branches; each adds a tap and a table column per layer",
        OPTIONAL_POINTS,
    ),
)
POLICY: Final = Text(
    "capture_policy",
    "--steering-capture-policy",
    "what happens to a request whose captured rows exceed capture_mib together with those of running requests: wait "
    "delays it; fail runs it at once and reports its capture as partial",
    choices=CAPTURE_POLICIES,
    of_engine=True,
)
TEXTS: tuple[Text, ...] = (
    Text(
        "consumers",
        CONSUMERS,
        "a destination of captured rows besides memory, which is the response itself: e.g. "
        "filesystem:root=/data/captures. Repeatable",
        "NAME:key=value,...",
        repeated=True,
        of_batch=True,
        python="`capture_consumers=`",
    ),
    Text(
        "registry",
        REGISTRY,
        "folder or database (sqlite:///FILE, postgresql://HOST/DATABASE) of modules and global steering, shared by all "
        "processes of the server and kept when it ends. Default: a temporary folder",
        "DIR|URL",
        python="`steering_registry=`",
    ),
    Text(
        "modules",
        MODULES,
        "modules to register at start, from their files or from vector files of other tools. Repeatable",
        "NAME=PATH",
        repeated=True,
        python="`steering_modules=`",
    ),
    Text(
        "saes",
        SAE,
        "a sparse autoencoder for readouts and `feature` edits, from a local folder of SAELens, Gemma Scope (1 and 2) "
        "or sparsify. Its encoder is kept on the device in float32. Repeatable",
        "NAME=FOLDER",
        repeated=True,
        of_engine=True,
    ),
    Text(
        "parts",
        PART,
        "the tokens that begin and end a part of the output, as ids or as text that is one token, for example "
        "tool_call=START,END or thinking=START,END. By default those of --reasoning-parser and --tool-call-parser. "
        "Repeatable",
        "NAME=START,END",
        repeated=True,
        of_engine=True,
    ),
    Text(
        "controller",
        CONTROLLER,
        "a controller of an installed package. It reads the readouts of requests that have live strengths, and sets "
        "these strengths",
        "NAME:key=value,...",
        python="`steering_controller=` (`AsyncLLM`)",
    ),
    Text(
        "keys",
        KEYS,
        "API key file, written by vllm-steer keys. With it, all routes except /health and a few others require a key; "
        "without it, every client may use all of them",
        "FILE",
    ),
    Text(
        "peers",
        PEERS,
        "also serve the request keys of another project, for its scripts. Repeatable",
        repeated=True,
        choices=tuple(PEER_MIDDLEWARE),
    ),
    POLICY,
)
CHECKED: tuple[EngineLimit | Switch | MultiChoice, ...] = (*ENGINE_LIMITS.values(), *SWITCHES, *MULTI_CHOICES)
"""Settings of an engine whose values the table checks."""
SETTINGS: tuple[Setting | Limit, ...] = (
    *TEXTS,
    STUDIO_SWITCH,
    *SWITCHES,
    *MULTI_CHOICES,
    *ENGINE_LIMITS.values(),
    *SERVER_LIMITS,
)
"""All flags but ``--enable-steering``, in the order of ``--help``."""
BATCH_DESTS = (*(each.dest for each in TEXTS if each.of_batch), INLINE_KIB.dest, RESPONSE_MIB.dest)
"""Flags of the server that ``vllm run-batch`` has as well."""
