# SPDX-License-Identifier: Apache-2.0
"""Patch the stream of one prompt into another with the interface of TransformerLens.

.venv/bin/python examples/peers/transformer_lens.py [MODEL]
"""

import sys
from typing import Any

from vllm_steer import Edit
from vllm_steer.peers.transformer_lens import HookedTransformer, get_act_name


def run(engine: Any) -> dict[str, Any]:
    """Cache a clean run, and put its last row at one layer into a corrupted run."""
    model = HookedTransformer(engine)
    name = get_act_name("resid_post", 1)
    clean, cache = model.run_with_cache("The cat sat", names_filter=lambda hook: hook.endswith("resid_post"))
    corrupted = model("The dog sat")
    row = cache[name][0, -1]
    patched = model.run_with_edits("The dog sat", [Edit(kind="replace", point=name, vector=row, tokens=[-1])])
    return {
        "cached": len(cache),
        "before": float((clean - corrupted).abs().max()),
        "after": float((clean - patched).abs().max()),
    }


if __name__ == "__main__":
    for name, value in run(sys.argv[1] if len(sys.argv) > 1 else "demo/model").items():
        print(f"{name}: {value}")
