# SPDX-License-Identifier: Apache-2.0
"""What users write, as JSON: arrays and tensors packed, edits and specs as dicts."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.spec import Edit, Reference, Selector, pack_vector, parse_vector
from vllm_steer.spec.projection import Projection


def jsonable(value: Any, field: str) -> Any:
    """``value`` in JSON's types; raises SteeringError, naming ``field``, for what has no such form.

    Whether the server takes it is for the server to say.
    """
    if isinstance(value, float):
        return _finite(value, field)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Edit):
        return value.to_wire()
    if isinstance(value, Selector):
        return value.to_wire()
    if isinstance(value, Reference):
        return [str(value), value.scale]
    if isinstance(value, Mapping):
        sent = {str(key): jsonable(item, f"{field}.{key}") for key, item in value.items()}
        if len(sent) != len(value):
            twice = next(key for key, count in Counter(map(str, value)).items() if count > 1)
            raise SteeringError(field, f"has {twice} twice, in two types, and one would be lost; give it once")
        return sent
    if isinstance(value, (list, tuple, range)):
        if all(isinstance(item, float) and math.isfinite(item) for item in value):
            return list(value)  # the numbers of a vector: nothing to look into
        return [jsonable(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return jsonable(value.item(), field)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _packed(value, field)
    raise SteeringError(field, f"cannot be sent as JSON: {type(value).__name__}")


def _finite(number: float, field: str) -> float:
    if not math.isfinite(number):
        raise SteeringError(field, f"cannot be sent as JSON: {number}")
    return number


def _packed(array: Any, field: str) -> dict[str, object]:
    if len(array.shape) == 2:
        directions = Projection(array, field).directions.astype("<f4", copy=False)
        data = base64.b64encode(directions.tobytes()).decode("ascii")
        return {"dtype": "float32", "shape": list(directions.shape), "data": data}
    return pack_vector(parse_vector(array, field))
