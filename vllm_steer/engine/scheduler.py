# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part: cache keys by content, and admission by the books.

A request takes its places in the device tables when it is first scheduled and gives them back when it ends, so a
program is bound from admission to the end, through preemptions. One that does not fit waits (:mod:`.admission`), and
ends with an error when it has waited too long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_steer.config import from_vllm_config
from vllm_steer.engine.admission import REFUSED, AdmissionController
from vllm_steer.engine.arena import ArenaBudget, unsplit_spans
from vllm_steer.engine.cache_keys import steering_hasher
from vllm_steer.engine.edited_blocks import EditedBlocks
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.engine.stats_collector import EngineStatsCollector
from vllm_steer.errors import SteeringError
from vllm_steer.log import steering_logger
from vllm_steer.models.discovery import layer_count
from vllm_steer.params import EXTRA_KEY, program_bytes, restore_program
from vllm_steer.points import how_to_switch_on, points_on
from vllm_steer.program import Program, Resolved, TableAllocator, resolve

logger = steering_logger(__name__)

NO_ROOM = "not captured: capture_mib was taken up by other requests when this one was admitted (capture_policy fail)"
LAST_WORD = "_reserve_prefill_lookahead"


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What ``scheduler_cls`` names: vLLM calls it as it would the class, and it picks the base that vLLM would."""
    vllm_config = kwargs["vllm_config"]
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return steering_scheduler(base)(*args, **kwargs)


@cache
def steering_scheduler(base: Any) -> Any:
    """``base`` with steering."""

    class SteeringScheduler(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config = from_vllm_config(self.vllm_config)
            if config is None:
                raise SteeringError(
                    "additional_config", "has no steering section, though the steering scheduler is in use"
                )
            self.steering_ledger = TableAllocator(config.max_rows, config.max_instructions, config.max_vectors)
            self._steering_layers = layer_count(self.vllm_config.model_config.hf_text_config)
            self._steering_hash = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            self._steering_points = frozenset(points_on(config.points))
            self._steered: dict[str, Resolved] = {}
            self._asked: list[tuple[Any, int, int]] = []
            self._malformed: dict[str, str] = {}
            self._arena = ArenaBudget(
                config.capture_rows, self.num_spec_tokens, self.vllm_config.speculative_config is not None
            )
            model_config = self.vllm_config.model_config
            self._row_bytes = int(model_config.get_hidden_size() * model_config.dtype.itemsize)
            budget = (config.capture_mib << 20) // self._row_bytes
            self.steering_admission = AdmissionController(self.steering_ledger, budget, config.queue_timeout)
            self._capture_policy = config.capture_policy
            self.steering_row_sender = RowSender()
            self._steering_stats = EngineStatsCollector(self.steering_admission)
            self._edited_blocks: EditedBlocks | None = None
            if current_platform.is_cpu() and not self.kv_cache_config.needs_kv_cache_zeroing:
                # Where vLLM zeroes blocks itself, it zeroes all.
                self._edited_blocks = EditedBlocks(self.kv_cache_manager.coordinator.single_type_managers)
                self.needs_kv_cache_zeroing = True

        def add_request(self, request: Any) -> None:
            started = perf_counter()
            try:
                self._bind(request)
            except SteeringError as error:
                # The front end checked this request; one that came around it must not take the engine down. It never
                # starts, and ends with the next step.
                logger.exception("Request %s came with a malformed steering program and is ended", request.request_id)
                self._malformed[request.request_id] = str(error)
            self._steering_stats.seconds += perf_counter() - started
            super().add_request(request)

        def _bind(self, request: Any) -> None:
            restore_program(request)
            data = program_bytes(request.sampling_params)
            if data is None or request.request_id in self.requests:
                return
            # Of many equal ones a single copy stays, at which the worker looks next.
            program, request.sampling_params.extra_args[EXTRA_KEY] = Program.intern(data)
            off = next(iter(program.points - self._steering_points), None)
            if off is not None:
                raise SteeringError("extra_args.steer", how_to_switch_on(off))
            resolved = resolve(program, request.num_prompt_tokens, self._steering_layers)
            if not resolved.token_programs:
                return
            never = self._arena.why_never(resolved, self._spans(request)) if resolved.max_captures else None
            if never is not None:
                raise SteeringError("capture", never)
            self._steered[request.request_id] = resolved
            if self._needs_whole_prompt(resolved, request):
                request.skip_reading_prefix_cache = True
            upstream = request._block_hasher
            if upstream is not None:
                request._block_hasher = steering_hasher(upstream, resolved, self.hash_block_size, self._steering_hash)
                request.block_hashes = []
                request.update_block_hashes()

        def _needs_whole_prompt(self, resolved: Resolved, request: Any) -> bool:
            """Whether reads forbid any cache hit: where hits cannot be cut to a position (hybrid caches,
            connectors)."""
            first = resolved.first_captured_position
            if first is None or first >= request.num_prompt_tokens - 1:
                return False
            return self.connector is not None or not self._hits_can_be_cut()

        def _hits_can_be_cut(self) -> bool:
            """Whether the front of a cache hit is one, too: each block of it is there. In a window, or of a state,
            only the end of a hit is kept (``v1/core/single_type_kv_cache_manager.py``)."""
            managers = self.kv_cache_manager.coordinator.single_type_managers
            return len(managers) == 1 and type(managers[0]) is FullAttentionManager

        def _get_local_prefix_cache_hit(self, request: Any) -> Any:
            """vLLM's hit, cut at the first position that the request reads: a cached token is never computed."""
            blocks, hit, *rest = super()._get_local_prefix_cache_hit(request)
            resolved = self._steered.get(request.request_id)
            first = None if resolved is None else resolved.first_captured_position
            if first is None or hit <= first:
                return (blocks, hit, *rest)
            if not self._hits_can_be_cut():
                return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
            hit = first // self.block_size * self.block_size
            return (self.kv_cache_manager.truncate_computed_blocks(blocks, hit), hit, *rest)

        def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            """vLLM's last word on how many tokens a request gets in this step; ours: no more than the arena takes."""
            tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
            return self._take(request, num_computed_tokens, tokens)

        def _take(self, request: Any, start: int, tokens: int) -> int:
            resolved = self._steered.get(request.request_id)
            if resolved is None or not resolved.max_captures:
                return tokens
            # vLLM takes it for granted that a request which it starts with draft tokens gets all of them.
            padded = request.status != RequestStatus.RUNNING and start + tokens > request.num_tokens
            return self._arena.take(resolved, start, tokens, padded, self._spans(request))

        def _last_word(self, upstream: Callable[..., int]) -> Callable[..., int] | None:
            """What vLLM asks in this step in the place of the method, if anything; ``upstream`` is its own.

            While all readers' next tokens fit together, nobody is refused one: who is asked about is written down, and
            what they take is looked at before a reader is given more, or is let in (:meth:`_settle`). In most steps
            none is.
            """
            sure, asked, steered = self._arena.sure, self._asked.append, self._steered

            def last_word(request: Any, start: int, tokens: int) -> int:
                tokens = upstream(request, start, tokens)
                if tokens > sure and request.request_id in steered:
                    self._settle()
                    return self._take(request, start, tokens)
                asked((request, start, tokens))
                return tokens

            return last_word if sure else None

        def _settle(self) -> None:
            """For the rest of this step each request is looked at when it is asked about."""
            self.__dict__.pop(LAST_WORD, None)
            for each in self._asked:
                self._take(*each)
            self._asked.clear()

        def _spans(self, request: Any) -> list[tuple[int, int]]:
            return unsplit_spans(request, self.scheduler_config) if request.mm_features else []

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            started = perf_counter()
            self.steering_row_sender.collect(model_runner_output, self.requests)
            upstream = perf_counter()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            started += perf_counter() - upstream
            self._end_refused(outputs)
            self.steering_row_sender.attach_to(outputs)
            self._steering_stats.seconds += perf_counter() - started
            self._steering_stats.attach_to(outputs, model_runner_output)
            return outputs

        def _end_refused(self, outputs: Any) -> None:
            """End what has waited too long or never can start, with an output that says why."""
            overdue = self.steering_admission.overdue() if self.pause_state is PauseState.UNPAUSED else {}
            self._steering_stats.timed_out += len(overdue)
            reasons = {**overdue, **self._malformed}
            self._malformed.clear()
            for request in self.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR) if reasons else ():
                output = EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=REFUSED + reasons[request.request_id],
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

        def set_pause_state(self, pause_state: Any) -> None:
            super().set_pause_state(pause_state)
            self.steering_admission.stop_clock(pause_state is not PauseState.UNPAUSED)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.steering_admission.begin_step()
            self._arena.begin_step()
            self._asked.clear()
            # Asked of every request in every step: vLLM's own stands ahead of ours while nobody reads.
            upstream = super()._reserve_prefill_lookahead
            last_word = self._last_word(upstream) if self._arena.has_readers else upstream
            if last_word is None:
                self.__dict__.pop(LAST_WORD, None)
            else:
                self.__dict__[LAST_WORD] = last_word
            scheduled = super().schedule(*args, **kwargs)
            if self._edited_blocks is not None and self._steered:
                self._edited_blocks.note(scheduled, self._steered)
            return scheduled

        def _get_new_block_ids_to_zero(self) -> Any:
            new = super()._get_new_block_ids_to_zero()
            return new if self._edited_blocks is None else self._edited_blocks.to_zero(new or ())

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            if request.request_id in self._malformed or not super()._handle_blocked_waiting_request(request):
                return False
            resolved = self._steered.get(request.request_id)
            if resolved is None:
                return True
            if not self.steering_admission.has(request.request_id):
                if not self._admit(request, resolved):
                    return False
                resolved = self._steered[request.request_id]
            return not resolved.max_captures or self._has_room_to_start(request, resolved)

        def _has_room_to_start(self, request: Any, resolved: Resolved) -> bool:
            """Whether a request that waits finds room where it begins. If it found none later on, vLLM would end its
            round there, and let nobody start who is behind."""
            self._settle()
            start, spans = request.num_computed_tokens, self._spans(request)
            if not start and not self._arena.fits_anywhere(resolved, spans):
                # It begins behind what is cached, which may be where it reads.
                start = self._get_local_prefix_cache_hit(request)[1]
            return self._arena.lets_in(resolved, start, spans)

        def _admit(self, request: Any, resolved: Resolved) -> bool:
            started = perf_counter()
            rows = self._rows_in_all(request, resolved) if resolved.max_captures else 0
            if self._capture_policy == "fail" and not self.steering_admission.has_room_for_captures(rows):
                resolved, rows = self._give_up_capture(request), 0
            admitted = self.steering_admission.admit(request.request_id, resolved, rows)
            if admitted:
                self._arena.follow(request.request_id, resolved)
            self._steering_stats.seconds += perf_counter() - started
            return admitted

        def _rows_in_all(self, request: Any, resolved: Resolved) -> int:
            """Most rows that a request can store: it ends with the model's length, whatever ``max_tokens`` says.
            Projections count as the rows that would take as many bytes."""
            tokens = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
            return -(-resolved.total_bytes(request.num_prompt_tokens, tokens, self._row_bytes) // self._row_bytes)

        def _give_up_capture(self, request: Any) -> Resolved:
            """Under the policy ``fail``: run without the reads; workers see the same, since nothing was sent yet."""
            program = Program.from_trusted_bytes(program_bytes(request.sampling_params) or b"").without_reads()
            params = copy.copy(request.sampling_params)
            params.extra_args = {**params.extra_args, EXTRA_KEY: program.to_bytes()}
            request.sampling_params = params
            self.steering_row_sender.report_missing(request, NO_ROOM)
            self._steering_stats.given_up += 1
            resolved = resolve(program, request.num_prompt_tokens, self._steering_layers)
            self._steered[request.request_id] = resolved
            return resolved

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            self._steered.pop(request.request_id, None)
            self._arena.forget(request.request_id)
            self.steering_admission.release(request.request_id)
            return super()._free_request(request, *args, **kwargs)

    return SteeringScheduler
