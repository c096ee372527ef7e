# SPDX-License-Identifier: Apache-2.0
"""Set up steering on a loaded model, before its first forward pass."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_steer.compat.internals import (
    envs,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.engine.cudagraph_sets import CUDAGraphSetManager
from vllm_steer.engine.program_store import ProgramStore
from vllm_steer.engine.untapped_model import (
    UntappedModel,
    UntappedModelUnavailableError,
    build_untapped_model,
    modules_with_own_forward,
    plain_code_problem,
)
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.models.centring import Centring, centring_of
from vllm_steer.models.discovery import ALLOW, Decoder, UnsupportedModelError, find_decoder, find_final_norm
from vllm_steer.models.install import install_taps
from vllm_steer.models.parallelism import why_unproven_split, why_wrong_stage
from vllm_steer.models.recipe import qualified_name
from vllm_steer.models.sae import encoder_shape, read_encoder
from vllm_steer.models.sae_site import check_model, models_of
from vllm_steer.points import POINT_NAMES, POINTS, POINTS_FLAG, points_on
from vllm_steer.request.readout import LENS, SAE_PREFIX
from vllm_steer.taps.heads import Head, LensHead
from vllm_steer.taps.ops import device_ops
from vllm_steer.taps.sparse_encoder import SparseEncoderHead
from vllm_steer.taps.tables import Tables
from vllm_steer.taps.tap import CONTEXT_KEY
from vllm_steer.taps.user_hooks import UserHooks

logger = steering_logger(__name__)


def set_up_steering(
    model: nn.Module,
    vllm_config: Any,
    device: torch.device,
    *,
    max_tokens: int,
    max_requests: int,
    separate_idle_graphs: bool,
) -> WorkerSteeringManager:
    """Allocate the device tables, install the taps, and return the rank's steering manager.

    Args:
        model: The loaded model.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        max_tokens: Most tokens of a batch.
        max_requests: Number of slots for requests.
        separate_idle_graphs: Whether this runner can run other code in idle steps than in steered ones.

    Raises:
        SteeringError: The configuration has no steering section.
        UnsupportedModelError: The model cannot be steered.
    """
    started = time.perf_counter()
    config = from_vllm_config(vllm_config)
    if config is None:
        raise SteeringError(
            "additional_config",
            "has no steering section, but the steering worker is in use; use vllm_steer.engine_kwargs()",
        )
    model_config = vllm_config.model_config
    found = find_decoder(model, model_config.hf_text_config, allow_unproven=config.allow_unproven)
    decoder = replace(
        found,
        tensor_parallel=get_tensor_model_parallel_world_size() > 1,
        final_norm=find_final_norm(model, found),
    )
    decoder = _with_split(decoder, config, pipeline=vllm_config.parallel_config.pipeline_parallel_size > 1)
    _log_restrictions(decoder, config)
    points = points_on(config.points)
    tables = Tables(
        config,
        num_sites=decoder.num_layers * len(points),
        hidden_size=model_config.get_hidden_size(),
        max_tokens=max_tokens,
        max_requests=max_requests,
        dtype=model_config.dtype,
        device=device,
        drafts=vllm_config.num_speculative_tokens,
    )
    tables.set_first_layer(decoder.layer_range.start)
    if config.user_hooks:
        tables.hooks = _user_hooks(tables, decoder)
    own_forward = modules_with_own_forward(model)
    install_taps(decoder, tables)
    vllm_config.compilation_config.static_forward_context[CONTEXT_KEY] = tables
    problem = plain_code_problem(config, vllm_config, device, separate_idle_graphs=separate_idle_graphs)
    untapped: UntappedModel | str
    try:
        untapped = problem or build_untapped_model(model, decoder, vllm_config, own_forward)
    except UntappedModelUnavailableError as reason:
        untapped = str(reason)
    if isinstance(untapped, str):
        # A GPU engine that could be faster, or a setting without effect.
        log = logger.warning if config.plain_code or problem is None else logger.info
        log("Steps without edits and captures run the model with its taps: %s.", untapped)
    heads, no_lens = _heads(model, decoder, vllm_config)
    heads.update(_autoencoders(config, model_config, device, centring_of(decoder)))
    manager = WorkerSteeringManager(
        decoder,
        ProgramStore(tables, config, decoder.num_layers, decoder.layer_range),
        CUDAGraphSetManager(
            tables,
            config.graph_sets,
            len(points),
            decoder.layer_range,
            untapped,
            fewer_sizes=_chooses_sizes(vllm_config.parallel_config),
        ),
        device_ops(tables, model_config.dtype),
        _facts(model, decoder, model_config),
        heads=heads,
        no_lens=no_lens,
        captures=get_tensor_model_parallel_rank() == 0,
        speculative=vllm_config.speculative_config is not None,
        compare_plain_code=problem is None,
    )
    logger.info(
        "Steering: %d sites on %d layers of %s, tables %.1f MiB, installed in %.0f ms",
        len(decoder.layers) * len(points),
        len(decoder.layers),
        type(model).__name__,
        tables.num_bytes / 2**20,
        1000 * (time.perf_counter() - started),
    )
    return manager


def _chooses_sizes(parallel_config: Any) -> bool:
    """Return whether this rank may pad steered steps more than others.

    Data-parallel ranks agree on the size of a step, whatever their requests are. Pipeline stages exchange rows of one
    size.
    """
    return bool(parallel_config.data_parallel_size == 1 and parallel_config.pipeline_parallel_size == 1)


def _user_hooks(tables: Tables, decoder: Decoder) -> UserHooks:
    def shown_id(request_id: str) -> str:
        # vLLM appends a random part (v1/engine/input_processor.py, assign_request_id).
        return request_id if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else request_id.rpartition("-")[0]

    first = {layer: layer * len(POINT_NAMES) for layer in range(decoder.num_layers)}
    columns = {
        (layer, name): tables.column[first[layer] + POINTS[name].index] for layer in first for name in tables.points
    }
    return UserHooks(columns, shown_id)


def _heads(model: Any, decoder: Decoder, vllm_config: Any) -> tuple[dict[str, Head], str | None]:
    """Return the heads of readouts by the names that programs use, and why there is no lens."""
    if vllm_config.lora_config is not None:
        # vLLM's logits of an engine with LoRA depend on the rows that it samples from.
        return {}, "the engine serves LoRA adapters"
    norm = decoder.final_norm
    if norm is None or not hasattr(model, "compute_logits"):
        return {}, f"the final norm or the unembedding of {type(model).__name__} is not known"
    return {LENS: LensHead(norm, model.compute_logits, vllm_config.model_config.get_vocab_size())}, None


def _autoencoders(
    config: SteeringConfig, model_config: Any, device: torch.device, centring: Centring
) -> dict[str, Head]:
    """Return the autoencoders by the names that programs use, on the rank that returns readouts.

    Raises:
        SteeringError: An autoencoder cannot be read, has another width, or was made for another model.
    """
    heads: dict[str, Head] = {}
    for name, folder in config.saes.items():
        field = f"steering_config.saes.{name}"
        _, features = encoder_shape(folder, field, model_config.get_hidden_size())
        if not config.sae_any_site:
            check_model(folder, field, models_of(model_config))
        if get_tensor_model_parallel_rank() == 0:
            head = SparseEncoderHead(read_encoder(folder, field, centring), device, model_config.dtype)
            heads[SAE_PREFIX + name] = head
            logger.info("Autoencoder %s: %d features, %.1f MiB", name, features, head.num_bytes / 2**20)
    return heads


def _with_split(decoder: Decoder, config: SteeringConfig, *, pipeline: bool) -> Decoder:
    """Return the decoder, with a doubt if its split over ranks is unproven.

    Raises:
        UnsupportedModelError: vLLM computes wrong outputs with this split, or the split is unproven and unproven
            models are not allowed.
    """
    first = decoder.layers[0]
    if first.recipe.shape != "streams" and first.recipe.runs is None:
        return decoder
    layer_class = qualified_name(type(first.module))
    if (wrong := why_wrong_stage(first.number, first.module)) is not None:
        raise UnsupportedModelError(f"{layer_class} cannot be steered: {wrong}.")
    doubt = why_unproven_split(layer_class, tensor=decoder.tensor_parallel, pipeline=pipeline)
    if doubt is None:
        return decoder
    if not config.allow_unproven:
        raise UnsupportedModelError(f"{layer_class} cannot be steered: {doubt}, or {ALLOW}.")
    return replace(decoder, unproven=(*decoder.unproven, doubt))


def _log_restrictions(decoder: Decoder, config: SteeringConfig) -> None:
    for doubt in decoder.unproven:
        logger.warning("Steering an unproven model because of --steering-allow-unproven: %s.", doubt)
    refused = decoder.refused(get_tensor_model_parallel_world_size() > 1)
    for point in config.points:
        reasons = refused[point]
        if len(reasons) == len(decoder.layers):
            # Each request at this point is refused with the reason; tell the operator too.
            logger.warning("%s %s has no effect on this model: %s.", POINTS_FLAG, point, next(iter(reasons.values())))


def _facts(model: nn.Module, decoder: Decoder, model_config: Any) -> dict[str, Any]:
    tensor_parallel = get_tensor_model_parallel_world_size() > 1
    return {
        "num_layers": decoder.num_layers,
        "hidden_size": model_config.get_hidden_size(),
        "max_model_len": model_config.max_model_len,
        "refused": decoder.refused(tensor_parallel),
        "unread": decoder.unread(tensor_parallel),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "logprobs_mode": model_config.logprobs_mode,
        "architecture": model_config.architectures[0],
        "model_class": type(model).__name__,
        "recipes": decoder.recipes(),
        "altered": decoder.altered(),
        "mixed_head": decoder.mixed_head,
        "centring": centring_of(decoder),
        "unproven": list(decoder.unproven),
    }
