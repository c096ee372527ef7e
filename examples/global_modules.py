# SPDX-License-Identifier: Apache-2.0
"""Register steering under a name, use it by name, and apply it to all requests.

python examples/global_modules.py [MODEL]
"""

import sys

import numpy as np

from vllm_steer import LLM, SamplingParams

PROMPT = "Once upon a time"


def main(model: str = "demo/model") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True)
    direction = np.random.default_rng(0).standard_normal(llm.model_config.get_hidden_size())

    calm = llm.steering.register("calm", base={"post_block": {1: {"vector": direction, "scale": 8.0}}})
    print("registered:", calm.digest)

    plain = SamplingParams(temperature=0, max_tokens=16)
    by_name = SamplingParams(temperature=0, max_tokens=16, steering_modules=[("calm", 1.5)])
    show("plain", llm.generate(PROMPT, plain))
    show("by name", llm.generate(PROMPT, by_name))

    llm.steering.set(modules=["calm"])  # applies to every request from now on
    show("global", llm.generate(PROMPT, plain))
    llm.steering.clear()
    show("cleared", llm.generate(PROMPT, plain))


def show(label: str, outputs: list) -> None:
    print(f"{label}: {outputs[0].outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
