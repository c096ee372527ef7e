# SPDX-License-Identifier: Apache-2.0
"""Register steering under a name, use it by name, and apply it to all requests.

    python examples/global_modules.py [MODEL [LAYER]]

The default model is the one that `make model` prepares.
"""

import sys

from vllm_steer import LLM, SamplingParams, capture_hidden_states

GLAD, SAD = "What a lovely morning, I feel so happy!", "What a miserable morning, I feel so hopeless!"
PROMPT = "Today I woke up and"


def main(model: str = ".models/SmolLM2-135M-Instruct", layer: str = "10") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True, max_model_len=512)
    states = capture_hidden_states(llm, [GLAD, SAD], hooks={"post_block": [int(layer)]}, dtype="float32")
    glad, sad = states.tensor("post_block", int(layer))  # rows of the last tokens

    module = llm.steering.register("glad", base={"post_block": {int(layer): {"vector": glad - sad, "scale": 0.5}}})
    print("registered:", module.digest)

    plain = SamplingParams(temperature=0, max_tokens=16)
    by_name = SamplingParams(temperature=0, max_tokens=16, steering_modules=[("glad", 1.5)])
    show("plain", llm.generate(PROMPT, plain))
    show("by name", llm.generate(PROMPT, by_name))

    llm.steering.set(modules=["glad"])  # applies to every request from now on
    show("global", llm.generate(PROMPT, plain))
    llm.steering.clear()
    show("cleared", llm.generate(PROMPT, plain))


def show(label: str, outputs: list) -> None:
    print(f"{label}: {outputs[0].outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
