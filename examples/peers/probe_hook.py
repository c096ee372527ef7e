# SPDX-License-Identifier: Apache-2.0
"""Read hidden states with the interface of vllm-probe-hook.

.venv/bin/python examples/peers/probe_hook.py [MODEL]
"""

import sys
from typing import Any

from vllm_steer.peers.probe_hook import LLM, SamplingParams


def run(model: Any) -> dict[str, Any]:
    """Read one layer at the tokens of the prompt and of the answer."""
    llm = LLM(model, layers=[1], include_prefill=True)
    output = llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
    return {"decode": tuple(output.hidden_states[1].shape), "prefill": tuple(output.prefill_hidden_states[1].shape)}


if __name__ == "__main__":
    for name, value in run(sys.argv[1] if len(sys.argv) > 1 else "demo/model").items():
        print(f"{name}: {value}")
