# SPDX-License-Identifier: Apache-2.0
"""Read and steer through a server with the client of vllm-lens.

vllm serve demo/model --enable-steering --steering-peers vllm-lens
.venv/bin/python examples/peers/vllm_lens_http.py [URL]
"""

import sys
from typing import Any

from vllm_steer.peers.vllm_lens import SteeringVector, VLLMLensClient


def run(url: str) -> dict[str, Any]:
    """Capture one layer, then add the captured row at every token of another request."""
    with VLLMLensClient(url) as client:
        plain = client.generate("Once upon a time", max_tokens=4, capture_layers=[1])
        stream = plain.activations["residual_stream"]
        vector = SteeringVector(activations=stream[:, -1], layer_indices=[1], scale=4.0)
        steered = client.generate("Once upon a time", max_tokens=4, steering_vectors=vector)
        chat = client.chat([{"role": "user", "content": "Hello"}], max_tokens=4, steering_vectors=vector)
    tokens = chat.document["usage"]["completion_tokens"]
    return {"shape": tuple(stream.shape), "plain": plain.text, "steered": steered.text, "chat": tokens}


if __name__ == "__main__":
    for name, value in run(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000").items():
        print(f"{name}: {value}")
