# SPDX-License-Identifier: Apache-2.0
"""Steer and capture through a server with the openai client.

.venv/bin/vllm serve demo/model --enable-steering --enforce-eager
.venv/bin/python examples/openai_client.py [URL]
"""

import base64
import sys

import numpy as np
from openai import OpenAI


def pack(vector: np.ndarray) -> dict[str, object]:
    """Return the packed JSON form of a vector."""
    data = vector.astype("<f4").tobytes()
    return {"dtype": "float32", "shape": list(vector.shape), "data": base64.b64encode(data).decode()}


def unpack(rows: dict) -> np.ndarray:
    """Return captured float32 rows as an array ``[rows, hidden]``."""
    return np.frombuffer(base64.b64decode(rows["data"]), "<f4").reshape(rows["shape"])


def main(url: str = "http://localhost:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    capture = {"memory": {"hooks": {"post_block": [1]}, "positions": "last_prompt", "dtype": "float32"}}

    # The openai client passes unknown fields on and returns unknown fields of the response.
    plain = client.completions.create(
        model=model, prompt="The list of", max_tokens=16, temperature=0, extra_body={"capture": capture}
    )
    result = plain.choices[0].capture_results["memory"]
    row = unpack(result["sites"]["post_block"]["1"])
    print(f"capture: {result['status']}, shape {row.shape}")

    vector = np.random.default_rng(0).standard_normal(row.shape[-1]) * 8
    steered = client.completions.create(
        model=model,
        prompt="The list of",
        max_tokens=16,
        temperature=0,
        extra_body={"steering_vectors": {"post_block": {"1": pack(vector)}}},
    )
    print(f"plain: {plain.choices[0].text!r}")
    print(f"steered: {steered.choices[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
