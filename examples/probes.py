# SPDX-License-Identifier: Apache-2.0
"""Score every token of a text with a probe direction that is applied inside the engine.

python examples/probes.py [MODEL [LAYER]]
"""

import sys

from vllm_steer import LLM, SamplingParams, capture_hidden_states

CODE = ["def area(width, height):\n    return width * height", "import os\nimport sys", "if not row:\n    continue"]
PROSE = [
    "The server keeps a list of all the clients",
    "This chapter explains the package",
    "In most cases it works well",
]
HELD_OUT = ["while queue:\n    node = queue.pop()", "A queue holds the messages that have not yet been read"]


def main(model: str = "demo/model", layer: str = "3") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True)

    # A difference-of-means probe, from the tokens after the first.
    site = {"post_block": [int(layer)]}
    states = capture_hidden_states(llm, CODE + PROSE, hooks=site, positions=[[1, None]], dtype="float32")
    rows, prompt = states.tensor("post_block", int(layer)), states.prompt_index("post_block", int(layer))
    is_code = prompt < len(CODE)
    probe = rows[is_code].mean(0) - rows[~is_code].mean(0)

    # The engine returns one number per token instead of a row of the stream.
    spec = {"hooks": site, "positions": [[1, None]], "reduce": {"directions": [probe.tolist()]}}
    params = SamplingParams(max_tokens=1, temperature=0, capture={"memory": spec})
    for text, output in zip(HELD_OUT, llm.generate(HELD_OUT, params), strict=True):
        scores = output.capture_results["memory"].tensor("post_block", int(layer))
        print(f"mean score {scores.mean():.1f}: {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
