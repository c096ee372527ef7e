# SPDX-License-Identifier: Apache-2.0
"""Request fields: their JSON forms, and their parsing and validation to immutable objects."""

from vllm_steer.request.capture import CaptureSpec, parse_capture
from vllm_steer.request.condition import Bound, Condition, Stop, parse_stops
from vllm_steer.request.edit import KINDS, Edit, EditKind, KindName
from vllm_steer.request.edit_fields import FIELD_NAMES, parse_fields
from vllm_steer.request.projection import NamedProjection, Projection, projection_digest
from vllm_steer.request.readout import Readout, parse_readouts
from vllm_steer.request.references import Reference, parse_references
from vllm_steer.request.request_form import RequestForm
from vllm_steer.request.selector import OPEN_END, Selector
from vllm_steer.request.vector import Vector, bytes_of, content_digest, pack_vector, parse_vector

__all__ = [
    "FIELD_NAMES",
    "KINDS",
    "OPEN_END",
    "Bound",
    "CaptureSpec",
    "Condition",
    "Edit",
    "EditKind",
    "KindName",
    "NamedProjection",
    "Projection",
    "Readout",
    "Reference",
    "RequestForm",
    "Selector",
    "Stop",
    "Vector",
    "bytes_of",
    "content_digest",
    "pack_vector",
    "parse_capture",
    "parse_fields",
    "parse_readouts",
    "parse_references",
    "parse_stops",
    "parse_vector",
    "projection_digest",
]
