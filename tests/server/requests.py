# SPDX-License-Identifier: Apache-2.0
"""A vector in its wire forms, and invalid requests that a server must refuse."""

from __future__ import annotations

import json

import numpy as np

from tests.server.server import HIDDEN, LAYERS
from vllm_steer.request import pack_vector

V = (np.random.default_rng(0).standard_normal(HIDDEN) * 5).astype(np.float32)
LIST: list[float] = V.tolist()
PACKED = pack_vector(V)
EDIT = '{"kind": "add", "point": "post_block", "layers": 1, "vector": ' + json.dumps(LIST)


def at(layer: str, vector: object, point: str = "post_block") -> str:
    return f'"steering_vectors": {{"{point}": {{"{layer}": {json.dumps(vector)}}}}}'


# Name -> fields of a body as JSON text, the expected `param` of the error, and a part of its message.
INVALID_FIELDS: dict[str, tuple[str, str, str]] = {
    "too narrow": (at("1", LIST[1:]), "steering_vectors.post_block[1]", "hidden size is 64"),
    "too wide": (at("1", [*LIST, 0.0]), "steering_vectors.post_block[1]", "hidden size is 64"),
    "NaN": (at("1", [float("nan"), *LIST[1:]]), "steering_vectors.post_block[1][0]", "finite"),
    "Infinity": (at("1", [*LIST[1:], float("inf")]), "steering_vectors.post_block[1][63]", "finite"),
    "1e39": (at("1", [1e39, *LIST[1:]]), "steering_vectors.post_block[1][0]", "finite"),
    "1e400": (at("1", LIST).replace(str(LIST[0]), "1e400"), "steering_vectors.post_block[1][0]", "finite"),
    "the word NaN": (at("1", ["NaN", *LIST[1:]]), "steering_vectors.post_block[1][0]", "number"),
    "a boolean": (at("1", [True, *LIST[1:]]), "steering_vectors.post_block[1][0]", "number"),
    "null": (at("1", [None, *LIST[1:]]), "steering_vectors.post_block[1][0]", "number"),
    "ragged": (at("1", [LIST, LIST[1:]]), "steering_vectors.post_block[1]", "list"),
    "a row": (at("1", [LIST]), "steering_vectors.post_block[1]", "list"),
    "no components": (at("1", []), "steering_vectors.post_block[1]", "component"),
    "endless integer": (at("1", LIST).replace(str(LIST[0]), "1" * 5000), "body", "digits"),
    "huge integer": (at("1", [10**60, *LIST[1:]]), "steering_vectors.post_block[1][0]", "float32"),
    "unknown point": (at("1", LIST, "mlp"), "steering_vectors", "pre_attn, attn_out, post_attn, mlp_in"),
    "layer out of range": (at(str(LAYERS), LIST), "steering_vectors.post_block[4]", "layers 0 to 3"),
    "negative layer": (at("-1", LIST), "steering_vectors.post_block", "count from 0"),
    "fractional layer": (at("1.0", LIST), "steering_vectors.post_block", "decimal"),
    "huge layer": (at("9" * 40, LIST), "steering_vectors.post_block", "decimal"),
    "boolean layer": (at("true", LIST), "steering_vectors.post_block", "decimal"),
    "layer twice": ('"steering_vectors": {"post_block": {"1": [1], "1": [2]}}', "steering_vectors.post_block", "twice"),
    "field twice": (f"{at('1', LIST)}, {at('2', LIST)}", "steering_vectors", "twice"),
    "empty": ('"steering_vectors": {}', "steering_vectors", "empty"),
    "empty point": ('"steering_vectors": {"post_block": {}}', "steering_vectors.post_block", "empty"),
    "no edits": ('"steering": []', "steering", "empty"),
    "a list for a dict": ('"steering_vectors": [1]', "steering_vectors", "point"),
    "a number": ('"steering": 1', "steering", "list"),
    "unknown kind": ('"steering": [' + EDIT.replace("add", "rotate") + "}]", "steering[0].kind", "add_normed"),
    "unknown part": ('"steering": [' + EDIT + ', "layer": 1}]', "steering[0]", "layer"),
    "boolean layers": ('"steering": [' + EDIT.replace(": 1,", ": true,") + "}]", "steering[0].layers", "layer"),
    "empty range": ('"steering": [' + EDIT + ', "tokens": [[5, 5]]}]', "steering[0].tokens[0]", "empty"),
    "before the prompt": ('"steering": [' + EDIT + ', "tokens": [-500]}]', "steering[0].tokens", "reaches before"),
    "beyond the end": ('"steering": [' + EDIT + ', "tokens": [256]}]', "steering[0]", "max_model_len"),
    "unknown field": ('"steering_vector": {}', "steering_vector", "steering_vectors"),
    "field too deep": ('"extra_body": {"steering": []}', "extra_body.steering", "top"),
    "by vllm_xargs": ('"vllm_xargs": {"steer": "x"}', "vllm_xargs.steer", "reserved"),
    "bad base64": (at("1", {**PACKED, "data": "!" * 344}), "steering_vectors.post_block[1].data", "base64"),
    "bad dtype": (at("1", {**PACKED, "dtype": "int8"}), "steering_vectors.post_block[1].dtype", "float32"),
    "bad shape": (at("1", {**PACKED, "shape": [1, 64]}), "steering_vectors.post_block[1].shape", "[1, 64]"),
}  # fmt: skip
