# SPDX-License-Identifier: Apache-2.0
"""Second half of a proof: run the shrunk model in vLLM, check its taps and compare its rows with HF Transformers.

``python -m vllm_steer.testing.prove.engine CONFIG_FOLDER MODEL`` prints a JSON object. If HF does not know the model,
MODEL has no weights: the model then gets random ones, and only the taps are checked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.testing.prove.reference import EDITED_LAYER, STREAMS, prompt, randomise, shrink

MARK = "vllm_steer.testing.prove: "
RANDOM_WEIGHTS = "vllm_steer_random"
TOLERANCE = 1e-4
"""Largest distance of a float32 row from HF's, in lengths of HF's row, that counts as agreement."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def prove(source: str, model: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Prove one model.

    Args:
        source: Folder with the model's configuration.
        model: Folder of the shrunk model; written here if HF does not know the model.
        trust_remote_code: Passed to vLLM and Transformers.

    Returns:
        The ``kind`` of proof, the hops of the self-check, the errors against HF (None without a reference), and whether
        everything ``agrees``.
    """
    from vllm_steer import LLM
    from vllm_steer.models.dry_run import import_architecture

    with_reference = (model / STREAMS).exists()
    if not with_reference:
        _write_config(source, model, trust_remote_code)
        _register_random_weights()
    import_architecture(str(model))
    llm: Any = LLM(
        model=str(model),
        enable_steering=True,
        steering_config={"allow_unproven": True},  # the model may be unproven
        load_format="auto" if with_reference else RANDOM_WEIGHTS,
        skip_tokenizer_init=True,
        trust_remote_code=trust_remote_code,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        num_gpu_blocks_override=256,
        disable_log_stats=True,
    )
    (facts,) = llm.collective_rpc("steering_capabilities")
    check = facts["self_check"]
    found = {"kind": "identities inside vLLM", "hops": check["hops"], "conclusive": check["conclusive"]}
    if not with_reference:
        return {**found, "value_error": None, "cause_error": None, "agrees": check["conclusive"] > 0}
    errors = _errors(llm, np.load(model / STREAMS))
    agrees = check["conclusive"] > 0 and all(error < TOLERANCE for error in errors.values())
    return {**found, "kind": "HF Transformers", **errors, "agrees": agrees}


def _errors(llm: Any, streams: Any) -> dict[str, float]:
    """Return the errors of the rows of a plain request (``value_error``) and of an edited one (``cause_error``)."""
    from vllm_steer import Edit, SamplingParams

    edit = Edit(kind="add", point="post_block", layers=EDITED_LAYER, vector=streams["vector"])
    capture = {"memory": {"hooks": {"pre_attn": "all", "post_block": "all"}, "positions": "all_prompt"}}
    prompts = [{"prompt_token_ids": prompt()}] * 2
    params = [
        SamplingParams(max_tokens=1, temperature=0, detokenize=False, capture=capture, steering=edits)
        for edits in (None, [edit])
    ]
    errors = {}
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for name, output, theirs in zip(
        ("value_error", "cause_error"), outputs, (streams["plain"], streams["edited"]), strict=True
    ):
        rows = output.capture_results["memory"]
        distances = [
            _distance(rows.tensor(point, layer).numpy(), theirs[layer + (point == "post_block")])
            for layer in range(len(theirs) - 1)
            for point in ("pre_attn", "post_block")
        ]
        # max() of Python passes over NaN.
        errors[name] = float(np.max(distances))
    return errors


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max())


def _register_random_weights() -> None:
    """Register a load format with larger weights: with vLLM's dummy weights the blocks hardly change the stream."""
    import torch

    from vllm_steer.compat.internals import DummyModelLoader, register_model_loader

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if weight.ndim == 1 and not name.endswith("bias"):
                        weight.fill_(1.0)  # norms
            randomise(model)

    register_model_loader(RANDOM_WEIGHTS)(RandomLoader)


def _write_config(source: str, model: Path, trust_remote_code: bool) -> None:
    from vllm_steer.compat.internals import get_config

    config = get_config(source, trust_remote_code)
    shrink(config.get_text_config())
    model.mkdir(exist_ok=True)
    config.save_pretrained(model)


def main() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    print(MARK + json.dumps(prove(sys.argv[1], Path(sys.argv[2]), "--trust-remote-code" in sys.argv)))


if __name__ == "__main__":
    main()
