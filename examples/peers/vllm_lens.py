# SPDX-License-Identifier: Apache-2.0
"""Read the residual stream and steer with the request keys of vllm-lens.

.venv/bin/python examples/peers/vllm_lens.py [MODEL]
"""

import sys
from typing import Any

from vllm_steer.peers.vllm_lens import LLM, SamplingParams, SteeringVector, activations_of


def run(llm: Any) -> dict[str, Any]:
    """Capture one layer, then add the captured row at every token of another request."""
    read = SamplingParams(max_tokens=4, temperature=0, extra_args={"output_residual_stream": [1]})
    output = llm.generate(["Once upon a time"], read, use_tqdm=False)[0]
    stream = activations_of(output)["residual_stream"]
    vector = SteeringVector(activations=stream[:, -1], layer_indices=[1], scale=4.0)
    steer = SamplingParams(max_tokens=4, temperature=0, extra_args={"apply_steering_vectors": [vector]})
    steered = llm.generate(["Once upon a time"], steer, use_tqdm=False)[0]
    return {"shape": tuple(stream.shape), "plain": output.outputs[0].text, "steered": steered.outputs[0].text}


if __name__ == "__main__":
    for name, value in run(LLM(sys.argv[1] if len(sys.argv) > 1 else "demo/model")).items():
        print(f"{name}: {value}")
