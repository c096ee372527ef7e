# SPDX-License-Identifier: Apache-2.0
"""Running the self-check in a worker: its requests as real steps, through the worker's own ``execute_model``.

vLLM's dummy runs write no keys and values, so attention has nothing to attend to in them, and half of each block would
go unchecked. Real steps without a scheduler are what vLLM warms up its own kernels with
(``v1/worker/gpu/warmup.py``). All ranks of an engine run the same steps: what they check differs, their batches do not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_steer.capture.step_rows import StepRows
from vllm_steer.config import SteeringConfig, from_vllm_config
from vllm_steer.engine.worker_manager import WorkerSteeringManager
from vllm_steer.models.self_check_plan import (
    NEEDED,
    TOKENS,
    Hop,
    Probe,
    Rows,
    SelfCheckError,
    Site,
    aligned_hops,
    check_hops,
    check_plain,
    check_plain_code,
    hop_probe,
    hops_of,
    plain_probes,
    prompt_of,
    served_sites,
)
from vllm_steer.params import EXTRA_KEY
from vllm_steer.points import POINT_NAMES
from vllm_steer.program import compile_program

# Under vLLM's own logger, the only one for which vLLM sets up a handler and a level.
logger = init_logger(f"vllm.{__name__}")

_AT_ONCE = 32
"""Requests of one step, at most."""
_NAME = "_steering_self_check_"
_DISABLE = "--steering-skip-self-check (SteeringConfig(self_check=False))"


def self_check(worker: Any) -> dict[str, Any]:
    """Run it and log what it cost; what it found, in builtins. Raises :class:`SelfCheckError`."""
    steering: WorkerSteeringManager = worker.model_runner.steering
    config = from_vllm_config(worker.vllm_config)
    model = type(worker.model_runner.get_model()).__name__
    reason = _why_not(worker, config)
    if config is None or reason is not None:
        logger.warning("The taps on %s were not checked at start: %s.", model, reason)
        return {"ran": False, "reason": reason}
    started = time.perf_counter()
    try:
        with _draws_kept(worker.device):
            found = _Check(worker, steering, config).run()
    except SelfCheckError as error:
        raise SelfCheckError(
            f"{model} cannot be steered: the check of its taps failed at {error}. Edits and reads would be wrong, so "
            f"the engine does not start. {_DISABLE} starts it all the same."
        ) from None
    seconds = time.perf_counter() - started
    logger.info(
        "Steering: taps checked on %s itself, %d of %d steps between points conclusive, in %.0f ms",
        model,
        found["conclusive"],
        found["hops"],
        1000 * seconds,
    )
    return {"ran": True, "seconds": seconds, **found}


@contextmanager
def _draws_kept(device: torch.device) -> Iterator[None]:
    """All that vLLM draws from is as it was: it has seeded it, and users repeat what they ran by that seed.

    Requests of the check are greedy, but runner V2 draws a seed for any request without one, from NumPy
    (``v1/worker/gpu/sample/states.py``).
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _why_not(worker: Any, config: SteeringConfig | None) -> str | None:
    """Why the check cannot run here, or None."""
    if config is None or not config.self_check:
        return f"{_DISABLE} was given"
    small = [f"{name} {getattr(config, name)}" for name, least in NEEDED.items() if getattr(config, name) < least]
    if small:
        return f"it needs more than {', '.join(small)}"
    scheduler = worker.vllm_config.scheduler_config
    if min(scheduler.max_num_batched_tokens, worker.vllm_config.model_config.max_model_len - 1) < TOKENS:
        return f"it needs steps and requests of {TOKENS} tokens"
    if worker.vllm_config.kv_transfer_config is not None and not _can_disable_connector(worker):
        return "this runner makes no step without its KV connector's scheduler"
    if not _blocks(worker):
        return "there are too few KV blocks"
    return None


def _can_disable_connector(worker: Any) -> bool:
    return hasattr(getattr(worker.model_runner, "kv_connector", None), "set_disabled")


def _blocks(worker: Any) -> list[tuple[list[int], ...]]:
    """KV blocks for each request of a step, by cache group; block 0 is vLLM's null block."""
    cache = worker.model_runner.kv_cache_config
    positions = TOKENS + worker.vllm_config.num_lookahead_tokens
    counts = []
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        counts.append(-(-positions // spec.block_size) + getattr(spec, "num_speculative_blocks", 0))
    requests: list[tuple[list[int], ...]] = []
    free = 1
    while len(requests) < _AT_ONCE and (not counts or free + sum(counts) <= cache.num_blocks):
        ids = []
        for count in counts:
            ids.append(list(range(free, free + count)))
            free += count
        requests.append(tuple(ids))
    return requests


class _Check:
    """One run: the plain requests, then those with edits that follow from them."""

    def __init__(self, worker: Any, steering: WorkerSteeringManager, config: SteeringConfig) -> None:
        self._worker, self._steering, self._config = worker, steering, config
        self._vocab = worker.vllm_config.model_config.get_vocab_size()
        self._blocks = _blocks(worker)
        self._last: set[str] = set()
        self._made = 0

    def run(self) -> dict[str, Any]:
        steering, config = self._steering, self._config
        epsilon = float(torch.finfo(steering.tables.arena.dtype).eps)
        refused = steering.capabilities()["refused"]
        num_layers = steering.decoder.num_layers
        # Whatever stage this is, plain requests read all points of all layers: all ranks make the same steps.
        points = steering.tables.points
        every = served_sites(points, range(num_layers), {})
        here = served_sites(points, [layer.number for layer in steering.decoder.layers], refused)
        plain = plain_probes(every, min(config.capture_rows // TOKENS, config.max_instructions))
        with steering.capture.enabled_on_every_rank():
            try:
                streams = self._ask(plain)
                base, donor = (
                    {place: rows for probe, got in streams if probe.donor is d for place, rows in got.items()}
                    for d in (False, True)
                )
                check_plain(here, base, donor, epsilon)
                hops = hops_of(here)
                # As many requests on all ranks: each edits and reads where it has a hop, and others are plain.
                probes = [self._probe(hop, base, donor) for hop in aligned_hops(every, hops)]
                got = [rows for probe, rows in self._ask(probes) if probe.reads]
                wanted = [hop for hop in aligned_hops(every, hops) if hop is not None]
                targets = [rows[hop.target] for hop, rows in zip(wanted, got, strict=True)]
                verdict = check_hops(wanted, targets, base, donor, epsilon)
                if config.plain_code:
                    self._compare_codes(here[-1:], epsilon)
            finally:
                self._finish()
        return {"hops": verdict.hops, "conclusive": verdict.conclusive, "sites": len(here)}

    def _compare_codes(self, reads: Sequence[Site], epsilon: float) -> None:
        """Both requests with a read on this stage, for which the model runs with its taps, and without one."""
        tapped, plain = (
            [self._final(Probe(donor, reads=tuple(some))) for donor in (False, True)] for some in (reads, ())
        )
        # None on a stage that is not the last, whose streams went into what the last one compares.
        found = [rows for rows in (*tapped, *plain) if rows is not None]
        if len(found) == 4:
            check_plain_code(found[:2], found[2:], epsilon)

    def _final(self, probe: Probe) -> Rows | None:
        """The hidden states of one request."""
        found: list[Rows | None] = []
        self._step([probe], found.append)
        return found[0]

    def _hidden(self) -> Rows | None:
        """Those of the step that awaits its sampling, on the last stage."""
        state = self._worker.model_runner.execute_model_state
        hidden = None if state is None else state.hidden_states
        return None if hidden is None else hidden[:TOKENS].double().cpu().numpy()

    def _probe(self, hop: Hop | None, base: Mapping[Site, Rows], donor: Mapping[Site, Rows]) -> Probe:
        return Probe(donor=False) if hop is None else hop_probe(hop, base, donor)

    def _ask(self, probes: Sequence[Probe]) -> list[tuple[Probe, dict[Site, Rows]]]:
        """Each probe with the rows that it read, ``[TOKENS, hidden]`` float64."""
        config, scheduler = self._config, self._worker.vllm_config.scheduler_config
        reads = max(max((len(probe.reads) for probe in probes), default=0), 1)
        size = min(
            len(self._blocks),
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens // TOKENS,
            config.max_rows // NEEDED["max_rows"],
            config.max_vectors // NEEDED["max_vectors"],
            config.max_instructions // max(NEEDED["max_instructions"], reads),
            config.capture_rows // (TOKENS * reads),
        )
        size = max(size, 1)
        answers = []
        for start in range(0, len(probes), size):
            answers += self._step(probes[start : start + size])
        return answers

    def _step(
        self, probes: Sequence[Probe], look: Callable[[Rows | None], None] | None = None
    ) -> list[tuple[Probe, dict[Site, Rows]]]:
        names = [f"{_NAME}{self._made + n}" for n in range(len(probes))]
        self._made += len(probes)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            self._request(name, probe, blocks) for name, probe, blocks in zip(names, probes, self._blocks, strict=False)
        ]
        output.num_scheduled_tokens = dict.fromkeys(names, TOKENS)
        output.total_num_scheduled_tokens = TOKENS * len(names)
        output.finished_req_ids, self._last = self._last, set(names)
        output.num_spec_tokens_to_schedule = self._worker.vllm_config.num_speculative_tokens
        self._steering.tables.arena.fill_(torch.nan)
        self._execute(output)
        if look is not None:
            # Before sampling, whose drafter may have its graphs' memory in common with the model's.
            look(self._hidden())
        pending = self._steering.capture.take_rows()
        self._worker.sample_tokens(None)
        # These requests project nothing: their rows leave in one form.
        (step,) = (None,) if pending is None else pending.wait()
        return [
            (probe, {} if step is None else self._rows(step, name)) for name, probe in zip(names, probes, strict=True)
        ]

    def _request(self, name: str, probe: Probe, blocks: tuple[list[int], ...]) -> NewRequestData:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        if probe.edits or probe.reads:
            params.extra_args = {EXTRA_KEY: compile_program(probe.edits, probe.captures()).to_bytes()}
        prompt = prompt_of(self._vocab, probe.donor)
        return NewRequestData(
            req_id=name,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=blocks,
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=prompt,
        )

    def _rows(self, step: StepRows, name: str) -> dict[Site, Rows]:
        dtype = self._steering.tables.arena.dtype
        found: dict[Site, Rows] = {}
        for entry in step.index.entries_by_request.get(name, ()):
            codes, start, count = step.index.codes[entry], int(step.start[entry]), int(step.count[entry])
            rows = torch.from_numpy(step.rows_of(entry).copy()).view(dtype).double().numpy()
            rows = rows.reshape(count, len(codes), -1)
            for index, code in enumerate(codes):
                layer, point = divmod(code // 2, len(POINT_NAMES))
                place = POINT_NAMES[point], layer
                rest = found.setdefault(place, np.full((TOKENS, rows.shape[-1]), np.nan))
                rest[start : start + count] = rows[:, index]
        return found

    def _execute(self, output: SchedulerOutput) -> None:
        """vLLM's worker takes care of pipeline stages; a KV connector has no part in this."""
        connector: Any = getattr(self._worker.model_runner, "kv_connector", None)
        if not _can_disable_connector(self._worker):
            self._worker.execute_model(output)
            return
        connector.set_disabled(True)
        try:
            self._worker.execute_model(output)
        finally:
            connector.set_disabled(False)

    def _finish(self) -> None:
        """Take the last step's requests out of the runner."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self._last = self._last, set()
        self._execute(output)
