# SPDX-License-Identifier: Apache-2.0
"""Consumers by name: the built-in ones, and those that installed packages offer by entry point."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from vllm_steer.capture.consumers.base import Consumer
from vllm_steer.capture.server_wide import FLAG_KEYS, read_flag_value
from vllm_steer.errors import SteeringError
from vllm_steer.spec import parse_capture
from vllm_steer.spec.scalars import shown

GROUP = "vllm_steer.capture_consumers"
FLAG = "--capture-consumers"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "memory": "vllm_steer.capture.consumers.memory:MemoryConsumer",
        "filesystem": "vllm_steer.capture.consumers.filesystem:FilesystemConsumer",
        "logging": "vllm_steer.capture.consumers.logging:LoggingConsumer",
    }
)


def consumer_names() -> tuple[str, ...]:
    """The names that `consumer_class` knows: the built-in ones, then those of installed packages."""
    return (*BUILT_IN, *sorted(set(entry_points(group=GROUP).names) - set(BUILT_IN)))


def consumer_class(name: str, field: str = FLAG) -> type[Consumer]:
    """The class of a consumer.

    Raises:
        SteeringError: there is none of that name, several packages offer one, or it cannot be loaded.
    """
    found = tuple(entry_points(group=GROUP, name=name))
    if name in BUILT_IN:
        if found:
            raise SteeringError(field, f"{_package(found[0])} offers a consumer named {name}, which is a built-in one")
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Consumer] = getattr(import_module(module), attribute)
        return built_in
    if not found:
        raise SteeringError(field, f"{shown(name)} is no consumer; there are {', '.join(consumer_names())}")
    if len(found) > 1:
        raise SteeringError(field, f"{' and '.join(map(_package, found))} both offer a consumer named {name}")
    try:
        offered = found[0].load()
    except Exception as error:
        raise SteeringError(field, f"{name} of {_package(found[0])} cannot be loaded: {error}") from error
    if not (inspect.isclass(offered) and issubclass(offered, Consumer)):
        raise SteeringError(field, f"{found[0].value} of {_package(found[0])} is no subclass of Consumer")
    if getattr(offered, "name", None) != name:
        raise SteeringError(field, f"{found[0].value} calls itself {shown(getattr(offered, 'name', None))}, not {name}")
    return offered


def make_consumer(name: str, options: Mapping[str, Any] | None = None, field: str = FLAG) -> Consumer:
    """A consumer, its options converted to what its ``__init__`` annotates.

    Raises:
        SteeringError: the consumer or an option is unknown, an option is missing or its value wrong, or the consumer
            refuses it.
    """
    consumer = consumer_class(name, field)
    return consumer(**_converted(consumer, options or {}, f"{field} {name}"))


def parse_consumer_flag(text: str, field: str = FLAG) -> tuple[str, dict[str, Any]]:
    """Read ``NAME`` or ``NAME:key=value,key=value``: the name, and its options converted.

    ``hooks``, ``positions``, ``before`` and ``dtype`` are not the consumer's: they make a spec for every request.

    Raises:
        SteeringError: as `make_consumer`, but for what only making the consumer can show.
    """
    name, colon, rest = text.partition(":")
    consumer = consumer_class(name, field)
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise SteeringError(
                f"{field} {name}", f"{shown(item)} is not key=value; a value cannot hold a comma, write {name}:a=1,b=2"
            )
        if key in options:
            raise SteeringError(f"{field} {name}", f"gives {key} twice")
        options[key] = value
    spec = {key: read_flag_value(key, options.pop(key), f"{field} {name}") for key in FLAG_KEYS if key in options}
    if spec:
        parse_capture({name: spec}, field)
    return name, {**_converted(consumer, options, f"{field} {name}"), **spec}


def _converted(consumer: type[Consumer], options: Mapping[str, Any], field: str) -> dict[str, Any]:
    known = _options_of(consumer)
    unknown = [key for key in options if key not in known]
    if unknown:
        raise SteeringError(field, f"unknown option {shown(unknown[0])}; it has: {', '.join(known) or 'none'}")
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in options]
    if missing:
        raise SteeringError(f"{field}.{missing[0]}", f"is missing; write {consumer.name}:{missing[0]}=...")
    hints = get_type_hints(consumer.__init__, include_extras=True)
    converted = {}
    for key, value in options.items():
        try:
            converted[key] = TypeAdapter(hints.get(key, str)).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"]
            raise SteeringError(f"{field}.{key}", f"{problem}; not {shown(value)}") from None
    return converted


def _options_of(consumer: type[Consumer]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(consumer).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def _package(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.value
