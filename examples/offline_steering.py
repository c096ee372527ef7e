# SPDX-License-Identifier: Apache-2.0
"""Make a steering vector from contrasting sentences and try several strengths in one batch.

    python examples/offline_steering.py [MODEL [LAYER]]

The default model is the one that `make model` prepares.
"""

import sys

from vllm_steer import LLM, Edit, SamplingParams, capture_hidden_states

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
STRENGTHS = [-0.2, 0.0, 0.2]  # in lengths of the stream
QUESTION = "What did you see from the window today?"


def main(model: str = ".models/SmolLM2-135M-Instruct", layer: str = "8") -> None:
    llm = LLM(model=model, enable_steering=True, enforce_eager=True, max_model_len=512)  # eager execution starts faster

    # Read the stream at the last token of each sentence: [sentences, hidden].
    site = {"post_block": [int(layer)]}
    rows = capture_hidden_states(llm, HAPPY + SAD, hooks=site, dtype="float32").tensor("post_block", int(layer))
    direction = rows[: len(HAPPY)].mean(0) - rows[len(HAPPY) :].mean(0)

    # Every request has its own steering; all of them run in one batch.
    edits = [
        Edit("add_normed", point="post_block", layers=int(layer), vector=direction, strength=strength)
        for strength in STRENGTHS
    ]
    params = [SamplingParams(temperature=0, repetition_penalty=1.15, max_tokens=40, steering=[edit]) for edit in edits]
    chats = [[{"role": "user", "content": QUESTION}] for _ in params]
    for strength, output in zip(STRENGTHS, llm.chat(chats, params), strict=True):
        print(f"strength {strength}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
