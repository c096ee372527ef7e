# SPDX-License-Identifier: Apache-2.0
"""Score every token of an answer with a probe direction that is applied inside the engine.

    python examples/probes.py [MODEL [LAYER]]

The default model is the one that `make model` prepares.
"""

import sys

from vllm_steer import LLM, SamplingParams, capture_hidden_states

HAPPY = [
    "I passed the exam, I am so proud and excited!",
    "What a lovely morning, I feel grateful to be alive!",
    "We laughed until our cheeks hurt, it was the best night ever.",
    "My best friend surprised me with a fantastic party.",
]
SAD = [
    "I failed the exam, I am so ashamed and depressed.",
    "What a miserable morning, I feel too hopeless to get up.",
    "We cried until our eyes hurt, it was the worst night ever.",
    "My best friend betrayed me and left me alone.",
]
HELD_OUT = ["She was delighted with the beautiful gift.", "She was miserable after the terrible loss."]


def main(model: str = ".models/SmolLM2-135M-Instruct", layer: str = "14") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True, max_model_len=512)

    # A difference-of-means probe from the tokens after the first, whose row is the same in all texts.
    site = {"post_block": [int(layer)]}
    states = capture_hidden_states(llm, HAPPY + SAD, hooks=site, positions=[[1, None]], dtype="float32")
    rows, prompt = states.tensor("post_block", int(layer)), states.prompt_index("post_block", int(layer))
    is_happy = prompt < len(HAPPY)
    probe = rows[is_happy].mean(0) - rows[~is_happy].mean(0)
    probe /= probe.norm()
    middle = float((rows @ probe).mean())

    # The engine returns one number per token instead of a row of the stream.
    mood = {"probe": probe, "bias": -middle, "point": "post_block", "layer": int(layer), "positions": "all"}
    params = SamplingParams(max_tokens=1, temperature=0, readouts={"mood": mood})
    for text, output in zip(HELD_OUT, llm.generate(HELD_OUT, params), strict=True):
        scores = output.outputs[0].readouts["mood"].values[1:]
        print(f"mean score {scores.mean():+.2f}: {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
