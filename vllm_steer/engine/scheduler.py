# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers with steering: prefix-cache keys that include edits, and admission by table and capture room.

A request reserves room in the device tables when it is first scheduled and releases it when it ends. Its program is
therefore bound from admission to the end, through preemptions. The policies are in :mod:`.admission` and
:mod:`.arena`; this module connects them to vLLM's methods.
"""

from __future__ import annotations

import copy
from time import perf_counter
from typing import Any

from vllm_steer.compat.internals import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    FullAttentionManager,
    PauseState,
    RequestStatus,
    Scheduler,
    current_platform,
    get_hash_fn_by_name,
)
from vllm_steer.compat.stages import BUSY_LOOPS, LOGGING
from vllm_steer.compat.wraps import install
from vllm_steer.config import from_vllm_config
from vllm_steer.engine.admission import REFUSED, AdmissionController, most_rows, rows_for
from vllm_steer.engine.arena import ArenaBudget, TokenLimiter, block_ahead
from vllm_steer.engine.cache_keys import steering_hasher
from vllm_steer.engine.edited_blocks import EditedBlocks
from vllm_steer.engine.model_output import failed_of, keep_tokens
from vllm_steer.engine.record_keeper import FiredStop, RecordKeeper
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.engine.stats_collector import EngineStatsCollector
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.models.discovery import caches_behind_attention, run_count
from vllm_steer.params import PROGRAM_KEY, live_id, program_bytes, restore_program
from vllm_steer.points import how_to_switch_on, points_on
from vllm_steer.program import Program, Resolved, TableAllocator, resolve
from vllm_steer.program.records import stop_reason

logger = steering_logger(__name__)

CAPTURE_SKIPPED = (
    "not captured: running requests used up capture_mib when this request was admitted (capture_policy fail)"
)


class SteeringSchedulerMixin:
    """Overrides of vLLM's ``Scheduler``. :mod:`vllm_steer.compat.stages` lists them in order."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = from_vllm_config(self.vllm_config)
        if config is None:
            raise SteeringError("additional_config", "has no `steering` section; use vllm_steer.engine_kwargs()")
        model_config = self.vllm_config.model_config
        self._steering_layers = run_count(model_config.hf_text_config)
        self._caches_behind_attention = caches_behind_attention(model_config.hf_text_config)
        self._bidirectional_images = model_config.is_mm_prefix_lm
        self._steering_points = frozenset(points_on(config.points))
        self._steering_hash = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        self._with_program: dict[str, Resolved] = {}
        self._malformed: dict[str, str] = {}
        # Requests with live strengths, in engines with draft tokens.
        self._without_drafts: set[str] = set()
        self._row_bytes = int(model_config.get_hidden_size() * model_config.dtype.itemsize)
        self._capture_policy = config.capture_policy
        self.steering_allocator = TableAllocator(
            config.max_rows, config.max_instructions, config.max_vectors, config.max_matrix_rows
        )
        self.steering_admission = AdmissionController(
            self.steering_allocator, most_rows(config.capture_mib, self._row_bytes), config.queue_timeout
        )
        self._arena = ArenaBudget(
            config.capture_rows, self.num_spec_tokens, self.vllm_config.speculative_config is not None
        )
        groups = self.kv_cache_config.kv_cache_groups
        # vLLM does not split the prompts of these models (``EngineCore._initialize_kv_caches``).
        whole_prompts = any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups)
        self._token_limiter = TokenLimiter(
            self._arena, self._with_program, self.scheduler_config, self.max_num_scheduled_tokens, whole_prompts
        )
        self.steering_row_sender = RowSender()
        self.steering_records = RecordKeeper()
        self._steering_stats = EngineStatsCollector(self.steering_admission)
        self._edited_blocks: EditedBlocks | None = None
        if current_platform.is_cpu() and not self.kv_cache_config.needs_kv_cache_zeroing:
            # In the other configurations vLLM zeroes every new block, or no block needs it.
            self._edited_blocks = EditedBlocks(self.kv_cache_manager.coordinator.single_type_managers)
            self.needs_kv_cache_zeroing = True

    # Arrival

    def add_request(self: Any, request: Any) -> None:
        started = perf_counter()
        try:
            self._bind_program(request)
        except SteeringError as error:
            # The front end checks every request. A request that bypassed the check must not stop the engine: it never
            # starts and ends with the next step.
            logger.exception("Ending request %s: malformed steering program", request.request_id)
            self._malformed[request.request_id] = str(error)
        self._steering_stats.seconds += perf_counter() - started
        super().add_request(request)  # type: ignore[misc]

    def _bind_program(self: Any, request: Any) -> None:
        """Resolve the program of a new request and re-key its blocks.

        Raises:
            SteeringError: The program is malformed or can never run on this engine.
        """
        restore_program(request)
        data = program_bytes(request.sampling_params)
        if data is None or request.request_id in self.requests:
            return
        # Requests with equal programs share one copy of the bytes, which the worker then finds in its cache.
        program, request.sampling_params.extra_args[PROGRAM_KEY] = Program.intern(data)
        disabled = next(iter(program.points - self._steering_points), None)
        if disabled is not None:
            raise SteeringError("extra_args.steer", how_to_switch_on(disabled))
        if program.needs_prompt:
            raise SteeringError("extra_args.steer", "the front end has not filled in the prompt's parts")
        resolved = self._resolve(program, request)
        if not resolved.token_programs:
            return
        impossible = self._token_limiter.reason_impossible(request, resolved)
        if impossible is not None:
            raise SteeringError("capture", impossible)
        self._with_program[request.request_id] = resolved
        self._token_limiter.add_request(resolved)
        records = resolved.records
        if records is not None and records.has_state:
            # Of `min_tokens` generated tokens, the last one is the first with which generation may stop.
            first_stop = request.num_prompt_tokens + request.sampling_params.min_tokens - 1
            self.steering_records.add_request(request.request_id, first_stop)
        if records is not None and records.layout.live and self.num_spec_tokens:
            self._without_drafts.add(request.request_id)
        if self._needs_whole_prompt(resolved, request):
            request.skip_reading_prefix_cache = True
        upstream = request._block_hasher
        if upstream is not None:
            # Live strengths may change at any time, so the blocks of such a request are never shared.
            has_live = records is not None and records.layout.live
            salt = live_id(request.sampling_params, request.request_id).encode() if has_live else b""
            request._block_hasher = steering_hasher(
                upstream,
                resolved,
                self.hash_block_size,
                self._steering_hash,
                salt,
                self._bidirectional_images,
                request.block_hashes,
            )
            request.block_hashes = []
            request.update_block_hashes()

    def _resolve(self: Any, program: Any, request: Any) -> Resolved:
        return resolve(
            program,
            request.num_prompt_tokens,
            self._steering_layers,
            caches_behind_attention=self._caches_behind_attention,
        )

    # Prefix cache

    def _needs_whole_prompt(self: Any, resolved: Resolved, request: Any) -> bool:
        """Return whether the request must not use the prefix cache.

        In hybrid caches and with KV connectors, a hit cannot be shortened to the first captured position.
        """
        first = resolved.first_needed_position
        if first is None or first >= request.num_prompt_tokens - 1:
            return False
        return self.connector is not None or not self._can_shorten_hits()

    def _can_shorten_hits(self: Any) -> bool:
        """Return whether every prefix of a cache hit is a hit.

        Sliding windows and recurrent states keep only the end of a hit (``v1/core/single_type_kv_cache_manager.py``).
        """
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return len(managers) == 1 and type(managers[0]) is FullAttentionManager

    def _get_local_prefix_cache_hit(self: Any, request: Any, *args: Any) -> Any:
        """Return vLLM's hit, shortened to the first captured or read position: cached tokens are not computed.

        If an image must be computed in one step, the hit does not end within it.
        """
        blocks, hit, *rest = super()._get_local_prefix_cache_hit(request, *args)  # type: ignore[misc]
        resolved = self._with_program.get(request.request_id)
        first = None if resolved is None else resolved.first_needed_position
        if first is None or hit <= first:
            return (blocks, hit, *rest)
        if not self._can_shorten_hits():
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        hit = block_ahead(self._token_limiter.spans(request), first, self.block_size)
        return (self.kv_cache_manager.truncate_computed_blocks(blocks, hit), hit, *rest)

    def _get_new_block_ids_to_zero(self: Any) -> Any:
        new = super()._get_new_block_ids_to_zero()  # type: ignore[misc]
        return new if self._edited_blocks is None else self._edited_blocks.take_reused(new or ())

    # One step

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering_admission.begin_step()
        if self._token_limiter.begin_step():
            self.__dict__.pop("_reserve_prefill_lookahead", None)
        else:
            # Hot path, called for every request: call vLLM's method directly.
            self._reserve_prefill_lookahead = super()._reserve_prefill_lookahead  # type: ignore[misc]
        for request_id in self._without_drafts:
            # A change of strength holds from the position that is reported, which drafts would make uncertain.
            self.requests[request_id].spec_token_ids = []
        scheduled = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._edited_blocks is not None and self._with_program:
            self._edited_blocks.record(scheduled, self._with_program)
        self.steering_records.attach_replays(scheduled, self.requests)
        return scheduled

    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        """Advance the scheduled requests. vLLM calls this at the end of :meth:`schedule`."""
        if self._without_drafts:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            # vLLM pads a request that starts or resumes with one token to the length of those with drafts.
            for request_id in drafts.keys() & self._without_drafts:
                padding = len(drafts.pop(request_id))
                scheduler_output.num_scheduled_tokens[request_id] -= padding
                scheduler_output.total_num_scheduled_tokens -= padding
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def _reserve_prefill_lookahead(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens the request gets in this step. vLLM calls this last, after all its own limits."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        return self._token_limiter.limit(request, num_computed_tokens, tokens)  # type: ignore[no-any-return]

    def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
        """Return whether a waiting request may start in this step."""
        if request.request_id in self._malformed:
            return False
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        resolved = self._with_program.get(request.request_id)
        if resolved is None:
            return True
        if not self.steering_admission.is_admitted(request.request_id):
            if not self._admit(request, resolved):
                return False
            resolved = self._with_program[request.request_id]
        if not resolved.max_captures:
            return True
        # vLLM stops scheduling waiting requests at the first one that gets no tokens, so check for room here.
        return self._token_limiter.can_start(  # type: ignore[no-any-return]
            request, resolved, lambda: self._get_local_prefix_cache_hit(request)[1]
        )

    # Admission

    def _admit(self: Any, request: Any, resolved: Resolved) -> bool:
        started = perf_counter()
        rows = self._most_captured_rows(request, resolved) if resolved.max_captures else 0
        if self._capture_policy == "fail" and not self.steering_admission.has_capture_room(rows):
            resolved, rows = self._drop_capture(request), 0
        admitted: bool = self.steering_admission.admit(request.request_id, resolved, rows)
        if admitted:
            self._arena.add_request(request.request_id, resolved)
        self._steering_stats.seconds += perf_counter() - started
        return admitted

    def _most_captured_rows(self: Any, request: Any, resolved: Resolved) -> int:
        """Return the most rows that a request can store, limited by the model's length."""
        tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        num_bytes = resolved.total_bytes(request.num_prompt_tokens, tokens, self._row_bytes)
        return rows_for(num_bytes, self._row_bytes)

    def _drop_capture(self: Any, request: Any) -> Resolved:
        """Remove the captures from a request's program (``capture_policy`` ``fail``).

        The workers get the new program too, because the request has not been sent to them yet.
        """
        program = Program.from_trusted_bytes(program_bytes(request.sampling_params) or b"").without_captures()
        params = copy.copy(request.sampling_params)
        params.extra_args = {**params.extra_args, PROGRAM_KEY: program.to_bytes()}
        request.sampling_params = params
        self.steering_row_sender.report_missing(request, CAPTURE_SKIPPED)
        self._steering_stats.given_up += 1
        resolved: Resolved = self._resolve(program, request)
        self._with_program[request.request_id] = resolved
        return resolved

    def set_pause_state(self: Any, pause_state: Any) -> None:
        super().set_pause_state(pause_state)  # type: ignore[misc]
        self.steering_admission.pause(pause_state is not PauseState.UNPAUSED)

    # Outputs and the end of a request

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        started = perf_counter()
        self.steering_row_sender.collect(model_runner_output, self.requests)
        stopped = self._cut_at_stops(scheduler_output, model_runner_output)
        if failed := failed_of(model_runner_output):
            self._drop_failed(failed, model_runner_output)
        upstream = perf_counter()
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        started += perf_counter() - upstream
        self._end_refused(outputs)
        if stopped:
            self._end(outputs, stopped, RequestStatus.FINISHED_STOPPED)
        self.steering_row_sender.attach_to(outputs)
        self._steering_stats.seconds += perf_counter() - started
        self._steering_stats.attach_to(outputs, model_runner_output)
        return outputs

    def _cut_at_stops(self: Any, scheduler_output: Any, model_output: Any) -> dict[str, str]:
        """Drop the tokens sampled after a token with which generation stops.

        Returns:
            The stop reason of each request that stops, by request id.
        """
        reasons: dict[str, str] = {}
        for request_id, stop in self.steering_records.receive(model_output).items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request_id not in scheduler_output.num_scheduled_tokens:
                continue
            index = model_output.req_id_to_index[request_id]
            sampled = model_output.sampled_token_ids
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            # Sampled tokens that come before the stop: accepted drafts up to its position.
            kept = stop.offset - (scheduler_output.num_scheduled_tokens[request_id] - 1 - drafts)
            stale = request.num_stale_output_tokens > 0 and request.drop_stale_output
            if kept and (stale or not 0 < kept < len(sampled[index])):
                # The position is behind the last accepted draft, or the output will be dropped.
                continue
            keep_tokens(model_output, request_id, kept)
            reasons[request_id] = self._stop_reason(request_id, stop)
        return reasons

    def _drop_failed(self: Any, failed: dict[str, str], model_output: Any) -> None:
        """Drop the tokens of requests whose user hooks failed, which :meth:`_end_refused` then ends."""
        for request_id, reason in failed.items():
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                keep_tokens(model_output, request_id, 0)
                self._malformed[request_id] = reason

    def _stop_reason(self: Any, request_id: str, stop: FiredStop) -> str:
        program = Program.from_trusted_bytes(program_bytes(self.requests[request_id].sampling_params) or b"")
        compiled = program.stops[stop.number - 1]
        column = program.layout.readouts[compiled.readout]
        return stop_reason(program.readouts[compiled.readout].name, stop.position, float(stop.record[column]))

    def _end(self: Any, outputs: Any, reasons: dict[str, str], status: Any) -> None:
        """End requests with an output that carries the reason."""
        for request in self.finish_requests(list(reasons), status):
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=reasons[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def _end_refused(self: Any, outputs: Any) -> None:
        """End requests that timed out or can never start."""
        timed_out = self.steering_admission.timed_out() if self.pause_state is PauseState.UNPAUSED else {}
        self._steering_stats.timed_out += len(timed_out)
        reasons = {name: REFUSED + reason for name, reason in {**timed_out, **self._malformed}.items()}
        self._malformed.clear()
        if reasons:
            self._end(outputs, reasons, RequestStatus.FINISHED_ERROR)

    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._with_program.pop(request.request_id, None)
        self._without_drafts.discard(request.request_id)
        self.steering_records.remove_request(request.request_id)
        self._arena.remove_request(request.request_id)
        self.steering_admission.release(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class SteeringScheduler(SteeringSchedulerMixin, Scheduler):  # type: ignore[misc]
    """vLLM's ``Scheduler`` with steering."""


class SteeringAsyncScheduler(SteeringSchedulerMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's ``AsyncScheduler`` with steering."""


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return the scheduler that vLLM would choose, with steering. vLLM's ``scheduler_cls`` names this function."""
    install((*LOGGING, *BUSY_LOOPS))
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (SteeringAsyncScheduler if is_async else SteeringScheduler)(*args, **kwargs)
