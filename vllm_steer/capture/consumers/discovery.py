# SPDX-License-Identifier: Apache-2.0
"""Lookup of consumers by name, and parsing of their options. Installed packages offer consumers by entry point."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from vllm_steer.capture.consumers.base import Consumer, convert_option
from vllm_steer.capture.server_wide import FLAG_KEYS, parse_flag_value, parse_server_wide
from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import did_you_mean, shown

ENTRY_POINT_GROUP = "vllm_steer.capture_consumers"
_FLAG = "--capture-consumers"
Offered = TypeVar("Offered")

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "memory": "vllm_steer.capture.consumers.memory:MemoryConsumer",
        "filesystem": "vllm_steer.capture.consumers.filesystem:FilesystemConsumer",
        "logging": "vllm_steer.capture.consumers.logging:LoggingConsumer",
    }
)


def consumer_names() -> tuple[str, ...]:
    """Return the names of all consumers: built-in ones first, then those of installed packages."""
    return (*BUILT_IN, *sorted(set(entry_points(group=ENTRY_POINT_GROUP).names) - set(BUILT_IN)))


def how_to_add(name: str) -> str:
    """Return how to start an engine with a consumer, as part of an error message."""
    flag, argument = (":root=DIR", '{"root": DIR}') if name == "filesystem" else ("", "{}")
    return f'{_FLAG} {name}{flag}, or capture_consumers={{"{name}": {argument}}} of LLM or AsyncLLM.from_engine_args'


def read_consumers(value: object, field: str = "capture_consumers") -> dict[str, Mapping[str, Any]]:
    """Return the options of consumers by name, given as ``{name: options}``; None means no options.

    Raises:
        SteeringError: ``value`` has another form, or a consumer does not exist.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SteeringError(
            field,
            f'must be {{name: options}} such as {{"filesystem": {{"root": "acts"}}}}, not {shown(value)} '
            f"({type(value).__name__})" + ("; write " + json.dumps(meant) if (meant := _as_mapping(value)) else ""),
        )
    consumers: dict[str, Mapping[str, Any]] = {}
    for name, options in value.items():
        if options is not None and not isinstance(options, Mapping):
            raise SteeringError(f"{field}.{name}", f"must be a dict of options, not {shown(options)}")
        consumer_class(name, field)
        consumers[name] = options or {}
    return consumers


def _as_mapping(value: object) -> dict[str, Any]:
    """Convert a list of names, or of dicts with ``name`` and ``params``, to a mapping; empty if it is neither."""
    meant: dict[str, Any] = {}
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, str) and item in BUILT_IN:
            meant[item] = {}
        elif isinstance(item, Mapping) and item.get("name") in BUILT_IN:
            params = item.get("params")
            meant[item["name"]] = {key: str(params[key]) for key in params} if isinstance(params, Mapping) else {}
        else:
            return {}
    return meant


def consumer_class(name: str, field: str = _FLAG) -> type[Consumer]:
    """Return the class of a consumer.

    Args:
        name: Name of the consumer.
        field: Where the name was given, for errors.

    Raises:
        SteeringError: The consumer does not exist, cannot be loaded, or is offered by several packages.
    """
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in BUILT_IN:
        if found:
            raise SteeringError(field, f"{_package(found[0])} offers {name!r}, which is a built-in consumer")
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Consumer] = getattr(import_module(module), attribute)
        return built_in
    if not found:
        names = consumer_names()
        hint = did_you_mean(name, names)
        raise SteeringError(field, f"unknown consumer {shown(name)}; available: {', '.join(names)}{hint}")
    return load_offered(found, Consumer, field)  # type: ignore[type-abstract]


def load_offered(found: Sequence[EntryPoint], base: type[Offered], field: str) -> type[Offered]:
    """Return the class that an installed package offers under a name.

    Args:
        found: Entry points with the name, at least one.
        base: Class of which it must be a subclass.
        field: Where the name was given, for errors.

    Raises:
        SteeringError: Several packages offer the name, or the class cannot be loaded or used.
    """
    name, kind = found[0].name, base.__name__.lower()
    if len(found) > 1:
        raise SteeringError(field, f"{' and '.join(map(_package, found))} both offer a {kind} {name!r}; uninstall one")
    (entry_point,) = found
    package = _package(entry_point)
    try:
        offered = entry_point.load()
    except Exception as error:
        raise SteeringError(field, f"cannot load the {kind} {name!r} of {package}: {error}") from error
    if not (inspect.isclass(offered) and issubclass(offered, base)):
        raise SteeringError(field, f"{entry_point.value} of {package} is not a subclass of {base.__name__}")
    if getattr(offered, "name", None) != name:
        raise SteeringError(
            field, f"{entry_point.value} of {package} has name {shown(getattr(offered, 'name', None))}, not {name!r}"
        )
    return offered


def make_consumer(name: str, options: Mapping[str, Any] | None = None, field: str = _FLAG) -> Consumer:
    """Create a consumer, with its options converted to the types that its ``__init__`` annotates.

    Args:
        name: Name of the consumer.
        options: Options by name.
        field: Where the consumer was configured, for errors: the flag or an argument of the ``LLM``.

    Raises:
        SteeringError: The consumer or an option is unknown, or an option is missing or invalid.
    """
    consumer = consumer_class(name, field)
    converted = convert_options(consumer, options or {}, f"{field}.{name}")
    try:
        return consumer(**converted)
    except SteeringError as error:
        raise SteeringError(f"{field}.{name}.{error.field}", error.problem) from error


def parse_consumer_flag(text: str, field: str = _FLAG) -> tuple[str, dict[str, Any]]:
    """Parse ``NAME`` or ``NAME:key=value,key=value``.

    The keys ``hooks``, ``positions``, ``before`` and ``dtype`` form a spec for every request
    (`vllm_steer.capture.server_wide`); other keys are options of the consumer.

    Returns:
        The consumer's name and its converted options.

    Raises:
        SteeringError: As for `make_consumer`, except for errors that only the constructor finds.
    """
    name, colon, rest = text.partition(":")
    consumer = consumer_class(name, field)
    prefix = f"{field}.{name}"
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            hint = "join layers with +: post_block:4+5" if "hooks" in options else f"write {name}:a=1,b=2"
            raise SteeringError(prefix, f"{shown(item)} is not key=value, and values cannot contain a comma; {hint}")
        if key in options:
            raise SteeringError(prefix, f"{key} is given twice")
        options[key] = value
    spec = {key: parse_flag_value(key, options.pop(key), prefix) for key in FLAG_KEYS if key in options}
    if spec:
        parse_server_wide(name, spec, field)
    return name, {**convert_options(consumer, options, prefix), **spec}


def convert_options(offered: type[Any], options: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the arguments of a class's ``__init__``, converted to the types that it annotates.

    Args:
        offered: The class of a consumer or a controller.
        options: Values by name.
        field: Path of the options, for errors; a path of a flag makes errors name the options as in flags.

    Raises:
        SteeringError: An option is unknown, missing or invalid.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(offered).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    for key in options:
        if key not in parameters:
            hint = did_you_mean(key, parameters)
            raise SteeringError(field, f"unknown option {shown(key)}; options: {', '.join(parameters) or 'none'}{hint}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            in_flag = field.startswith("--")
            example = f"{offered.name}:{key}=..." if in_flag else f'{{"{offered.name}": {{"{key}": ...}}}}'
            raise SteeringError(f"{field}.{key}", f"is missing; write {example}")
    hints = get_type_hints(offered.__init__, include_extras=True)
    return {key: convert_option(hints.get(key, str), value, f"{field}.{key}") for key, value in options.items()}


def _package(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.value
