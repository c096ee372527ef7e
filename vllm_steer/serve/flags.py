# SPDX-License-Identifier: Apache-2.0
"""The flags of ``vllm serve`` and the engine arguments that they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vllm_steer.config import LIMITS, SCHEDULER_CLS, WORKER_CLS, Limit, engine_kwargs
from vllm_steer.errors import SteeringError

ENABLE = "--enable-steering"
MIDDLEWARE = "vllm_steer.serve.middleware.SteeringMiddleware"
MAX_BODY = Limit("max_body_mib", 64, 1, 1 << 16, "largest HTTP body with steering fields, in MiB")

_FLAGS: tuple[Limit, ...] = (*LIMITS, MAX_BODY)
_TAKEN = {"worker_cls": (WORKER_CLS, "auto", None), "scheduler_cls": (SCHEDULER_CLS, None)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``Steering``; what ``parser`` parses from then on has gone through :func:`apply_flags`.

    It is applied at parsing since vLLM also hands parsed flags to processes in which no plug-in has run yet
    (``--data-parallel-multi-port-external-lb``). Wrong flags end as the parser's own errors do: with a
    sentence and exit status 2.
    """
    group = parser.add_argument_group("Steering", "Activation steering of single requests (vllm-steer).")
    group.add_argument(
        ENABLE,
        action="store_true",
        default=False,
        help="Serve the request fields steering_vectors, prefill_steering_vectors, decode_steering_vectors "
        "and steering.",
    )
    for limit in _FLAGS:
        group.add_argument(
            _flag(limit),
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
    values = {limit.name: getattr(args, _dest(limit), None) for limit in _FLAGS}
    given = {name: value for name, value in values.items() if value is not None}
    if getattr(args, "enable_steering", False):
        _enable(args, {limit.name: given[limit.name] for limit in LIMITS if limit.name in given})
    elif given:
        flags = ", ".join(_flag(limit) for limit in _FLAGS if limit.name in given)
        raise SteeringError(flags, f"has no effect without {ENABLE}; add that, or leave it out")
    if hasattr(args, "middleware"):
        if MIDDLEWARE not in args.middleware:
            args.middleware = [*args.middleware, MIDDLEWARE]
    elif MAX_BODY.name in given:
        raise SteeringError(_flag(MAX_BODY), "has no effect here: this command serves no HTTP requests")


def max_body_bytes(args: object) -> int:
    """The limit of an HTTP body with steering fields, in bytes, from the parsed flags of a server."""
    mebibytes = getattr(args, _dest(MAX_BODY), None)
    return int(MAX_BODY.default if mebibytes is None else mebibytes) << 20


def _enable(args: argparse.Namespace, sizes: dict[str, int]) -> None:
    for name, allowed in _TAKEN.items():
        if getattr(args, name, None) not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise SteeringError(flag, f"{ENABLE} brings its own; leave one of the two out")
    additional = getattr(args, "additional_config", None) or {}
    if not isinstance(additional, dict):
        raise SteeringError("--additional-config", f"must be a JSON object to go with {ENABLE}")
    ours = engine_kwargs(sizes, additional)
    section = additional.get("steering")
    if section is not None and section != ours["additional_config"]["steering"]:
        raise SteeringError("--additional-config", f"{ENABLE} sets its section steering; leave one out")
    for name, value in ours.items():
        setattr(args, name, value)


def _dest(limit: Limit) -> str:
    return f"steering_{limit.name}"


def _flag(limit: Limit) -> str:
    return f"--{_dest(limit).replace('_', '-')}"


def _number_within(limit: Limit) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text.isascii() and text.isdecimal() and limit.low <= int(text[:20]) <= limit.high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number, {limit.low} to {limit.high}, not {text!r}")

    return number
