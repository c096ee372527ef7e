# SPDX-License-Identifier: Apache-2.0
"""Steering flags of ``vllm serve`` and ``vllm run-batch``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vllm_steer.config import CAPTURE_POLICIES, MULTI_CHOICES, SWITCHES, MultiChoice, Switch
from vllm_steer.errors import SteeringError
from vllm_steer.limits import ENGINE_LIMITS, INLINE_KIB, RESPONSE_MIB, SERVER_LIMITS, EngineLimit, Limit

ENABLE = "--enable-steering"
CONSUMERS = "--capture-consumers"
REGISTRY = "--steering-registry"
MODULES = "--steering-modules"
KEYS = "--steering-keys"
SAE = "--steering-sae"
PART = "--steering-part"
PEERS = "--steering-peers"
PEER_MIDDLEWARE: Mapping[str, str] = MappingProxyType(
    {
        "vllm-lens": "vllm_steer.peers.vllm_lens.http.VllmLensMiddleware",
        "rhizonymph": "vllm_steer.peers.rhizonymph.http.RhizonymphMiddleware",
    }
)
"""Middleware that serves the request keys of another project, by its name."""
CONTROLLER = "--steering-controller"
POLICY = "--steering-capture-policy"
POLICY_HELP = (
    "what happens to a request whose captured rows exceed capture_mib together with those of running requests: wait "
    "delays it; fail runs it at once and reports its capture as partial"
)


def dest_of(flag: str) -> str:
    """Return the name of ``flag`` among the parsed arguments."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(dest: str) -> str:
    """Return the flag that sets ``dest`` among the parsed arguments."""
    return f"--{dest.replace('_', '-')}"


LIMIT_DESTS: Mapping[str, EngineLimit] = MappingProxyType({limit.dest: limit for limit in ENGINE_LIMITS.values()})
SWITCH_DESTS: Mapping[str, Switch] = MappingProxyType({dest_of(switch.flag): switch for switch in SWITCHES})
MULTI_CHOICE_DESTS: Mapping[str, MultiChoice] = MappingProxyType(
    {dest_of(choice.flag): choice for choice in MULTI_CHOICES}
)
ENGINE_DESTS = (dest_of(POLICY), dest_of(SAE), dest_of(PART), *SWITCH_DESTS, *MULTI_CHOICE_DESTS, *LIMIT_DESTS)
"""Flags that become settings of the engine."""
SERVER_DESTS = (
    *map(dest_of, (CONSUMERS, REGISTRY, MODULES, KEYS, PEERS, CONTROLLER)),
    *(limit.dest for limit in SERVER_LIMITS),
)
"""Flags that the API server uses itself."""
BATCH_DESTS = (dest_of(CONSUMERS), INLINE_KIB.dest, RESPONSE_MIB.dest)
"""Server flags that ``vllm run-batch`` supports as well."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``Steering`` to ``parser`` and apply the flags whenever it parses.

    Flags are applied during parsing because vLLM passes parsed flags to processes that load no plugin before they use
    them (``--data-parallel-multi-port-external-lb``). A wrong flag ends the command like any error of the parser: with
    a message and exit status 2.
    """
    group = parser.add_argument_group("Steering", "Activation steering and capture per request (vllm-steer).")
    group.add_argument(
        ENABLE,
        action="store_true",
        default=False,
        help="Accept the request fields steering_vectors, prefill_steering_vectors, decode_steering_vectors, "
        "steering, steering_modules, capture, readouts and stop_on.",
    )

    def add(flag: str, text: str, **options: Any) -> None:
        # No default, so that flags without --enable-steering can be refused.
        group.add_argument(flag, default=argparse.SUPPRESS, help=text, **options)

    add(
        CONSUMERS,
        "A destination of captured rows besides memory, which is the response itself: e.g. "
        "filesystem:root=/data/captures. Repeatable.",
        nargs="+",
        action="extend",
        metavar="NAME:key=value,...",
    )
    add(
        REGISTRY,
        "Folder or database (sqlite:///FILE, postgresql://HOST/DATABASE) of modules and global steering, shared by all "
        "processes of the server and kept when it ends. Default: a temporary folder.",
        metavar="DIR|URL",
    )
    add(
        MODULES,
        "Modules to register at start, from safetensors files. Repeatable.",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
    )
    add(
        SAE,
        "A sparse autoencoder for readouts and `feature` edits, from a local folder of SAELens, Gemma Scope (1 and 2) "
        "or sparsify. Its encoder is kept on the device in float32. Repeatable.",
        nargs="+",
        action="extend",
        metavar="NAME=FOLDER",
    )
    add(
        PART,
        "The tokens that begin and end a part of the output, as ids or as text that is one token, for example "
        "tool_call=START,END or thinking=START,END. By default those of --reasoning-parser and --tool-call-parser. "
        "Repeatable.",
        nargs="+",
        action="extend",
        metavar="NAME=START,END",
    )
    add(
        CONTROLLER,
        "A controller of an installed package. It reads the readouts of requests that have live strengths, and sets "
        "these strengths.",
        metavar="NAME:key=value,...",
    )
    add(
        KEYS,
        "API key file, written by vllm-steer keys. With it, all routes except /health and a few others require a key; "
        "without it, every client may use all of them.",
        metavar="FILE",
    )
    add(
        PEERS,
        "Also serve the request keys of another project, for its scripts. Repeatable.",
        nargs="+",
        action="extend",
        choices=tuple(PEER_MIDDLEWARE),
    )
    add(POLICY, f"{_sentence(POLICY_HELP)}. Default: wait.", choices=CAPTURE_POLICIES)
    for switch in SWITCHES:
        if switch.default is None:
            add(switch.flag, f"{_sentence(switch.help)}.", action=argparse.BooleanOptionalAction)
        else:
            add(switch.flag, f"{_sentence(switch.help)}.", action="store_const", const=not switch.default)
    for choice in MULTI_CHOICES:
        text = f"{_sentence(choice.help)}. Choices: {', '.join(choice.choices)}. Default: none."
        add(choice.flag, text, type=_names_of(choice), metavar="NAME,...")
    for limit in (*ENGINE_LIMITS.values(), *SERVER_LIMITS):
        text = f"{_sentence(limit.help)}. {limit.low} to {limit.high}, default {limit.default}."
        add(limit.flag, text, type=_number_within(limit), metavar="N")
    _apply_when_parsed(parser)


def _apply_when_parsed(parser: argparse.ArgumentParser) -> None:
    from vllm_steer.server.apply_flags import apply_flags

    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        try:
            apply_flags(parsed)
        except SteeringError as error:
            parser.error(str(error))
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _number_within(limit: Limit) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text.isascii() and text.isdecimal() and limit.low <= int(text[:20]) <= limit.high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be an integer from {limit.low} to {limit.high}, not {text!r}")

    return number


def _names_of(choice: MultiChoice) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if set(given) <= set(choice.choices) and len(set(given)) == len(given):
            return given
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(choice.choices)}, comma-separated, not {text!r}")

    return names
