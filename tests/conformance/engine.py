# SPDX-License-Identifier: Apache-2.0
"""Steered engines, one after another in this process, and the log-probabilities of every token they return."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.cases import NEW_TOKENS, Case
from tests.conformance.edits import EditAt
from tests.conformance.hf_reference import Array
from tests.conformance.kernels import cpu_kernels, media_stubs
from tests.conformance.model import MAX_POSITIONS, VOCAB, TinyModel
from tests.conformance.processors import PROCESSORS
from tests.tiny import forget_engine, register_class
from vllm_steer.testing.heap import cheap_collections

MODES: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    # Dynamo traces the model as in a compiled engine but runs the graph as it is, without compiling C++. Without an
    # explicit mode, vLLM's CPU platform would replace this backend by inductor.
    "traced": {"compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}},
    "compiled": {},
}

BACKENDS: Mapping[str, str | None] = {"eager": None, "traced": "eager", "compiled": "inductor"}
"""Dynamo backend that each mode must use; None for no Dynamo."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A graph compiled by an earlier run proves nothing about the current code.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


GPU_SETTINGS: Mapping[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
"""Leave memory for other processes: vLLM would take nearly all of it."""


@dataclass(frozen=True)
class Answer:
    """Result of one request.

    ``token_ids``: prompt and generated tokens. ``logprobs`` ``[tokens - 1, vocab]``: row *t* predicts token *t + 1*.
    ``streams[point]`` ``[layers, tokens - 1, hidden]``: captured rows, after the edits of the point itself.
    """

    token_ids: tuple[int, ...]
    logprobs: Array
    streams: Mapping[str, Array]


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads; call before importing vLLM."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def steered_engine(
    tiny: TinyModel, path: Path, mode: str, branches: Sequence[str] = (), *, self_check: bool = False
) -> Iterator[Any]:
    """Run a steered engine on the model at ``path``; release it on exit, even if it did not start.

    Args:
        tiny: The row.
        path: Its model.
        mode: One of ``MODES``.
        branches: The optional points of the engine.
        self_check: Whether the engine checks its taps at start.
    """
    import torch

    from vllm_steer import LLM

    with media_stubs():
        _register(path, tiny.model_class)
    # More threads make models of this size slower.
    torch.set_num_threads(1)
    llm = None
    resources = ExitStack()
    resources.enter_context(cheap_collections())
    if mode == "eager":
        resources.enter_context(cpu_kernels(tiny.model_class))
    try:
        llm = LLM(
            model=str(path),
            enable_steering=True,
            # GPU-only classes are refused until these tests have proven them. The check at start would refuse wrong
            # taps before these tests see them.
            steering_config={"allow_unproven": tiny.gpu_only, "self_check": self_check, "points": [*branches]},
            skip_tokenizer_init=tiny.cross is None and tiny.config not in PROCESSORS,
            dtype=tiny.dtype,
            max_model_len=MAX_POSITIONS,
            # Smaller than the batch, so that prompts are split and run beside generated tokens of other requests.
            max_num_batched_tokens=160,
            max_num_seqs=128,
            **(GPU_SETTINGS if torch.cuda.is_available() else {}),
            max_logprobs=-1,
            disable_log_stats=True,
            # Enough blocks for the batch: filling a whole GiB with zeros takes longer than loading the model.
            **{"num_gpu_blocks_override": 256, **engine_settings(tiny, mode)},
        )
        backend = _backend(llm)
        if backend != BACKENDS[mode]:
            raise RuntimeError(f"{tiny}: the {mode} engine runs its model on the backend {backend}")
        yield llm
    finally:
        if llm is not None:
            # Here and not when the caller drops its reference, after the collections have become expensive again.
            llm.llm_engine.engine_core.shutdown()
            vars(llm).clear()
        forget_engine(compiled=mode != "eager")
        resources.close()


def engine_settings(tiny: TinyModel, mode: str) -> dict[str, Any]:
    """Merge the settings of the mode and of the row; both may configure the compiler."""
    own = dict(tiny.engine or {})
    merged = {**MODES[mode].get("compilation_config", {}), **own.pop("compilation_config", {})}
    return {**MODES[mode], **own, **({"compilation_config": merged} if merged else {})}


def _register(path: Path, model_class: str | None) -> None:
    """Register the model's class."""
    from vllm import ModelRegistry

    from vllm_steer.compat.wraps import load

    config = json.loads((path / "config.json").read_text())
    architecture = config["architectures"][0]
    if model_class is not None:
        # An earlier import of the package may have failed and left its inner packages behind. Python then starts in the
        # middle, and a package that imports itself finds names that do not exist yet.
        package = model_class.partition(":")[0].split(".")
        for depth in range(1, len(package)):
            import_module(".".join(package[:depth]))
        ModelRegistry.register_model(architecture, load(model_class))
        return
    if architecture not in ModelRegistry.models:
        # The fallback that vLLM chooses.
        many = any("experts" in name for name in config)
        architecture = "TransformersMoEForCausalLM" if many else "TransformersForCausalLM"
    register_class(architecture)


def _backend(llm: Any) -> str | None:
    """Return the backend that has compiled the model, whichever was configured."""
    compiled = any(llm.apply_model(_is_compiled))
    return llm.llm_engine.vllm_config.compilation_config.backend if compiled else None


def _is_compiled(model: Any) -> bool:
    return any(
        getattr(module, "compiled", False) or getattr(module, "aot_compiled_fn", None) is not None
        for module in model.modules()
    )


def layer_classes(llm: Any) -> set[str]:
    """Return the class names of the modules that carry taps."""
    found: list[set[str]] = llm.apply_model(_tapped)
    return set().union(*found)


def _tapped(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules() if hasattr(module, "steering_taps")}


def generate(llm: Any, cases: Sequence[Case], points: Sequence[str] = (), new_tokens: int = NEW_TOKENS) -> list[Answer]:
    """Run all cases as one batch; each also captures all layers at ``points``."""
    prompts: list[Any] = [{"prompt_token_ids": list(case.prompt)} for case in cases]
    if llm.llm_engine.vllm_config.model_config.is_encoder_decoder:
        prompts = [{"encoder_prompt": {"prompt_token_ids": [1]}, "decoder_prompt": each} for each in prompts]
    outputs = llm.generate(prompts, [_params(case.edits, points, new_tokens) for case in cases], use_tqdm=False)
    return [_answer(output) for output in outputs]


def _params(edits: Sequence[EditAt], points: Sequence[str], new_tokens: int) -> Any:
    from vllm_steer import Edit, SamplingParams

    sugar = edits[0].sugar() if len(edits) == 1 else None
    steering = sugar if sugar is not None else {"steering": [Edit(**edit.arguments()) for edit in edits]}
    return SamplingParams(
        max_tokens=new_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1,
        flat_logprobs=True,
        capture={"memory": {"hooks": dict.fromkeys(points, "all"), "positions": "all"}} if points else None,
        **(steering if edits else {}),
    )


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    rows = [*_rows(output.prompt_logprobs)[1:], *_rows(completion.logprobs)]
    return Answer((*output.prompt_token_ids, *completion.token_ids), np.stack(rows), _streams(completion))


def _streams(completion: Any) -> dict[str, Array]:
    if completion.capture_results is None:
        return {}
    found = completion.capture_results["memory"]
    if found.status != "ok":
        raise RuntimeError(f"capture: {found.error}")
    points: dict[str, list[Array]] = {}
    for point, layer in found.sites:
        points.setdefault(point, []).append(found.tensor(point, layer).float().numpy())
    return {point: np.stack(layers) for point, layers in points.items()}


def _rows(flat: Any) -> list[Array]:
    rows = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        row = np.full(VOCAB, np.nan, np.float32)
        row[flat.token_ids[start:end]] = flat.logprobs[start:end]
        rows.append(row)
    return rows
