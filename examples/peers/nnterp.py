# SPDX-License-Identifier: Apache-2.0
"""Logit lens, patchscope and steering with the interface of nnterp.

.venv/bin/python examples/peers/nnterp.py [MODEL]
"""

import sys
from typing import Any

from vllm_steer.peers.nnterp import StandardizedTransformer, TargetPrompt, logit_lens, patchscope_lens


def run(engine: Any) -> dict[str, Any]:
    """Look into the layers at the last token of a prompt, and steer with what is found."""
    model = StandardizedTransformer(engine)
    prompt = "Once upon a time"
    rows = model.get_token_activations([prompt])
    lens = logit_lens(model, [prompt])
    scope = patchscope_lens(model, [prompt], TargetPrompt("cat cat dog dog ?", -1), layers=[1, 2])
    plain = model.next_token_probs(prompt)
    with model.steer(layers=1, steering_vector=rows[1, 0], factor=4.0):
        steered = model.next_token_probs(prompt)
    return {
        "rows": tuple(rows.shape),
        "lens": tuple(lens.shape),
        "scope": tuple(scope.shape),
        "change": float((plain - steered).abs().max()),
    }


if __name__ == "__main__":
    for name, value in run(sys.argv[1] if len(sys.argv) > 1 else "demo/model").items():
        print(f"{name}: {value}")
