# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part: cache keys by content, and admission by the books.

A request takes its places in the device tables when it is first scheduled and gives them back when it ends, so a
program is bound from admission to the end, through preemptions. One that does not fit waits, and no later steered
request overtakes it; plain requests pass.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_steer.config import from_vllm_config
from vllm_steer.engine.cache_keys import steering_hasher
from vllm_steer.engine.outbox import Outbox
from vllm_steer.errors import SteeringError
from vllm_steer.params import EXTRA_KEY, program_bytes
from vllm_steer.program import Ledger, Program, Resolved, resolve

logger = init_logger(__name__)

NO_ROOM = "not captured: capture_mib was taken up by other requests when this one was admitted (capture_policy fail)"


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
            self.steering_ledger = Ledger(config.max_rows, config.max_instructions, config.max_vectors)
            self._steering_layers = int(self.vllm_config.model_config.hf_text_config.num_hidden_layers)
            self._steering_hash = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            self._steered: dict[str, Resolved] = {}
            self._admitted: set[str] = set()
            self._full = False
            self._capture_rows = config.capture_rows
            self._capture_budget = (config.capture_mib << 20) // self._row_bytes()
            self._capture_booked: dict[str, int] = {}
            self._capture_policy = config.capture_policy
            self._capture_left = 0
            self._drafts = self.vllm_config.speculative_config is not None
            self.steering_outbox = Outbox()

        def add_request(self, request: Any) -> None:
            try:
                self._bind(request)
            except SteeringError:
                # The front end checked this request; one that came around it must not take the engine down.
                logger.exception("Request %s came with a malformed steering program and is ended", request.request_id)
                request.sampling_params.extra_args = None
                super().add_request(request)
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
                return
            super().add_request(request)

        def _bind(self, request: Any) -> None:
            data = program_bytes(request.sampling_params)
            if data is None or request.request_id in self.requests:
                return
            resolved = resolve(Program.from_bytes(data), request.num_prompt_tokens, self._steering_layers)
            if not resolved.rows:
                return
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
            first = resolved.first_captured
            if first is None or first >= request.num_prompt_tokens - 1:
                return False
            return self.connector is not None or len(self.kv_cache_config.kv_cache_groups) != 1

        def _get_local_prefix_cache_hit(self, request: Any) -> Any:
            """vLLM's hit, cut at the first position that the request reads: a cached token is never computed."""
            blocks, hit, *rest = super()._get_local_prefix_cache_hit(request)
            resolved = self._steered.get(request.request_id)
            first = None if resolved is None else resolved.first_captured
            if first is not None and hit > first:
                hit = first // self.block_size * self.block_size
                blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, hit)
            return (blocks, hit, *rest)

        def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            """vLLM's last word on how many tokens a request gets in this step; ours: no more than the arena takes."""
            tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
            resolved = self._steered.get(request.request_id)
            if resolved is None or not resolved.max_captures:
                return tokens
            tokens, rows = self._fitting(resolved, num_computed_tokens, tokens)
            self._capture_left -= rows
            return tokens

        def _fitting(self, resolved: Resolved, start: int, tokens: int) -> tuple[int, int]:
            """The most of ``tokens`` tokens from ``start`` on whose rows fit what is left of the arena, and those
            rows."""
            if self._drafts:
                tokens = min(tokens, self._capture_left // resolved.max_captures)
                return tokens, tokens * resolved.max_captures
            taken = rows = 0
            for from_, to, segment in resolved.spans(start, start + tokens):
                count = to - from_
                if segment.num_captures:
                    count = min(count, (self._capture_left - rows) // segment.num_captures)
                taken += count
                rows += count * segment.num_captures
                if count < to - from_:
                    break
            return taken, rows

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            self.steering_outbox.take_in(model_runner_output, self.requests)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.steering_outbox.hand_out(outputs, self.requests)
            return outputs

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self._full = False
            self._capture_left = self._capture_rows
            return super().schedule(*args, **kwargs)

        def _handle_blocked_waiting_request(self, request: Any) -> bool:
            if not super()._handle_blocked_waiting_request(request):
                return False
            resolved = self._steered.get(request.request_id)
            if resolved is None or request.request_id in self._admitted:
                return True
            rows = resolved.rows_in_all(request.num_prompt_tokens, request.max_tokens) if resolved.max_captures else 0
            if rows and not self._full and sum(self._capture_booked.values()) + rows > self._capture_budget:
                if self._capture_policy == "wait":
                    self._full = True
                    return False
                resolved, rows = self._give_up_capture(request), 0
            if self._full or not self.steering_ledger.fits(resolved.rows):
                self._full = True
                return False
            self.steering_ledger.acquire(resolved.rows)
            self._admitted.add(request.request_id)
            if rows:
                self._capture_booked[request.request_id] = rows
            return True

        def _give_up_capture(self, request: Any) -> Resolved:
            """Under the policy ``fail``: run without the reads; workers see the same, since nothing was sent yet."""
            program = Program.from_bytes(program_bytes(request.sampling_params) or b"").without_reads()
            params = copy.copy(request.sampling_params)
            params.extra_args = {**params.extra_args, EXTRA_KEY: program.to_bytes()}
            request.sampling_params = params
            self.steering_outbox.say(request.request_id, NO_ROOM)
            resolved = resolve(program, request.num_prompt_tokens, self._steering_layers)
            self._steered[request.request_id] = resolved
            return resolved

        def _row_bytes(self) -> int:
            model_config = self.vllm_config.model_config
            return int(model_config.get_hidden_size() * model_config.dtype.itemsize)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            resolved = self._steered.pop(request.request_id, None)
            if resolved is not None and request.request_id in self._admitted:
                self._admitted.remove(request.request_id)
                self._capture_booked.pop(request.request_id, None)
                self.steering_ledger.release(resolved.rows)
            return super()._free_request(request, *args, **kwargs)

    return SteeringScheduler
