# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas of msgspec types."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Schema: TypeAlias = dict[str, Any]


def json_schema(form: Any) -> Schema:
    """Return the JSON Schema of a type, with references replaced by the definitions they name."""
    schema = msgspec.json.schema(form)
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        inlined = {key: inline(value) for key, value in part.items() if key not in ("$ref", "title")}
        if "$ref" in part:
            inlined = {**inline(definitions[part["$ref"].rpartition("/")[2]]), **inlined}
        return inlined

    whole: Schema = inline(schema)
    return whole


def any_of(*forms: Any) -> msgspec.Meta:
    """Return metadata for ``Annotated[Any, ...]``: a union that msgspec's own unions cannot express.

    These may contain one object type at most.
    """
    return msgspec.Meta(extra_json_schema={"anyOf": [json_schema(form) for form in forms]})
