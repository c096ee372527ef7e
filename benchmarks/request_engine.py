# SPDX-License-Identifier: Apache-2.0
"""Stand-in for vLLM's engine process in `benchmarks.request_cpu`: no model runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from vllm_steer.capture.step_plan import SteadyCaptureBatch
from vllm_steer.engine.model_output import ROWS_ATTRIBUTE
from vllm_steer.engine.row_sender import RowSender
from vllm_steer.params import PROGRAM_KEY, restore_program
from vllm_steer.program import Program, resolve

LAYERS, LAYER, PROMPT, OUTPUT = 32, 16, 128, 128


class Batch:
    """Requests that run together, one token per step."""

    def __init__(self, requests: list[Any], hidden: int) -> None:
        self._ids = [request.request_id for request in requests]
        self._hidden = hidden
        self._sender = RowSender()
        self._by_id = {each: SimpleNamespace(client_index=0) for each in self._ids}
        self._captures: SteadyCaptureBatch | None = None
        programs = []
        for request in requests:
            restore_program(request)
            data = (request.sampling_params.extra_args or {}).get(PROGRAM_KEY)
            if data is not None and (program := Program.from_bytes(data)).captures:
                programs.append(resolve(program, PROMPT, LAYERS).segments[-1].program)
        if programs:
            self._captures = SteadyCaptureBatch(tuple(self._ids), tuple(programs))
        self._rows: dict[tuple[int, int], Any] = {}

    def step(self, number: int) -> EngineCoreOutputs:
        """Return the outputs of a step, with the rows of the token that it forwards."""
        reason = FinishReason.LENGTH if number == OUTPUT - 1 else None
        outputs = {
            0: EngineCoreOutputs(
                outputs=[EngineCoreOutput(each, [5 + number], finish_reason=reason) for each in self._ids],
                finished_requests=set(self._ids) if reason else None,
            )
        }
        if self._captures is not None and number:
            one = np.ones(len(self._ids), dtype=np.int64)
            plan = self._captures.plan(one * (PROMPT - 1 + number), one)
            steps = tuple(plan.make_step_rows(stream, self._rows_of(plan, stream)) for stream in plan.streams)
            self._sender.collect(SimpleNamespace(**{ROWS_ATTRIBUTE: steps}), self._by_id)
            self._sender.attach_to(outputs)
        return outputs[0]

    def _rows_of(self, plan: Any, stream: Any) -> Any:
        width = 4 * 16 if stream.index.projection else 2 * self._hidden
        num_rows = plan.num_rows if stream.arena_rows is None else len(stream.arena_rows)
        shape = num_rows, width
        if shape not in self._rows:
            self._rows[shape] = np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)
        return self._rows[shape]


def run_engine(addresses: dict[str, str], pace: Any, hidden: int) -> None:
    """Serve engine messages until the process is killed; requests that arrive together run together."""
    context = zmq.Context()
    receiver, sender = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    receiver.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    receiver.connect(addresses["input_address"])
    sender.connect(addresses["output_address"])
    receiver.send(b"")
    encoder, plain, adds = MsgpackEncoder(), MsgpackDecoder(), MsgpackDecoder(EngineCoreRequest)
    waiting: list[Any] = []
    while True:
        if waiting and not receiver.poll(300 if len(waiting) > 1 else 20):
            batch, waiting = Batch(waiting, hidden), []
            while pace.acquire(block=False):
                pass
            for number in range(OUTPUT):
                if number:
                    pace.acquire(timeout=1)
                sender.send_multipart(encoder.encode(batch.step(number)), copy=False)
            continue
        kind, *frames = receiver.recv_multipart(copy=False)
        if kind.bytes == EngineCoreRequestType.ADD.value:
            waiting.append(adds.decode(frames))
        elif kind.bytes == EngineCoreRequestType.UTILITY.value:
            _, call, method, _ = plain.decode(frames)
            report = {
                "num_layers": LAYERS, "hidden_size": hidden, "max_model_len": 1024, "dtype": "bfloat16", "refused": {},
                "unread": {},
            }  # fmt: skip
            result = {"get_supported_tasks": ("generate",), "collective_rpc": [report]}.get(method)
            answer = EngineCoreOutputs(utility_output=UtilityOutput(call, result=UtilityResult(result)))
            sender.send_multipart(encoder.encode(answer), copy=False)
