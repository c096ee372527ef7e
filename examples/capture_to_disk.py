# SPDX-License-Identifier: Apache-2.0
"""Write captured rows to files and read them back.

    python examples/capture_to_disk.py [MODEL [FOLDER]]

The default model is the one that `make model` prepares.
"""

import sys
import tempfile

from vllm_steer import LLM, SamplingParams, open_captures

PROMPTS = ["The capital of France is", "My favourite colour is", "Once upon a time"]


def main(model: str = ".models/SmolLM2-135M-Instruct", folder: str | None = None) -> None:
    root = folder or tempfile.mkdtemp()
    consumers = {"filesystem": {"root": root, "layout": "per_request"}}
    llm = LLM(model=model, enable_steering=True, enforce_eager=True, max_model_len=512, capture_consumers=consumers)

    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0, capture={"filesystem": spec})):
        result = output.capture_results["filesystem"]
        print(result.status, result.data["path"])

    # The reader maps the files into memory, in the order of submission. FOLDER may contain earlier runs.
    # The same files can be listed with `vllm-steer captures ls FOLDER`.
    for prompt, request in zip(PROMPTS, open_captures(root)[-len(PROMPTS) :], strict=True):
        rows = request.tensor("post_block", 0)
        print(f"{prompt!r}: {tuple(rows.shape)} at positions {request.positions('post_block', 0).tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
