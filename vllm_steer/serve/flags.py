# SPDX-License-Identifier: Apache-2.0
"""The flags of ``vllm serve`` and the engine arguments that they stand for."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from vllm_steer.config import LIMITS, SCHEDULER_CLS, WORKER_CLS, Limit, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend import CONSUMERS_VARIABLE
from vllm_steer.serve.store import StoreLimits

ENABLE = "--enable-steering"
CONSUMERS = "--capture-consumers"
MIDDLEWARE = "vllm_steer.serve.middleware.SteeringMiddleware"
MAX_BODY = Limit("max_body_mib", 64, 1, 1 << 16, "largest HTTP body with steering or capture fields, in MiB")
INLINE = Limit("inline_kib", 1024, 0, 1 << 20, "most captured rows of one choice that are part of the answer, in KiB")
STORE = Limit("store_mib", 1024, 0, 1 << 20, "captured rows kept to be fetched from /v1/captures, all together, in MiB")
EXPIRY = Limit("expiry_s", 300, 1, 86400, "how long captured rows are kept to be fetched, in seconds")

_OF_ENGINE: Mapping[str, Limit] = MappingProxyType({f"steering_{limit.name}": limit for limit in LIMITS})
_OF_SERVER: Mapping[str, Limit] = MappingProxyType(
    {f"steering_{MAX_BODY.name}": MAX_BODY, **{f"capture_{limit.name}": limit for limit in (INLINE, STORE, EXPIRY)}}
)
"""By their names among the parsed arguments."""
_TAKEN = {"worker_cls": (WORKER_CLS, "auto", None), "scheduler_cls": (SCHEDULER_CLS, None)}
_POLICY_DEST = "steering_capture_policy"
_CONSUMERS_DEST = "capture_consumers"


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
        _flag(_POLICY_DEST),
        choices=("wait", "fail"),
        default=argparse.SUPPRESS,
        help="A request whose captured rows do not fit beside those of running ones waits, or runs without them.",
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
    dests = (_CONSUMERS_DEST, _POLICY_DEST, *_OF_ENGINE, *_OF_SERVER)
    given = {dest: getattr(args, dest) for dest in dests if getattr(args, dest, None) is not None}
    of_server = [_flag(dest) for dest in given if dest not in _OF_ENGINE and dest != _POLICY_DEST]
    if getattr(args, "enable_steering", False):
        settings = {limit.name: given[dest] for dest, limit in _OF_ENGINE.items() if dest in given}
        if _POLICY_DEST in given:
            settings["capture_policy"] = given[_POLICY_DEST]
        _enable(args, settings)
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


def max_body_bytes(args: object) -> int:
    """The limit of an HTTP body with steering or capture fields, in bytes, from the parsed flags of a server."""
    return _of_server(args, MAX_BODY) << 20


def store_limits(args: object) -> StoreLimits:
    """What becomes of captured rows that go into answers, from the parsed flags of a server."""
    return StoreLimits(
        inline_bytes=_of_server(args, INLINE) << 10,
        budget_bytes=_of_server(args, STORE) << 20,
        expiry_seconds=_of_server(args, EXPIRY),
        processes=getattr(args, "api_server_count", None) or 1,
    )


def _of_server(args: object, limit: Limit) -> int:
    dest = next(dest for dest, each in _OF_SERVER.items() if each is limit)
    value = getattr(args, dest, None)
    return int(limit.default if value is None else value)


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
