# SPDX-License-Identifier: Apache-2.0
"""Tasks of ``peers.py``: the same work with HF Transformers, with each peer, and with its interface here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

PROMPTS, LENGTH, BATCH = 256, 24, 32
GRID_LENGTH = 16
STEERED, NEW_TOKENS, STEERED_LAYER, READ_LAYER = 64, 16, 1, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOSED, STEPS = (64, 8) if DEVICE == "cuda" else (8, 24)
DOSES = [2 * step / STEPS for step in range(STEPS + 1)]
Task = Callable[[], torch.Tensor]
Tasks = Mapping[str, Task]


def prompts(count: int, length: int, seed: int) -> torch.Tensor:
    """Return random tokens ``[count, length]`` that are not special."""
    return torch.randint(10, 500, (count, length), generator=torch.Generator().manual_seed(seed))


TOKENS = prompts(PROMPTS, LENGTH, 0)
CLEAN, CORRUPT = prompts(2, GRID_LENGTH, 1)
REQUESTS = [{"prompt_token_ids": row} for row in TOKENS[:STEERED].tolist()]


def vectors(hidden: int) -> torch.Tensor:
    """Return a steering vector for each prompt of the task ``steered``, ``[prompts, hidden]``."""
    return torch.randn(STEERED, hidden, generator=torch.Generator().manual_seed(2))


def collecting(streams: Callable[[torch.Tensor], torch.Tensor]) -> Task:
    """Return the task ``activations`` with a function that returns all layers of a batch."""
    return lambda: torch.cat([streams(batch) for batch in TOKENS.split(BATCH)], dim=1)


def patched(stream: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """Return the stream of ``GRID_LENGTH`` copies of a prompt, with position ``i`` of copy ``i`` replaced."""
    stream, each = stream.clone(), torch.arange(GRID_LENGTH)
    stream[each, each] = clean
    return stream


def hf_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with forward hooks of PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(DEVICE)

    def rows_of(out: Any) -> torch.Tensor:
        rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    def with_rows(out: Any, rows: torch.Tensor) -> Any:
        return (rows, *out[1:]) if isinstance(out, tuple) else rows

    def streams(tokens: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda m, a, out: found.append(rows_of(out))) for layer in model.model.layers
        ]
        with torch.no_grad():
            model(tokens, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        return torch.stack(found)

    def grid() -> torch.Tensor:
        clean = streams(CLEAN[None])
        rows = []
        for layer, module in enumerate(model.model.layers):

            def put(m: Any, a: Any, out: Any, layer: int = layer) -> Any:
                return with_rows(out, patched(rows_of(out), clean[layer, 0]))

            handle = module.register_forward_hook(put)
            with torch.no_grad():
                rows.append(model(CORRUPT.expand(GRID_LENGTH, -1), logits_to_keep=1).logits[:, -1].log_softmax(-1))
            handle.remove()
        return torch.stack(rows)

    def steered() -> torch.Tensor:
        added, found = vectors(model.config.hidden_size)[:, None], []
        handles = [
            model.model.layers[STEERED_LAYER].register_forward_hook(
                lambda m, a, out: with_rows(out, rows_of(out) + added)
            ),
            model.model.layers[READ_LAYER].register_forward_hook(lambda m, a, out: found.append(rows_of(out))),
        ]
        tokens = TOKENS[:STEERED]
        with torch.no_grad():
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
            )  # fmt: skip
        for handle in handles:
            handle.remove()
        return torch.cat(found, dim=1)

    def doses() -> torch.Tensor:
        vector, tokens, found = vectors(model.config.hidden_size)[0].to(DEVICE), TOKENS[:DOSED].to(DEVICE), []
        for dose in DOSES:
            handle = model.model.layers[STEERED_LAYER].register_forward_hook(
                lambda m, a, out, added=dose * vector: with_rows(out, rows_of(out) + added)
            )
            with torch.no_grad():
                written = model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            handle.remove()
            found.append(written.logits[0].log_softmax(-1).amax(-1).cpu())
        return torch.cat(found)

    return {"activations": collecting(streams), "grid": grid, "steered": steered, "doses": doses}


def transformer_lens_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with TransformerLens' bridge, whose weights are those of HF Transformers."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = TransformerBridge.boot_transformers(
        path, hf_model=hf_model, tokenizer=AutoTokenizer.from_pretrained(path), device="cpu", dtype=torch.float32
    )
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]

    def streams(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in names)
        return torch.stack([cache[name] for name in names])

    def grid() -> torch.Tensor:
        clean, rows = streams(CLEAN[None]), []
        for layer, name in enumerate(names):

            def put(stream: torch.Tensor, hook: Any, layer: int = layer) -> torch.Tensor:
                return patched(stream, clean[layer, 0])

            with torch.no_grad():
                logits = model.run_with_hooks(CORRUPT.expand(GRID_LENGTH, -1), fwd_hooks=[(name, put)])
            rows.append(logits[:, -1].log_softmax(-1))
        return torch.stack(rows)

    def doses() -> torch.Tensor:
        vector, tokens, found = vectors(model.cfg.d_model)[0], TOKENS[:DOSED], []
        for dose in DOSES:
            first: list[torch.Tensor] = []
            hooks: list[tuple[str, Any]] = [
                (names[STEERED_LAYER], lambda stream, hook, added=dose * vector: stream + added),
                ("unembed.hook_out", lambda logits, hook, first=first: first.append(logits[:, -1])),
            ]
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                model.generate(
                    tokens, max_new_tokens=NEW_TOKENS, do_sample=False, stop_at_eos=False, return_type="tokens",
                    verbose=False,
                )  # fmt: skip
            found.append(first[0].log_softmax(-1).amax(-1))
        return torch.cat(found)

    return {"activations": collecting(streams), "grid": grid, "doses": doses}


def nnterp_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with nnterp's traces of the HF model."""
    import nnsight
    from nnterp import StandardizedTransformer

    model = StandardizedTransformer(
        path, dtype=torch.float32, device_map="cpu", check_renaming=False, check_attn_probs_with_trace=False
    )
    count = model.num_layers

    def streams(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), model.trace(tokens):
            found = nnsight.save([model.layers_output[layer] for layer in range(count)])
        return torch.stack(list(found))

    def grid() -> torch.Tensor:
        clean, rows = streams(CLEAN[None]), []
        tokens = CORRUPT.expand(GRID_LENGTH, -1)
        for layer in range(count):
            with torch.no_grad(), model.trace(tokens):
                for i in range(GRID_LENGTH):
                    model.layers_output[layer][i, i] = clean[layer, 0, i]
                logits = nnsight.save(model.logits)
            rows.append(logits[:, -1].log_softmax(-1))
        return torch.stack(rows)

    def doses() -> torch.Tensor:
        vector, tokens, found = vectors(model.config.hidden_size)[0], TOKENS[:DOSED], []
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        for dose in DOSES:
            added = dose * vector
            with torch.no_grad(), model.generate(tokens, do_sample=False, **length) as tracer:
                logits = nnsight.save([])
                for _ in tracer.iter[:]:
                    model.layers_output[STEERED_LAYER] = model.layers_output[STEERED_LAYER] + added
                    logits.append(model.logits[:, -1])
            found.append(logits[0].log_softmax(-1).amax(-1))
        return torch.cat(found)

    return {"activations": collecting(streams), "grid": grid, "doses": doses}


def vllm_lens_tasks(path: str) -> dict[str, Task]:
    """Return the tasks with vllm-lens on its own version of vLLM."""
    from vllm import LLM, SamplingParams
    from vllm_lens import SteeringVector

    llm = LLM(path, **ENGINE)
    return lens_tasks(llm, SamplingParams, SteeringVector)


def first_logprobs(outputs: Any) -> torch.Tensor:
    """Return the log-probability of the first token of each output ``[outputs]``."""
    return torch.tensor([max(each.logprob for each in out.outputs[0].logprobs[0].values()) for out in outputs])


def lens_tasks(llm: Any, params: Any, steering_vector: Any) -> dict[str, Task]:
    """Return the tasks with the request keys of vllm-lens, theirs or ours."""

    def run(requests: Any, chosen: Any) -> torch.Tensor:
        outputs = llm.generate(requests, chosen, use_tqdm=False)
        return torch.stack([output.activations["residual_stream"] for output in outputs], dim=1)

    def activations() -> torch.Tensor:
        chosen = params(max_tokens=1, temperature=0, extra_args={"output_residual_stream": True})
        return run([{"prompt_token_ids": row} for row in TOKENS.tolist()], chosen)

    def steered() -> torch.Tensor:
        hidden = llm.llm_engine.vllm_config.model_config.get_hidden_size()
        chosen = [
            params(
                max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True,
                extra_args={
                    "output_residual_stream": [READ_LAYER],
                    "apply_steering_vectors": [
                        steering_vector(activations=row[None], layer_indices=[STEERED_LAYER])
                    ],
                },
            )
            for row in vectors(hidden)
        ]  # fmt: skip
        return run(REQUESTS, chosen)[0]

    def doses() -> torch.Tensor:
        vector = vectors(llm.llm_engine.vllm_config.model_config.get_hidden_size())[:1]
        chosen = [
            params(
                max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=1,
                extra_args={
                    "apply_steering_vectors": [
                        steering_vector(activations=vector, layer_indices=[STEERED_LAYER], scale=dose)
                    ]
                },
            )
            for dose in DOSES
            for _ in range(DOSED)
        ]  # fmt: skip
        return first_logprobs(llm.generate(REQUESTS[:DOSED] * len(DOSES), chosen, use_tqdm=False))

    return {"activations": activations, "steered": steered, "doses": doses}


ENGINE: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": DEVICE == "cpu", "disable_log_stats": True,
    "max_logprobs": -1, "max_num_batched_tokens": 8192, "enable_prefix_caching": False,
    **({"max_num_seqs": 256} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}),
}  # fmt: skip
"""Arguments of both engines."""
