# SPDX-License-Identifier: Apache-2.0
"""Make a steering vector from contrasting prompts and try several strengths in one batch.

python examples/offline_steering.py [MODEL [LAYER]]
"""

import sys

from vllm_steer import LLM, SamplingParams, capture_hidden_states

CODE = ["def area(width, height):\n    return width * height", "import os\nimport sys", "if not row:\n    continue"]
PROSE = [
    "The server keeps a list of all the clients",
    "This chapter explains the package",
    "In most cases it works well",
]
STRENGTHS = [0.0, 0.5, 1.0]


def main(model: str = "demo/model", layer: str = "2") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True)  # eager execution starts faster

    # Read the stream at the last token of each prompt: [prompts, hidden].
    site = {"post_block": [int(layer)]}
    rows = capture_hidden_states(llm, CODE + PROSE, hooks=site, dtype="float32").tensor("post_block", int(layer))
    direction = rows[len(CODE) :].mean(0) - rows[: len(CODE)].mean(0)

    # Every request has its own steering; all of them run in one batch.
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            steering_vectors={"post_block": {int(layer): {"vector": direction, "scale": strength}}},
        )
        for strength in STRENGTHS
    ]
    for strength, output in zip(STRENGTHS, llm.generate(["class "] * len(params), params), strict=True):
        print(f"strength {strength}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
