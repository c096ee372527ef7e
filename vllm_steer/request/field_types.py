# SPDX-License-Identifier: Apache-2.0
"""Declaration of request fields: one msgspec type that decodes, checks, is the wire form and yields the JSON Schema.

msgspec decodes and checks a correct value in one call. It refuses another one without reading it further;
:func:`read` then reads it field by field, to name the path, the value and the remedy, and to accept numpy numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import (
    FLOAT32_MAX,
    did_you_mean,
    read_choice,
    read_flag,
    read_integer,
    read_number,
    shown,
)

Schema: TypeAlias = dict[str, Any]
Number = Annotated[float, msgspec.Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
"""A number that is finite in float32."""


_ANY_OF = "any_of"
"""Key of a union in the metadata of a field; msgspec's own replaces it if the key is ``anyOf``."""


class Declared(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the types that declare request fields.

    ``__post_init__`` checks rules between fields; its errors have paths relative to the object. A field of another
    class is read by the ``parse`` of that class and written by its ``to_wire``. ``extra`` in the metadata of a field
    may have ``missing``, the problem if the field is absent, ``aliases``, names that other interfaces use, ``what``,
    the noun of an integer, and ``read``, a function that reads a value for a path.
    """

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form, without the fields that have their defaults."""
        builtins: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda value: value.to_wire())
        return builtins


_BUILTINS = frozenset({dict, list, tuple, str, int, float, bool, type(None)})
T = TypeVar("T", bound=Declared)


def read(form: type[T], value: object, field: str) -> T:
    """Return the object that a mapping of the fields of ``form`` describes, or ``value`` itself if it is one.

    Args:
        form: The declared type.
        value: Any object.
        field: Path of the value, for errors.

    Raises:
        SteeringError: ``value`` has another form. Its ``field`` is the path of the invalid value.
    """
    if isinstance(value, form):
        return value
    # Of other mappings msgspec ignores unknown keys, and it takes arrays for mappings.
    if type(value) is dict and _BUILTINS.issuperset(map(type, value.values())):
        with suppress(msgspec.ValidationError, UnicodeError):  # lone surrogates cannot be compared
            return msgspec.convert(value, form, dec_hook=lambda cls, item: cls.parse(item, ""))
    return _read_fields(form, value, field)


def check_keys(value: object, names: tuple[str, ...], field: str, aliases: Mapping[str, str] | None = None) -> None:
    """Raise SteeringError if ``value`` is not a mapping, or has a key that is not among ``names``."""
    if not isinstance(value, Mapping):
        raise SteeringError(field, f"must be a dict with {', '.join(names)}, not {shown(value)}")
    for key in value:
        if key not in names:
            similar = did_you_mean(key, names, aliases or {})
            raise SteeringError(field, f"unknown key {shown(key)}; use {', '.join(names)}{similar}")


def join(field: str, inner: str) -> str:
    """Return the path of a value below ``field``; either may be empty."""
    return f"{field}.{inner}" if field and inner else field or inner


def _read_fields(form: type[T], value: Any, field: str) -> T:
    declared = _fields_of(form)
    check_keys(value, tuple(each.encode_name for each in declared), field)
    given = {}
    for each in declared:
        path = join(field, each.encode_name)
        if each.encode_name in value:
            given[each.name] = reader(each.type)(value[each.encode_name], path)
        elif each.required:
            raise SteeringError(path, f"is missing{extra(each.type).get('missing', '')}")
    try:
        return form(**given)
    except SteeringError as error:
        raise SteeringError(join(field, error.field), error.problem) from None


@cache
def _fields_of(form: type[Declared]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a declared type. msgspec evaluates annotations in each call, which takes milliseconds."""
    return msgspec.structs.fields(form)


def extra(kind: Any) -> dict[str, Any]:
    """Return what the metadata of an annotated type has besides msgspec's own."""
    return {key: value for meta in kind.__metadata__ for key, value in (meta.extra or {}).items()}


def reader(kind: Any, bounds: Mapping[str, Any] = MappingProxyType({})) -> Callable[[Any, str], Any]:
    """Return the function that reads a value as an annotated type with these bounds.

    It takes the value and its path, and raises SteeringError if the value has another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = {"low": args[1].ge, "high": args[1].le, **extra(kind)}
        return own["read"] if "read" in own else reader(args[0], own)
    if origin in (Union, UnionType):  # the only unions are those with null
        inner = reader(args[0], bounds)
        return lambda value, path: None if value is None else inner(value, path)
    if origin is Literal:
        return lambda value, path: read_choice(value, args, path, aliases=bounds.get("aliases", {}))
    if kind is int:
        return lambda value, path: read_integer(value, bounds["low"], bounds["high"], path, bounds.get("what", ""))
    if kind in (float, bool):
        return read_number if kind is float else read_flag
    if isinstance(kind, type) and issubclass(kind, Declared):
        return partial(read, kind)
    return getattr(kind, "parse", lambda value, path: value)  # other types are read by __post_init__


def json_schema(form: Any) -> Schema:
    """Return the JSON Schema of a type, with references replaced by the definitions they name."""
    schema = msgspec.json.schema(form, schema_hook=lambda cls: {"title": cls.__name__})
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        inlined = {key: inline(value) for key, value in part.items() if key not in ("$ref", "title")}
        for key in ("minimum", "maximum"):
            if abs(inlined.get(key, 0)) == FLOAT32_MAX:  # of Number
                del inlined[key]
        if _ANY_OF in inlined:  # instead of the schema of the type
            kept = {key: inlined[key] for key in ("description", "default") if key in inlined}
            inlined = kept | ({"anyOf": inlined[_ANY_OF]} if len(inlined[_ANY_OF]) > 1 else inlined[_ANY_OF][0] | kept)
        if "$ref" in part:
            inlined = {**inline(definitions[part["$ref"].rpartition("/")[2]]), **inlined}
        return inlined

    whole: Schema = inline(schema)
    return whole


def form_of(cls: type, *omitted: str, closed: bool = True) -> Any:
    """Return the JSON form of a class whose attributes are the arguments of its constructor, as a msgspec type.

    The annotated attributes have the types, bounds and descriptions; the arguments have the defaults. Attributes
    with `any_of` have these forms instead of their types.

    Args:
        cls: The class.
        omitted: Arguments that are not in the form.
        closed: Whether objects may have no other keys.
    """
    types, arguments = get_type_hints(cls, include_extras=True), inspect.signature(cls).parameters
    fields: list[Any] = [
        (name, _form_type(types[name]), *(() if each.default is each.empty else (each.default,)))
        for name, each in arguments.items()
        if name not in omitted
    ]
    text = (cls.__doc__ or "").partition("\n")[0]
    return msgspec.defstruct(
        cls.__name__, fields, kw_only=True, forbid_unknown_fields=closed, namespace={"__doc__": text}
    )


def _form_type(kind: Any) -> Any:
    given = any(_ANY_OF in (meta.extra_json_schema or {}) for meta in kind.__metadata__)
    return Annotated[(Any, *kind.__metadata__)] if given else kind


def any_of(*forms: Any) -> msgspec.Meta:
    """Return metadata with JSON forms that msgspec's unions, of one object type at most, cannot express."""
    return msgspec.Meta(extra_json_schema={_ANY_OF: [json_schema(form) for form in forms]})
