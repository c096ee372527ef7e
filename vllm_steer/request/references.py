# SPDX-License-Identifier: Apache-2.0
"""References from requests to registered modules and their probes."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_DOSE, MAX_REFERENCES
from vllm_steer.request.scalars import read_dose, read_number, shown

MODULES_FIELD = "steering_modules"
ANY_SITE_FLAG = "--steering-sae-any-site"
GLOBAL_SOURCE = "global steering"
"""Path of the edits of global steering, in messages."""
SERVER_WIDE_SOURCE = "capture_consumers"
"""Begins the path of a server-wide capture, in messages."""
REGISTER = "register one with `vllm-steer modules add NAME FILE`, llm.steering.register_file or --steering-modules"
NAME_RULE = "1 to 64 ASCII letters, digits, dots, dashes and underscores, beginning with a letter or digit"

# ASCII only, so that two different names cannot look alike.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCALED_NAME = re.compile(r"(?!sha256:)([A-Za-z0-9][A-Za-z0-9._-]{0,63})[:=](-?[0-9]{1,9}(?:\.[0-9]{1,9})?)")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


Dose = Annotated[float, msgspec.Meta(ge=-MAX_DOSE, le=MAX_DOSE, extra={"read": read_dose})]
"""A dose in a declared field."""


class DosedReferenceForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A reference to a module of vectors, and their dose."""

    module: Annotated[str, msgspec.Meta(description="`name`, `name@sha256:...` or `sha256:...`.")]
    dose: Annotated[
        Dose,
        msgspec.Meta(
            description="Norm of each added vector divided by the median norm of the stream at its layer, which the "
            "module's provenance must tell."
        ),
    ]


ReferencesForm = Annotated[
    list[str | Annotated[list[str | float], msgspec.Meta(min_length=2, max_length=2)] | DosedReferenceForm],
    msgspec.Meta(
        max_length=MAX_REFERENCES,
        description="Registered modules: `name`, `name@sha256:...`, `sha256:...`, or a pair of such a reference and a "
        'scale that multiplies the strength of the module\'s edits, or `{"module": reference, "dose": number}`.',
    ),
]
"""JSON form of a list of module references."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Reference to a module by name, by content, or by both, with a scale."""

    name: str | None
    """None: any module with the digest."""
    digest: str | None
    """``sha256:`` and 64 hexadecimal digits; None: the current version of the name."""
    scale: float = 1.0
    """Multiplies the strength of every edit of the module."""
    dose: float | None = None
    """Dose of every vector of the module, instead of `scale`."""

    def __str__(self) -> str:
        return "@".join(part for part in (self.name, self.digest) if part is not None)

    def to_wire(self) -> Any:
        """Return the JSON form."""
        return [str(self), self.scale] if self.dose is None else {"module": str(self), "dose": self.dose}


class ProbeReference(msgspec.Struct, frozen=True, array_like=True):
    """Reference to one probe of a module, written ``module/probe``."""

    module: Reference
    probe: str

    def __str__(self) -> str:
        return f"{self.module}/{self.probe}"


def read_name(value: object, field: str) -> str:
    """Return a module or probe name; raise SteeringError if it violates `NAME_RULE`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise SteeringError(field, f"{shown(value)} is not a valid name; use {NAME_RULE}")
    return str(value)


Name = Annotated[str, msgspec.Meta(extra={"read": read_name})]
"""A name in a declared field."""


def parse_reference(value: object, field: str) -> Reference:
    """Parse ``"calm"``, ``"calm@sha256:..."``, ``"sha256:..."``, a pair of such a reference and a scale, or a dose.

    Raises:
        SteeringError: ``value`` has another form.
    """
    if isinstance(value, Reference):
        value = value.to_wire()
    if isinstance(value, Mapping) and ("dose" in value or "module" in value):
        if "scale" in value or "strength" in value:
            problem = (
                "has a dose and a scale; give one of them, a scale" if "dose" in value else "has a scale; write it"
            )
            raise SteeringError(field, f'{problem} as in ["calm", 1.5]')
        if unknown := [key for key in value if key not in DosedReferenceForm.__struct_fields__]:
            example = '{"kind": "add", "vector": {"module": "calm"}, ...}'
            problem = f"unknown key {shown(unknown[0])}; a reference has module and dose"
            raise SteeringError(field, f"{problem}. For other fields, send an edit in steering: {example}")
        if missing := [key for key in DosedReferenceForm.__struct_fields__ if key not in value]:
            raise SteeringError(f"{field}.{missing[0]}", 'is missing; write {"module": "calm", "dose": 0.5}')
        reference = _parse_unscaled(value["module"], f"{field}.module")
        if value["dose"] is None:
            raise SteeringError(f"{field}.dose", "is null; give a number, or the name alone for scale 1")
        return msgspec.structs.replace(reference, dose=read_dose(value["dose"], f"{field}.dose"))
    if isinstance(value, (list, tuple)) and len(value) == 2:
        reference = _parse_unscaled(value[0], f"{field}[0]")
        return msgspec.structs.replace(reference, scale=read_number(value[1], f"{field}[1]"))
    if not isinstance(value, (str, PurePath)):
        raise SteeringError(
            field,
            f'must be a name, a pair such as ["calm", 1.5] or {{"module": "calm", "dose": 0.3}}, not {shown(value)}',
        )
    if scaled := _SCALED_NAME.fullmatch(str(value)):
        raise SteeringError(
            field, f'{value!r} is not a valid name; a scale is the second item of a pair: ["{scaled[1]}", {scaled[2]}]'
        )
    return _parse_unscaled(value, field)


def parse_references(value: object, field: str = MODULES_FIELD) -> tuple[Reference, ...]:
    """Parse the ``steering_modules`` field: a list of references in the forms of `parse_reference`, or None."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise SteeringError(field, f'must be a list of modules such as ["calm", ["terse", 0.5]], not {shown(value)}')
    if not value:
        raise SteeringError(field, "is empty; name a module, or omit the field")
    if len(value) > MAX_REFERENCES:
        raise SteeringError(field, f"names {len(value)} modules; a request may name at most {MAX_REFERENCES}")
    if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], (int, float)):
        raise SteeringError(field, f"is a pair; write a list of pairs: [{shown(tuple(value))}]")
    return tuple(parse_reference(item, f"{field}[{i}]") for i, item in enumerate(value))


def parse_probe(value: object, field: str) -> ProbeReference:
    """Parse ``"calm/anger"``: the probe ``anger`` of the module ``calm``, which may have a digest."""
    if isinstance(value, ProbeReference):
        value = str(value)
    if not isinstance(value, str) or "/" not in value:
        raise SteeringError(field, f'must be a probe of a module such as "calm/anger", not {shown(value)}')
    module, _, probe = value.partition("/")
    return ProbeReference(_parse_unscaled(module, field), read_name(probe, field))


def _parse_unscaled(value: object, field: str) -> Reference:
    if isinstance(value, PurePath) or (isinstance(value, str) and re.search(r"[/\\]", value)):
        raise SteeringError(field, f"{shown(str(value))} is a path, not the name of a module; {REGISTER}")
    if not isinstance(value, str):
        raise SteeringError(field, f"must be a module name, not {shown(value)} ({type(value).__name__})")
    name, at, digest = value.partition("@")
    if not at and name.startswith("sha256:"):
        name, digest = "", name
    if (at or digest) and not _DIGEST.fullmatch(digest):
        raise SteeringError(field, f"{shown(value)} has an invalid digest; use sha256: and 64 hexadecimal digits")
    return Reference(None if not at and digest else read_name(name, field), digest or None)
