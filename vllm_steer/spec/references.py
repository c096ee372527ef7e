# SPDX-License-Identifier: Apache-2.0
"""Names of modules, and how a request refers to them: by name, by content, or by both, with a scale."""

import re
from typing import Any, TypeAlias

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_REFERENCES
from vllm_steer.spec.scalars import read_number, shown

ReferenceInput: TypeAlias = "str | tuple[str, float] | list[Any] | Reference"

MODULES_FIELD = "steering_modules"
NAME_RULE = "1 to 64 ASCII letters, digits, dots, dashes and underscores, beginning with a letter or digit"

# ASCII alone: its compatibility forms (NFKC) are itself, so no two names look alike to a reader and differ to us.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """One module that a request wants applied."""

    name: str | None
    """None: whatever module has the digest."""
    digest: str | None
    """``sha256:`` and 64 hexadecimal digits; None: the version that the name has now."""
    scale: float = 1.0
    """Multiplies the strength of every edit of the module."""

    def __str__(self) -> str:
        return "@".join(part for part in (self.name, self.digest) if part is not None)


class ProbeReference(msgspec.Struct, frozen=True, array_like=True):
    """One probe direction of a module, written ``module/probe``."""

    module: Reference
    probe: str

    def __str__(self) -> str:
        return f"{self.module}/{self.probe}"


def read_name(value: object, field: str) -> str:
    """``value`` if it is a name as `NAME_RULE` says."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise SteeringError(field, f"{shown(value)} is no name; a name is {NAME_RULE}")
    return str(value)


def parse_reference(value: object, field: str) -> Reference:
    """Read ``"calm"``, ``"calm@sha256:..."``, ``"sha256:..."`` or a pair of one of them and a scale.

    Raises:
        SteeringError: ``value`` is anything else.
    """
    if isinstance(value, Reference):
        value = (str(value), value.scale)
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise SteeringError(field, f'must be a name or a pair like ["calm", 1.5], not {shown(value)}')
        return msgspec.structs.replace(_named(value[0], f"{field}[0]"), scale=read_number(value[1], f"{field}[1]"))
    return _named(value, field)


def parse_references(value: object, field: str = MODULES_FIELD) -> tuple[Reference, ...]:
    """Read the ``steering_modules`` of a request: a list of what `parse_reference` reads; None counts as absent."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise SteeringError(field, f'must be a list of modules, e.g. ["calm", ["terse", 0.5]], not {shown(value)}')
    if not value:
        raise SteeringError(field, "is empty; name a module, or leave it out")
    if len(value) > MAX_REFERENCES:
        raise SteeringError(field, f"names {len(value)} modules; a request may name {MAX_REFERENCES}")
    return tuple(parse_reference(item, f"{field}[{i}]") for i, item in enumerate(value))


def parse_probe(value: object, field: str) -> ProbeReference:
    """Read ``"calm/anger"``: the probe ``anger`` of the module ``calm``, which may be written with its digest."""
    if isinstance(value, ProbeReference):
        value = str(value)
    if not isinstance(value, str) or "/" not in value:
        raise SteeringError(field, f'must name a probe of a module, e.g. "calm/anger", not {shown(value)}')
    module, _, probe = value.partition("/")
    return ProbeReference(_named(module, field), read_name(probe, field))


def _named(value: object, field: str) -> Reference:
    if not isinstance(value, str):
        raise SteeringError(field, f"must be the name of a module, not {shown(value)} ({type(value).__name__})")
    name, at, digest = value.partition("@")
    if not at and name.startswith("sha256:"):
        name, digest = "", name
    if (at or digest) and not _DIGEST.fullmatch(digest):
        raise SteeringError(field, f"{shown(value)} has no digest: that is sha256: and 64 hexadecimal digits")
    return Reference(None if not at and digest else read_name(name, field), digest or None)
