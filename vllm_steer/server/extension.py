# SPDX-License-Identifier: Apache-2.0
"""Functions for ASGI middlewares in front of the server, such as those of ``--steering-peers``.

Such a middleware runs ahead of authentication. It may change a body when the server reads it, which is after
authentication, so the checks, rights and quotas of the changed request apply.
"""

from vllm_steer.server.auth.current_key import require_field_rights
from vllm_steer.server.http.body_checks import body_checks
from vllm_steer.server.http.error_response import BodyTooLargeError, error_response
from vllm_steer.server.routes.base import COUNTED_KEY, app_path
from vllm_steer.server.routes.capabilities import ROUTE as CAPABILITIES
from vllm_steer.server.settings import max_body_bytes

__all__ = [
    "CAPABILITIES",
    "COUNTED_KEY",
    "BodyTooLargeError",
    "app_path",
    "body_checks",
    "error_response",
    "max_body_bytes",
    "require_field_rights",
]
