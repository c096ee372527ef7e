# SPDX-License-Identifier: Apache-2.0
"""Tasks of ``peers.py`` with the interfaces of peers on one engine of this project."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peer_tasks import (
    CLEAN,
    CORRUPT,
    DOSED,
    DOSES,
    ENGINE,
    GRID_LENGTH,
    NEW_TOKENS,
    READ_LAYER,
    REQUESTS,
    STEERED_LAYER,
    TOKENS,
    Task,
    first_logprobs,
    lens_tasks,
    vectors,
)


def interface_tasks(path: str) -> dict[str, dict[str, Task]]:
    """Return the tasks by name of the peer whose interface they use."""
    from vllm_steer.peers import vllm_lens
    from vllm_steer.peers.vllm_lens import LLM

    llm = LLM(path, **ENGINE)
    return {
        "vllm-lens": lens_tasks(llm, vllm_lens.SamplingParams, vllm_lens.SteeringVector),
        "TransformerLens": _transformer_lens(llm),
        "nnterp": _nnterp(llm),
        "vllm-probe-hook": {"steered": _probe_hook(llm)},
        "RhizoNymph/vllm": {"steered": _rhizonymph(llm)},
    }


def _transformer_lens(llm: Any) -> dict[str, Task]:
    from vllm_steer import Edit, SamplingParams
    from vllm_steer.peers.transformer_lens import HookedTransformer

    model = HookedTransformer(llm)
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]

    def activations() -> torch.Tensor:
        _, cache = model.run_with_cache(TOKENS, names_filter=names, return_type=None)
        return torch.stack([cache[name] for name in names])

    def grid() -> torch.Tensor:
        _, cache = model.run_with_cache(CLEAN[None], names_filter=names, return_type=None)
        params = [
            SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, logprobs=-1, flat_logprobs=True,
                steering=[Edit(kind="replace", point=name, vector=cache[name][0, i], tokens=[i])],
            )
            for name in names
            for i in range(GRID_LENGTH)
        ]  # fmt: skip
        requests = [{"prompt_token_ids": CORRUPT.tolist()}] * len(params)
        outputs = llm.generate(requests, params, use_tqdm=False)
        found = torch.empty(len(outputs), model.cfg.d_vocab)
        for row, output in zip(found, outputs, strict=True):
            flat = output.outputs[0].logprobs
            row[torch.tensor(flat.token_ids)] = torch.tensor(flat.logprobs)
        return found.reshape(len(names), GRID_LENGTH, -1)

    def doses() -> torch.Tensor:
        vector = vectors(model.cfg.d_model)[0]
        params = [
            SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1,
                steering=[Edit(kind="add", point=names[STEERED_LAYER], vector=vector, strength=dose)],
            )
            for dose in DOSES
            for _ in range(DOSED)
        ]  # fmt: skip
        return first_logprobs(llm.generate(REQUESTS[:DOSED] * len(DOSES), params, use_tqdm=False))

    return {"activations": activations, "grid": grid, "doses": doses}


def _nnterp(llm: Any) -> dict[str, Task]:
    from vllm_steer import Edit
    from vllm_steer.peers.nnterp import StandardizedTransformer

    model, vector = StandardizedTransformer(llm), vectors(llm.llm_engine.vllm_config.model_config.get_hidden_size())[0]
    layers = range(model.num_layers)

    def activations() -> torch.Tensor:
        rows: list[list[Any]] = []
        with model.trace() as tracer:
            for tokens in TOKENS.tolist():
                with tracer.invoke(tokens):
                    rows.append([model.layers_output[layer].save() for layer in layers])
        return torch.stack([torch.cat([each[layer].value for each in rows]) for layer in layers])

    def grid() -> torch.Tensor:
        probs: list[Any] = []
        with model.trace() as tracer:
            with tracer.invoke(CLEAN.tolist()):
                clean = [[model.layers_output[layer][:, i].save() for i in range(GRID_LENGTH)] for layer in layers]
            for layer in layers:
                for i in range(GRID_LENGTH):
                    with tracer.invoke(CORRUPT.tolist()):
                        model.layers_output[layer][:, i] = clean[layer][i]
                        probs.append(model.next_token_probs.save())
        return torch.cat([each.value for each in probs]).log().reshape(len(layers), GRID_LENGTH, -1)

    def doses() -> torch.Tensor:
        edits = [
            Edit(kind="add", point="post_block", layers=STEERED_LAYER, vector=vector, strength=dose) for dose in DOSES
        ]
        fields: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1}
        params = [model.params(edits=[edit], **fields) for edit in edits for _ in range(DOSED)]
        return first_logprobs(model.submit(TOKENS[:DOSED].tolist() * len(DOSES), params))

    return {"activations": activations, "grid": grid, "doses": doses}


def _probe_hook(llm: Any) -> Task:
    from vllm_steer.peers.probe_hook import LLM, SamplingParams

    probing = LLM(llm, layers=[READ_LAYER], include_prefill=True)

    def steered() -> torch.Tensor:
        params = [
            SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, capture=probing.capture,
                steering_vectors={"post_block": {STEERED_LAYER: row}},
            )
            for row in vectors(llm.llm_engine.vllm_config.model_config.get_hidden_size())
        ]  # fmt: skip
        outputs = probing.generate(REQUESTS, params, use_tqdm=False)
        return torch.stack(
            [torch.cat([each.prefill_hidden_states[READ_LAYER], each.hidden_states[READ_LAYER]]) for each in outputs]
        )

    return steered


def _rhizonymph(llm: Any) -> Task:
    from vllm_steer.peers.rhizonymph import SamplingParams

    capture = {"memory": {"hooks": {"post_block": {"layers": [READ_LAYER]}}, "positions": "all"}}

    def steered() -> torch.Tensor:
        params = [
            SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, capture=capture,
                steering_vectors={"post_block": {STEERED_LAYER: row}},
            )
            for row in vectors(llm.llm_engine.vllm_config.model_config.get_hidden_size())
        ]  # fmt: skip
        outputs = llm.generate(REQUESTS, params, use_tqdm=False)
        return torch.stack([each.capture_results["memory"].tensor("post_block", READ_LAYER) for each in outputs])

    return steered
