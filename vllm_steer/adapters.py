# SPDX-License-Identifier: Apache-2.0
"""Functions for interfaces of other libraries on this engine, such as those in ``vllm_steer.peers``.

An adapter translates the requests of another library to fields of this project, and results back. It raises
`vllm_steer.SteeringError` for what it cannot serve, with the texts that all modules of this project use. Further
parts of an adapter: ``LLM.capabilities``, the functions of ``vllm_steer.client``, and for servers
``vllm_steer.server.extension``.
"""

from vllm_steer.errors import install_hint
from vllm_steer.frontend.logprobs import RAW, check_logprobs_mode
from vllm_steer.lazy import imported_on_use
from vllm_steer.limits import MAX_EDITS
from vllm_steer.request.request_form import RequestForm
from vllm_steer.request.scalars import MASK_HINT, is_integer, read_choice, read_number, refuse_repeated, shown
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS, problem_of
from vllm_steer.request.vector import PACKED_KEYS, decode_packed, pack_array, parse_vector, read_packed_dtype
from vllm_steer.site_names import find_foreign_site

__all__ = [
    "FIELDS_OF_OTHERS",
    "MASK_HINT",
    "MAX_EDITS",
    "PACKED_KEYS",
    "RAW",
    "REQUEST_FIELDS",
    "check_logprobs_mode",
    "decode_packed",
    "find_foreign_site",
    "imported_on_use",
    "install_hint",
    "is_integer",
    "pack_array",
    "parse_vector",
    "problem_of",
    "read_choice",
    "read_number",
    "read_packed_dtype",
    "refuse_repeated",
    "shown",
]

REQUEST_FIELDS: tuple[str, ...] = RequestForm.__struct_fields__
"""Names of the fields with which requests steer and capture."""
