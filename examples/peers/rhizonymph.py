# SPDX-License-Identifier: Apache-2.0
"""Gates, patch sites and packed vectors with the request fields of RhizoNymph/vllm.

.venv/bin/python examples/peers/rhizonymph.py [MODEL]
"""

import base64
import sys
from typing import Any

import numpy as np

from vllm_steer.peers.rhizonymph import LLM, SamplingParams


def run(engine: Any) -> dict[str, Any]:
    """Steer when a probe fires, and put a row of one prompt into another."""
    llm = LLM(engine) if isinstance(engine, str) else engine
    prompt, hidden = "Once upon a time", llm.model_config.get_hidden_size()
    probe, vector = np.random.default_rng(0).standard_normal((2, hidden)).astype("f4")
    gate = {
        "when": {
            "kind": "probe",
            "probe": {"hook": "post_block", "layer": 1, "vector": probe.tolist()},
            "threshold": 0.0,
            "sharpness": 4.0,
        },
        "scope": "this_token",
        "apply": {
            "kind": "add",
            "steer": {"hook": "post_block", "layer": 2, "vector": vector.tolist()},
            "strength": 8.0,
        },
    }
    site = {"layer": 1, "hook": "post_block", "dest_position": 2, "source_inline": 0, "alpha": 1.0}
    table = {"dtype": "float32", "shape": [1, hidden], "data": base64.b64encode(vector.tobytes()).decode()}
    settings = {"max_tokens": 8, "temperature": 0.0}
    params = [
        SamplingParams(**settings),
        SamplingParams(**settings, steering=[gate]),
        SamplingParams(**settings, patch=[site], patch_vectors=table),
    ]
    plain, gated, patched = (output.outputs[0] for output in llm.generate([prompt] * 3, params, use_tqdm=False))
    return {
        "plain": plain.text,
        "gated": gated.text,
        "patched": patched.text,
        "gates": gated.steering_trace.gates.ravel().tolist(),
    }


if __name__ == "__main__":
    for name, value in run(sys.argv[1] if len(sys.argv) > 1 else "demo/model").items():
        print(f"{name}: {value}")
