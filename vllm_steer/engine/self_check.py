# SPDX-License-Identifier: Apache-2.0
"""Self-check of the taps at engine start, on the model and code path that will serve.

:mod:`vllm_steer.models.self_check_plan` explains what is checked; :mod:`vllm_steer.engine.self_check_runner` runs the
requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_steer.compat.internals import init_logger
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.engine.self_check_runner import SelfCheckRunner, allocate_blocks, can_disable_connector
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.models.self_check_plan import (
    NEEDED,
    TOKENS,
    CheckRequest,
    SelfCheckError,
    Site,
    aligned_hops,
    check_hops,
    check_plain,
    check_plain_code,
    hop_request,
    hops_of,
    plain_requests,
    served_sites,
)
from vllm_steer.points import POINTS_FLAG
from vllm_steer.request.readout import LENS
from vllm_steer.taps.heads import LensHead

# vLLM configures handlers and levels only for loggers below "vllm".
logger = init_logger(f"vllm.{__name__}")

_DISABLE = "--steering-skip-self-check (SteeringConfig(self_check=False))"


def self_check(worker: Any) -> dict[str, Any]:
    """Check the taps of a worker and log the result.

    All ranks run the same requests; each judges its own layers.

    Returns:
        A report in builtin types: whether the check ran, and the reason or the result.

    Raises:
        SelfCheckError: A tap is in the wrong place.
    """
    steering: WorkerSteeringManager = worker.model_runner.steering
    config = from_vllm_config(worker.vllm_config)
    model = type(worker.model_runner.get_model()).__name__
    reason = _skip_reason(worker, config)
    if config is None or reason is not None:
        logger.warning(
            "Skipped the self-check on %s: %s. The places of edits and captures are not verified, and lens readouts "
            "are refused.",
            model,
            reason,
        )
        steering.no_lens = f"the self-check, which proves the final norm, was skipped: {reason}"
        return {"ran": False, "reason": reason}
    started = time.perf_counter()
    try:
        with _preserve_random_state(worker.device):
            result = _check(SelfCheckRunner(worker, steering, config), steering, config)
    except SelfCheckError as error:
        raise SelfCheckError(
            f"{model} cannot be steered: the self-check of its taps failed at {error}. Edits and captures would be "
            f"wrong, so the engine does not start. {_next_steps(config)}"
        ) from None
    seconds = time.perf_counter() - started
    if result["conclusive"]:
        logger.info(
            "Steering: self-check passed on %s: %d of %d pairs of hook points verified, in %.0f ms",
            model,
            result["conclusive"],
            result["hops"],
            1000 * seconds,
        )
    else:
        logger.warning(
            "Steering: the self-check on %s found no error, but verified none of %d pairs of hook points: its layers "
            "change the stream by less than the rounding of its dtype, as with --load-format dummy.",
            model,
            result["hops"],
        )
    return {"ran": True, "seconds": seconds, **result}


@contextmanager
def _preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state that vLLM has seeded, so that the check does not change sampled outputs.

    The check's requests are greedy, but runner V2 draws a seed for every request without one
    (``v1/worker/gpu/sample/states.py``).
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _next_steps(config: SteeringConfig) -> str:
    """Return what to do after a failed check."""
    fewer = f", or without {POINTS_FLAG}" if config.points else ""
    return (
        f"Start it with --enforce-eager (no compiled code){fewer}; if the check passes, it can be used. "
        "`vllm-steer doctor MODEL --prove` runs the check on a shrunk copy of the model. Report the failure as an "
        "issue of vllm-steer, with this message, the engine's flags and the versions of vLLM and torch. "
        f"{_DISABLE} starts the engine without the check."
    )


def _skip_reason(worker: Any, config: SteeringConfig | None) -> str | None:
    """Return why the check cannot run, or None."""
    if config is None or not config.self_check:
        return f"{_DISABLE} is set"
    too_small = [
        f"{name} of at least {least}, not {getattr(config, name)}"
        for name, least in NEEDED.items()
        if getattr(config, name) < least
    ]
    if too_small:
        return f"it needs {' and '.join(too_small)}"
    scheduler = worker.vllm_config.scheduler_config
    if min(scheduler.max_num_batched_tokens, worker.vllm_config.model_config.max_model_len - 1) < TOKENS:
        return f"it needs steps and requests of {TOKENS} tokens"
    if worker.vllm_config.kv_transfer_config is not None and not can_disable_connector(worker):
        return "vLLM's model runner V1 cannot disable the KV connector; use runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)"
    if not allocate_blocks(worker):
        return "too few KV cache blocks; raise --gpu-memory-utilization or lower --max-model-len"
    return None


def _check(runner: SelfCheckRunner, steering: WorkerSteeringManager, config: SteeringConfig) -> dict[str, Any]:
    """Run the plain requests, then the requests with edits derived from their rows."""
    epsilon = float(torch.finfo(steering.tables.arena.dtype).eps)
    refused = steering.capabilities()["refused"]
    points = steering.tables.points
    # Plain requests read the sites of all pipeline stages, so that all ranks run the same steps.
    all_sites = served_sites(points, range(steering.decoder.num_layers), {})
    sites = served_sites(points, [layer.number for layer in steering.decoder.layers], refused)
    with steering.capture.enabled_on_every_rank():
        try:
            plain = runner.run(plain_requests(all_sites, min(config.capture_rows // TOKENS, config.max_instructions)))
            base, donor = (
                {site: rows for request, found in plain if request.donor is is_donor for site, rows in found.items()}
                for is_donor in (False, True)
            )
            check_plain(sites, base, donor, epsilon, steering.decoder.gaps)
            # Every rank runs the same number of requests. Requests are plain on ranks that do not own their layers.
            aligned = list(aligned_hops(all_sites, hops_of(sites, steering.decoder.recalls, steering.decoder.mixed)))
            requests = [CheckRequest(donor=False) if hop is None else hop_request(hop, base, donor) for hop in aligned]
            hops = [hop for hop in aligned if hop is not None]
            found = [rows for request, rows in runner.run(requests) if request.captures]
            targets = [rows[hop.target] for hop, rows in zip(hops, found, strict=True)]
            verdict = check_hops(hops, targets, base, donor, epsilon)
            if steering.compare_plain_code:
                _compare_untapped(runner, sites[-1:], epsilon)
            steering.no_lens = _check_lens(runner, steering, epsilon)
        finally:
            runner.finish()
    return {"hops": verdict.hops, "conclusive": verdict.conclusive, "sites": len(sites)}


def _check_lens(runner: SelfCheckRunner, steering: WorkerSteeringManager, epsilon: float) -> str | None:
    """Compare the final norm of the last layer's rows with the model's final hidden states; return why lens is refused.

    All ranks run the step.
    """
    site: Site = "post_block", steering.decoder.num_layers - 1
    found, hidden = runner.run_to_end(CheckRequest(captures=(site,), donor=False))
    rows = found.get(site)
    head = steering.heads.heads.get(LENS)
    if head is None:
        return steering.no_lens
    if not isinstance(head, LensHead) or rows is None or hidden is None:
        return "this rank does not have the final norm"
    arena = steering.tables.arena
    stream = torch.from_numpy(rows).to(arena.device, arena.dtype)
    try:
        with torch.inference_mode():
            normed = head.norm(stream).double().cpu().numpy()
            logits = head.products(stream)
    except Exception as failure:  # the methods belong to the model, which may give them other arguments
        return f"the final norm or the unembedding cannot be run on rows: {type(failure).__name__}"
    if logits is not None and logits.shape != (len(rows), head.num_outputs):
        return f"the model has {logits.shape[-1]} logits, and not one for each of {head.num_outputs} tokens"
    error, length = (np.linalg.norm(each, axis=-1) for each in (normed - hidden, hidden))
    if (error <= max(16 * epsilon, 1e-3) * length).all():
        return None
    return "the final norm of the last layer's output differs from the model's final hidden states"


def _compare_untapped(runner: SelfCheckRunner, captured: Sequence[Site], epsilon: float) -> None:
    """Compare the final hidden states of both requests with a capture, which runs the taps, and without one.

    Pipeline stages before the last have no final hidden states; the last stage's depend on theirs.
    """
    tapped, untapped = (
        [runner.run_to_end(CheckRequest(donor, captures=tuple(sites)))[1] for donor in (False, True)]
        for sites in (captured, ())
    )
    found = [rows for rows in (*tapped, *untapped) if rows is not None]
    if len(found) == 4:
        check_plain_code(found[:2], found[2:], epsilon)
