# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: parsed and checked once, at the edge, into frozen objects."""

from vllm_steer.spec.edit import KINDS, Edit, Kind, KindName
from vllm_steer.spec.fields import FIELD_NAMES, parse_fields
from vllm_steer.spec.selector import END, Selector
from vllm_steer.spec.vector import Vector, pack_vector, parse_vector

__all__ = [
    "END",
    "FIELD_NAMES",
    "KINDS",
    "Edit",
    "Kind",
    "KindName",
    "Selector",
    "Vector",
    "pack_vector",
    "parse_fields",
    "parse_vector",
]
