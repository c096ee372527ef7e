# SPDX-License-Identifier: Apache-2.0
"""Translation of parsed steering flags into engine arguments, middleware and environment variables."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vllm_steer.config import SCHEDULER_CLS, WORKER_CLS, engine_kwargs
from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import RegistryOptions
from vllm_steer.fs.shared_tempdir import private_tempdir, remove_at_exit
from vllm_steer.registry.location import HIDDEN, is_url, parse_location, show_location
from vllm_steer.request.message_parts import read_parts
from vllm_steer.request.references import read_name
from vllm_steer.server.auth.key_file import read_keys
from vllm_steer.server.settings import STORE_NAME_DEST, registry_limits
from vllm_steer.settings import (
    BATCH_DESTS,
    CONSUMERS,
    CONSUMERS_VARIABLE,
    CONTROLLER,
    CONTROLLER_VARIABLE,
    ENABLE,
    KEYS,
    MODULES,
    PART,
    PEER_MIDDLEWARE,
    PEERS,
    REGISTRY,
    REGISTRY_VARIABLE,
    SAE,
    SETTINGS,
)

MIDDLEWARE = "vllm_steer.server.http.middleware.SteeringMiddleware"

_REPLACEABLE = {"worker_cls": (WORKER_CLS, "auto", None), "scheduler_cls": (SCHEDULER_CLS, None)}
"""Engine arguments that steering sets, and the values that it may replace."""


def apply_flags(args: argparse.Namespace) -> None:
    """Set the engine arguments, middleware and environment variables for the steering flags.

    A second call has no effect, nor has any call without ``--enable-steering``.

    Raises:
        SteeringError: A flag is wrong; the error names it.
    """
    given = {each.flag: value for each in SETTINGS if (value := getattr(args, each.dest, None)) is not None}
    enabled = getattr(args, "enable_steering", False)
    serves_http = hasattr(args, "middleware")
    if given and not enabled:
        raise SteeringError(", ".join(given), f"has no effect without {ENABLE}; add it")
    if not serves_http:
        supported = BATCH_DESTS if hasattr(args, "output_file") else ()
        unsupported = [s.flag for s in SETTINGS if s.flag in given and not s.of_engine and s.dest not in supported]
        if unsupported:
            raise SteeringError(", ".join(unsupported), "has no effect here: this command serves no HTTP requests")
    if enabled:
        _check_front_end(args)
        _set_engine_arguments(args, _engine_settings(given, args))
        if getattr(args, STORE_NAME_DEST, None) is None:
            name = secrets.token_hex(8)
            setattr(args, STORE_NAME_DEST, name)
            remove_at_exit(name)
    if enabled and serves_http and MIDDLEWARE not in args.middleware:
        # Later entries are outside: middleware of peers translates bodies before they are checked.
        peers = dict.fromkeys(PEER_MIDDLEWARE[name] for name in given.get(PEERS, ()))
        args.middleware = [*args.middleware, MIDDLEWARE, *peers]
    # API server processes inherit the environment of this process.
    if CONSUMERS in given:
        os.environ[CONSUMERS_VARIABLE] = _consumers(given[CONSUMERS])
    if CONTROLLER in given:
        os.environ[CONTROLLER_VARIABLE] = _controller(given[CONTROLLER])
    if enabled and serves_http:
        _set_server_options(args, given)


def _engine_settings(given: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    read = {SAE: lambda texts: _named_paths(texts, SAE), PART: _parts}
    settings = {
        each.name: read.get(each.flag, lambda value: value)(given[each.flag])
        for each in SETTINGS
        if each.of_engine and each.flag in given
    }
    for name, source in (("tool_parser", "tool_call_parser"), ("chat_template", "chat_template")):
        if getattr(args, source, None):
            settings[name] = str(getattr(args, source))
    return settings


def _set_engine_arguments(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    for name, replaceable in _REPLACEABLE.items():
        if getattr(args, name, None) not in replaceable:
            raise SteeringError(
                f"--{name.replace('_', '-')}", f"conflicts with {ENABLE}, which sets it; remove one of them"
            )
    additional = getattr(args, "additional_config", None) or {}
    if not isinstance(additional, dict):
        raise SteeringError("--additional-config", f"must be a JSON object with {ENABLE}")
    arguments = engine_kwargs(settings, additional)
    section = additional.get("steering")
    if section is not None and section != arguments["additional_config"]["steering"]:
        raise SteeringError("--additional-config", f"'steering' conflicts with {ENABLE}, which sets it; remove it")
    for name, value in arguments.items():
        setattr(args, name, value)


def _set_server_options(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    modules = _named_paths(given.get(MODULES, ()), MODULES)
    if REGISTRY not in given:
        # Created by the parent process, because all API server processes share it.
        args.steering_registry = private_tempdir("vllm-steer-registry-")
    if KEYS in given:
        read_keys(Path(args.steering_keys))  # fails now, with a message, instead of in every API server process
        args.steering_keys = str(Path(args.steering_keys).absolute())
    location = _registry_location(args.steering_registry)
    options = RegistryOptions(location, modules, registry_limits(args))
    os.environ[REGISTRY_VARIABLE] = msgspec.json.encode(options).decode()
    # vLLM logs arguments, so they must not contain a password.
    args.steering_registry = show_location(location)


def _registry_location(text: str) -> str:
    """Return the complete location for the value of ``--steering-registry``, which may be one that was shown before."""
    if is_url(text) and HIDDEN in text:
        known = os.environ.get(REGISTRY_VARIABLE)
        location = None if known is None else msgspec.json.decode(known, type=RegistryOptions).folder
        if location is None or show_location(location) != text:
            raise SteeringError(REGISTRY, f"{HIDDEN[:-1]} replaces user and password in logs; give the complete URL")
        return location
    return parse_location(text, REGISTRY)


def _check_front_end(args: argparse.Namespace) -> None:
    """Raise ``SteeringError`` for servers other than vLLM's in Python, which would bypass keys and fields."""
    from vllm_steer.compat.internals import envs

    reason = f"conflicts with {ENABLE}: it bypasses steering and API keys; remove one of them"
    if getattr(args, "grpc", False):
        raise SteeringError("--grpc", reason)
    if envs.VLLM_USE_RUST_FRONTEND and hasattr(args, "middleware"):
        raise SteeringError("VLLM_USE_RUST_FRONTEND", reason)


def _consumers(texts: Sequence[str]) -> str:
    """Return ``{name: options}`` as JSON. Raises ``SteeringError`` for wrong and repeated consumers."""
    from vllm_steer.capture.consumers import parse_consumer_flag  # slow to import, and rarely needed

    consumers: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, options = parse_consumer_flag(text, CONSUMERS)
        if name in consumers:
            raise SteeringError(CONSUMERS, f"{name} is given twice; a server has at most one of each consumer")
        consumers[name] = options
    try:
        return json.dumps(to_jsonable_python(consumers))
    except PydanticSerializationError as error:
        raise SteeringError(CONSUMERS, f"an option cannot be passed to the server's processes: {error}") from None


def _controller(text: str) -> str:
    """Return ``{name: options}`` as JSON. Raises ``SteeringError`` for an unknown controller or option."""
    from vllm_steer.frontend.controllers import read_controller  # slow to import, and rarely needed

    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = item.partition("=")
        if not equals or not key or key in options:
            raise SteeringError(CONTROLLER, f"{item[:80]!r} must be key=value, once; write {name}:a=1,b=2")
        options[key] = value
    read_controller({name: options}, CONTROLLER)
    return json.dumps({name: options})


def _parts(texts: Sequence[str]) -> dict[str, list[int | str]]:
    """Return start and end token of each part. Raises ``SteeringError`` if a part is wrong or repeated."""
    parts: dict[str, list[int | str]] = {}
    for text in texts:
        name, equals, markers = text.partition("=")
        start, comma, end = markers.partition(",")
        if not equals or not comma:
            raise SteeringError(PART, f"must be name=start,end, not {text!r}")
        if name in parts:
            raise SteeringError(PART, f"{name} is given twice")
        parts[name] = [int(each) if each.isdecimal() else each for each in (start, end)]
    read_parts(parts, PART)
    return parts


def _named_paths(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Return absolute paths by name: files of modules, or folders of autoencoders.

    Raises:
        SteeringError: A path does not exist, or a name is wrong or repeated.
    """
    paths: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            form = "name=path" if flag == MODULES else "name=folder"
            raise SteeringError(flag, f"must be {form}, not {text!r}; a model's name comes before the flags")
        if read_name(name, flag) in paths:
            raise SteeringError(flag, f"{name} is given twice")
        if not (Path(path).is_file() if flag == MODULES else Path(path).is_dir()):
            raise SteeringError(flag, f"{'file' if flag == MODULES else 'folder'} not found: {path}")
        paths[name] = str(Path(path).absolute())
    return paths
