# SPDX-License-Identifier: Apache-2.0
"""The flags of ``vllm serve`` and the engine arguments that they stand for."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vllm_steer.config import MULTI_CHOICES, SCHEDULER_CLS, SWITCHES, WORKER_CLS, MultiChoice, Switch, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import CONSUMERS_VARIABLE, REGISTRY_VARIABLE, RegistryOptions
from vllm_steer.fs.private_tempdir import private_tempdir
from vllm_steer.fs.shared_tempdir import remove_at_exit
from vllm_steer.limits import (
    ENGINE_LIMITS,
    EXPIRY_S,
    INLINE_KIB,
    MAX_BODY_MIB,
    MAX_NORM,
    REGISTRY_MIB,
    REGISTRY_MODULES,
    RESPONSE_MIB,
    SERVER_LIMITS,
    STORE_MIB,
    Limit,
)
from vllm_steer.registry.index import RegistryLimits
from vllm_steer.server.auth.key_file import read_keys
from vllm_steer.server.capture_store import StoreLimits
from vllm_steer.server.quota.limits import value_of
from vllm_steer.spec.references import read_name

ENABLE = "--enable-steering"
CONSUMERS = "--capture-consumers"
REGISTRY = "--steering-registry"
MODULES = "--steering-modules"
KEYS = "--steering-keys"
MIDDLEWARE = "vllm_steer.server.http.middleware.SteeringMiddleware"

_OF_ENGINE: Mapping[str, Limit] = MappingProxyType({limit.dest: limit for limit in ENGINE_LIMITS.values()})
_OF_SERVER: Mapping[str, Limit] = MappingProxyType({limit.dest: limit for limit in SERVER_LIMITS})
"""By their names among the parsed arguments."""
_OF_BATCH = ("capture_consumers", INLINE_KIB.dest, RESPONSE_MIB.dest)
"""What ``vllm run-batch`` has a use for, which answers lines of a file."""
_SWITCHES: Mapping[str, Switch] = MappingProxyType(
    {switch.flag.removeprefix("--").replace("-", "_"): switch for switch in SWITCHES}
)
_MULTI_CHOICES: Mapping[str, MultiChoice] = MappingProxyType(
    {choice.flag.removeprefix("--").replace("-", "_"): choice for choice in MULTI_CHOICES}
)
_TAKEN = {"worker_cls": (WORKER_CLS, "auto", None), "scheduler_cls": (SCHEDULER_CLS, None)}
_POLICY_DEST = "steering_capture_policy"
_CONSUMERS_DEST = "capture_consumers"
# Not a flag: with the parsed flags it reaches all processes of one server.
_SPOOL_DEST = "capture_spool"
_REGISTRY_DEST, _MODULES_DEST, _KEYS_DEST = "steering_registry", "steering_modules", "steering_keys"
_SERVER_DESTS = (_CONSUMERS_DEST, _REGISTRY_DEST, _MODULES_DEST, _KEYS_DEST, *_OF_SERVER)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``Steering``; what ``parser`` parses from then on has gone through :func:`apply_flags`.

    It is applied at parsing since vLLM also hands parsed flags to processes in which no plug-in has run yet
    (``--data-parallel-multi-port-external-lb``). Wrong flags end as the parser's own errors do: with a
    sentence and exit status 2.
    """
    group = parser.add_argument_group("Steering", "Activation steering and capture of single requests (vllm-steer).")
    group.add_argument(
        ENABLE,
        action="store_true",
        default=False,
        help="Serve the request fields steering_vectors, prefill_steering_vectors, decode_steering_vectors, "
        "steering and capture.",
    )
    group.add_argument(
        CONSUMERS,
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME:key=value,...",
        help="Where requests may have captured rows go, beside memory, which is the answer itself: e.g. "
        "filesystem:root=/data/captures. Repeatable.",
    )
    group.add_argument(
        REGISTRY,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="Folder in which modules and global steering are kept, for all processes of the server and beyond its "
        "end. By default a private folder that is removed when the server ends.",
    )
    group.add_argument(
        MODULES,
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME=PATH",
        help="A module that is there from the start, from a safetensors file. Repeatable.",
    )
    group.add_argument(
        KEYS,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="File of API keys with their rights, which vllm-steer keys writes. With it, nothing is answered without a "
        "key but /health and the like. By default everybody may do everything.",
    )
    group.add_argument(
        _flag(_POLICY_DEST),
        choices=("wait", "fail"),
        default=argparse.SUPPRESS,
        help="A request whose captured rows do not fit beside those of running ones waits, or runs without them.",
    )
    for switch in SWITCHES:
        group.add_argument(
            switch.flag,
            action="store_const",
            const=True,
            default=argparse.SUPPRESS,
            help=f"{switch.help[0].upper()}{switch.help[1:]}.",
        )
    for choice in MULTI_CHOICES:
        group.add_argument(
            choice.flag,
            type=_names_of(choice),
            default=argparse.SUPPRESS,
            metavar="NAME,...",
            help=f"{choice.help[0].upper()}{choice.help[1:]}. Of {', '.join(choice.choices)}; none by default.",
        )
    for dest, limit in (*_OF_ENGINE.items(), *_OF_SERVER.items()):
        group.add_argument(
            _flag(dest),
            type=_number_within(limit),
            default=argparse.SUPPRESS,  # to tell what is given: it is refused without --enable-steering
            metavar="N",
            help=f"{limit.help[0].upper()}{limit.help[1:]}. {limit.low} to {limit.high}, default {limit.default}.",
        )
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        try:
            apply_flags(parsed)
        except SteeringError as error:
            parser.error(str(error))
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def apply_flags(args: argparse.Namespace) -> None:
    """Turn the steering flags into the engine arguments and the HTTP middleware that they stand for.

    A second call changes nothing. A server without ``--enable-steering`` gets the middleware too: it refuses
    what would otherwise be ignored. Raises :class:`SteeringError` naming the flag that is wrong.
    """
    of_engine = (_POLICY_DEST, *_SWITCHES, *_MULTI_CHOICES, *_OF_ENGINE)
    given = {
        dest: getattr(args, dest) for dest in (*of_engine, *_SERVER_DESTS) if getattr(args, dest, None) is not None
    }
    is_batch = hasattr(args, "output_file") and not hasattr(args, "middleware")
    of_server = [_flag(dest) for dest in given if dest in _SERVER_DESTS and not (is_batch and dest in _OF_BATCH)]
    if getattr(args, "enable_steering", False):
        settings = {limit.name: given[dest] for dest, limit in _OF_ENGINE.items() if dest in given}
        settings |= {switch.name: not switch.default for dest, switch in _SWITCHES.items() if given.get(dest)}
        settings |= {choice.name: given[dest] for dest, choice in _MULTI_CHOICES.items() if dest in given}
        if _POLICY_DEST in given:
            settings["capture_policy"] = given[_POLICY_DEST]
        _check_front_end(args)
        _enable(args, settings)
        if getattr(args, _SPOOL_DEST, None) is None:
            name = secrets.token_hex(8)
            setattr(args, _SPOOL_DEST, name)
            remove_at_exit(name)
    elif given:
        flags = ", ".join(map(_flag, given))
        raise SteeringError(flags, f"has no effect without {ENABLE}; add that, or leave it out")
    if hasattr(args, "middleware"):
        if MIDDLEWARE not in args.middleware:
            args.middleware = [*args.middleware, MIDDLEWARE]
    elif of_server:
        raise SteeringError(", ".join(of_server), "has no effect here: this command serves no HTTP requests")
    if _CONSUMERS_DEST in given:
        # Processes that serve requests are children of this one, and make their own consumers.
        os.environ[CONSUMERS_VARIABLE] = _consumers(given[_CONSUMERS_DEST])
    if getattr(args, "enable_steering", False) and hasattr(args, "middleware"):
        modules = _modules(given.get(_MODULES_DEST, ()))
        if _REGISTRY_DEST not in given:
            # Made here, in the parent of all processes that serve requests, since it is one for all of them.
            args.steering_registry = private_tempdir("vllm-steer-registry-")
        if _KEYS_DEST in given:
            read_keys(Path(args.steering_keys))  # now, for a sentence instead of a server that does not start
            args.steering_keys = str(Path(args.steering_keys).absolute())
        limits = registry_limits(args)
        options = RegistryOptions(str(Path(args.steering_registry).absolute()), modules, limits)
        os.environ[REGISTRY_VARIABLE] = msgspec.json.encode(options).decode()


def max_body_bytes(args: object) -> int:
    """The limit of an HTTP body with steering or capture fields, in bytes, from the parsed flags of a server."""
    return value_of(args, MAX_BODY_MIB) << 20


def store_limits(args: object) -> StoreLimits:
    """What becomes of captured rows that go into answers, from the parsed flags of a server."""
    return StoreLimits(
        inline_bytes=value_of(args, INLINE_KIB) << 10,
        budget_bytes=value_of(args, STORE_MIB) << 20,
        expiry_seconds=value_of(args, EXPIRY_S),
        response_bytes=value_of(args, RESPONSE_MIB) << 20,
    )


def registry_limits(args: object) -> RegistryLimits:
    """How much the registry holds, from the parsed flags of a server."""
    return RegistryLimits(
        modules=value_of(args, REGISTRY_MODULES),
        num_bytes=value_of(args, REGISTRY_MIB) << 20,
        max_norm=value_of(args, MAX_NORM),
    )


def capture_store_name(args: object) -> str:
    """The name of the folder in which a server keeps what is to be fetched: the same in all of its processes."""
    return getattr(args, _SPOOL_DEST, None) or secrets.token_hex(8)


def _consumers(texts: Sequence[str]) -> str:
    """``{name: options}`` in JSON; raises :class:`SteeringError` for what is unknown, wrong or there twice."""
    # Not needed, and slow to load, where nothing is captured.
    from vllm_steer.capture.consumers import parse_consumer_flag

    consumers: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, options = parse_consumer_flag(text, CONSUMERS)
        if name in consumers:
            raise SteeringError(CONSUMERS, f"{name} is there twice; a server has one of each")
        consumers[name] = options
    try:
        return json.dumps(to_jsonable_python(consumers))
    except PydanticSerializationError as error:
        raise SteeringError(CONSUMERS, f"an option cannot be handed to the server's processes: {error}") from None


def _modules(texts: Sequence[str]) -> dict[str, str]:
    """Paths by name; raises :class:`SteeringError` for what is wrong or there twice."""
    modules: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise SteeringError(MODULES, f"must be name=path, not {text!r}")
        if read_name(name, MODULES) in modules:
            raise SteeringError(MODULES, f"{name} is there twice; a name means one module")
        if not Path(path).is_file():
            raise SteeringError(MODULES, f"there is no file {path}")
        modules[name] = str(Path(path).absolute())
    return modules


def _check_front_end(args: argparse.Namespace) -> None:
    """Raise :class:`SteeringError` for servers that are not vLLM's in Python: keys, fields and global steering would be
    passed by."""
    from vllm import envs

    reason = f"serves requests past all of {ENABLE}, its API keys included; leave one of the two out"
    if getattr(args, "grpc", False):
        raise SteeringError("--grpc", reason)
    if envs.VLLM_USE_RUST_FRONTEND and hasattr(args, "middleware"):
        raise SteeringError("VLLM_USE_RUST_FRONTEND", reason)


def _enable(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    for name, allowed in _TAKEN.items():
        if getattr(args, name, None) not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise SteeringError(flag, f"{ENABLE} brings its own; leave one of the two out")
    additional = getattr(args, "additional_config", None) or {}
    if not isinstance(additional, dict):
        raise SteeringError("--additional-config", f"must be a JSON object to go with {ENABLE}")
    ours = engine_kwargs(settings, additional)
    section = additional.get("steering")
    if section is not None and section != ours["additional_config"]["steering"]:
        raise SteeringError("--additional-config", f"{ENABLE} sets its section steering; leave one out")
    for name, value in ours.items():
        setattr(args, name, value)


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"


def _number_within(limit: Limit) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text.isascii() and text.isdecimal() and limit.low <= int(text[:20]) <= limit.high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number, {limit.low} to {limit.high}, not {text!r}")

    return number


def _names_of(choice: MultiChoice) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if set(given) <= set(choice.choices) and len(set(given)) == len(given):
            return given
        raise argparse.ArgumentTypeError(
            f"must be some of {', '.join(choice.choices)} with commas between, not {text!r}"
        )

    return names
