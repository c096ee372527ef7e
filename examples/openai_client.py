# SPDX-License-Identifier: Apache-2.0
"""Steer and capture through a server with the openai client.

.venv/bin/vllm serve .models/SmolLM2-135M-Instruct --enable-steering --enforce-eager --max-model-len 512
.venv/bin/python examples/openai_client.py [URL [LAYER]]
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


def row(client: OpenAI, model: str, prompt: str, layer: str) -> np.ndarray:
    """Return the stream at the last token of a prompt."""
    capture = {"memory": {"hooks": {"post_block": [int(layer)]}, "positions": "last_prompt", "dtype": "float32"}}
    # The openai client passes unknown fields on and returns unknown fields of the response.
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=1, extra_body={"capture": capture})
    result = answer.choices[0].capture_results["memory"]
    rows = unpack(result["sites"]["post_block"][layer])
    print(f"capture: {result['status']}, shape {rows.shape}")
    return rows[0]


def main(url: str = "http://localhost:8000", layer: str = "10") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    glad, sad = (
        row(client, model, f"What a {word} morning, I feel so", layer) for word in ("lovely, happy", "miserable, sad")
    )
    vectors = {"post_block": {layer: {"vector": pack(glad - sad), "scale": 1.5}}}
    for label, fields in (("plain", {}), ("steered", {"steering_vectors": vectors})):
        answer = client.completions.create(
            model=model,
            prompt="When I looked out of the window, I",
            max_tokens=24,
            temperature=0,
            extra_body={"repetition_penalty": 1.15} | fields,
        )
        print(f"{label}: {answer.choices[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
