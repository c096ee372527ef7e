# SPDX-License-Identifier: Apache-2.0
"""CPU time that steering adds in the front end per request, from the request's fields to the engine message.

    python benchmarks/front_end.py --out benchmarks/results/front-end.json

No engine runs. The first part is the way in: the script parses and compiles the vectors, composes and checks the
request, clones it as vLLM does and encodes it with vLLM's encoder. The time of the same request without steering is
subtracted. Every request has its own vectors, except in the cases with equal vectors.

The second part is the way out, for 16 probes: the records of a batch's steps are received, split by request, and
written into the chunks of its stream, one per token. The time without readouts is that of passing the chunks on. For
captures it starts with the writer of results around the chunks, and covers the consumer and the encoding.

Times are CPU milliseconds, as the median over the requests or the minimum over the batches, for hidden size 4,096.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from benchmarks.build import identity
from vllm_steer import SamplingParams
from vllm_steer.capture.manager import CaptureManager
from vllm_steer.capture.row_assembler import RowChunk
from vllm_steer.capture.row_payload import RECORDS, ROWS_REQUEST_ID, encode_step
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.capabilities import Capabilities
from vllm_steer.frontend.context import EngineContext
from vllm_steer.frontend.outputs import take_rows
from vllm_steer.frontend.requests import check_engine_request, complete_params
from vllm_steer.frontend.sample_state import attach_sample
from vllm_steer.params import capture_specs, strip_for_engine
from vllm_steer.points import POINT_NAMES
from vllm_steer.program.program_files import ProgramFileCache
from vllm_steer.registry.registry import SteeringRegistry
from vllm_steer.server.capture_store import CaptureStore, StoreLimits
from vllm_steer.server.http.compiled_fields import compile_json_fields
from vllm_steer.server.http.readout_feed import ReadoutFeed
from vllm_steer.server.http.request_context import RequestContext, current_request
from vllm_steer.server.http.response_writer import ResponseWriter
from vllm_steer.server.http.stream_chunks import CompletionChoice, CompletionChunk

LAYERS, HIDDEN, REQUESTS, WARM_UP = 32, 4096, 128, 8
POINTS = ("pre_attn", "post_attn", "post_block")
BATCH, CHUNKS = 64, 64
CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"token_ids":null}],"usage":null}\n\n'
)
PROBES = [f"p{i}" for i in range(16)]


def vectors(layers: int, seed: int) -> dict[str, dict[int, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return {point: {i: rng.standard_normal(HIDDEN, dtype="f4") for i in range(layers)} for point in POINTS}


def probes() -> np.ndarray:
    """Return sixteen directions."""
    return np.random.default_rng(2).standard_normal((len(PROBES), HIDDEN), dtype="f4")


def projected(**reduce: Any) -> dict[str, Any]:
    """Return the fields of a capture with projections at four layers."""
    hooks = {"post_block": [LAYERS * k // 4 for k in range(4)]}
    return {"capture": {"memory": {"hooks": hooks, "positions": "all", "reduce": reduce}}}


def make_context(consumers: Mapping[str, Any] | None = None) -> EngineContext:
    capabilities = Capabilities(LAYERS, HIDDEN, 8192, "bfloat16", {}, SteeringConfig())
    registry = SteeringRegistry(capabilities, None)
    registry.register("calm", base=vectors(1, 0))
    registry.register("bench", probes=dict(zip(PROBES, probes(), strict=True)))
    return EngineContext(
        capabilities, CaptureManager(capabilities, "model", consumers or {}), registry, program_files=ProgramFileCache()
    )


def measure(fields: Callable[[int], dict[str, Any]], context: EngineContext, *, http: bool = False) -> float:
    """Return the milliseconds per request, with the fields of a body if ``http``."""
    vllm_config = SimpleNamespace(
        speculative_config=None, lora_config=None, scheduler_config=SimpleNamespace(max_num_batched_tokens=8192)
    )
    processor = SimpleNamespace(_steering_context=context, vllm_config=vllm_config)
    encoder = MsgpackEncoder()
    spent: list[float] = []
    for i in range(REQUESTS):
        given = fields(i)
        started = time.process_time()
        made = SamplingParams(max_tokens=16, temperature=0, **({} if http else given))
        if http:
            made.extra_args = compile_json_fields(given)
        params = complete_params(context, made).clone()
        request = EngineCoreRequest(
            request_id=f"request-{i}", prompt_token_ids=[1] * 16, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        check_engine_request(processor, request)
        strip_for_engine(request, context.program_files)
        encoder.encode(request)
        spent.append(time.process_time() - started)
    return 1000 * statistics.median(spent[WARM_UP:])


def read_probes(weights: list[Any]) -> dict[str, Any]:
    """Return the fields of a request with sixteen probes as readouts at four layers."""
    sites = [{"point": "post_block", "layer": LAYERS * (i % 4) // 4} for i in range(len(PROBES))]
    return {
        "readouts": {name: {"probe": each, **site} for name, each, site in zip(PROBES, weights, sites, strict=True)}
    }


def streaming_writer(context: RequestContext, send: Any, store: CaptureStore | None = None) -> ResponseWriter:
    """Return the writer of a response whose stream has started."""
    writer = ResponseWriter(context, lambda: store, send, send)
    writer._is_stream = True
    return writer


def measure_stream(fields: dict[str, Any] | None, context: EngineContext) -> float:
    """Return the milliseconds per request of the streams of a batch, from the engine's outputs to the socket."""
    processor: Any = SimpleNamespace(_steering_context=context, request_states={})
    params = None
    if fields is not None:
        params = complete_params(context, SamplingParams(max_tokens=CHUNKS, temperature=0, **fields))
    http = [RequestContext() for _ in range(BATCH)]
    states = [
        SimpleNamespace(
            request_id=f"request-{i}", external_req_id=f"request-{i}", parent_req=None, request_index=0, prompt_len=16,
            detokenizer=SimpleNamespace(num=0),
        )
        for i in range(BATCH)
    ]  # fmt: skip
    for i, state in enumerate(states):
        state.detokenizer.num_output_tokens = partial(getattr, state.detokenizer, "num")
        processor.request_states[state.request_id] = state
        if params is not None:
            request = SimpleNamespace(
                request_id=state.request_id, sampling_params=params, mm_features=None, prompt_is_token_ids=None
            )
            attach_sample(processor, request)
            http[i].readouts[0] = ReadoutFeed(state)
    index = RowIndex(tuple(processor.request_states), ((20,),) * BATCH, RECORDS)
    rows = np.random.default_rng(3).standard_normal((BATCH, 20), dtype="f4").view("u1")
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message["body"])

    async def event(context: RequestContext, writer: ResponseWriter) -> None:
        """Send an event; chunks are made with their readouts, as in vLLM's serving code."""
        body = CHUNK
        if params is not None:
            token = current_request.set(context)
            choice = CompletionChoice(
                index=0, text=" word", logprobs=None, finish_reason=None, stop_reason=None, token_ids=None
            )
            chunk = CompletionChunk(
                id="cmpl-0123456789abcdef0123456789abcdef", object="text_completion", created=1700000000,
                model="bench", choices=[choice], usage=None,
            )  # fmt: skip
            body = f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
            current_request.reset(token)
        await writer.send({"type": "http.response.body", "body": body, "more_body": True})

    writers = [streaming_writer(each, send) for each in http]

    async def stream() -> None:
        for number in range(CHUNKS):
            step = StepRows(index, np.full(BATCH, 15 + number), np.ones(BATCH, dtype=np.int64), rows)
            if params is not None:
                output = SimpleNamespace(
                    request_id=ROWS_REQUEST_ID, kv_transfer_params=encode_step(step), routed_experts=rows.copy()
                )
                take_rows(processor, [output])
            for state, context, writer in zip(states, http, writers, strict=True):
                state.detokenizer.num = number + 1
                await event(context, writer)

    started = time.process_time()
    asyncio.run(stream())
    spent = time.process_time() - started
    if params is not None and sent < BATCH * (CHUNKS - 1) * 16 * 10:
        raise RuntimeError(f"the streams carry {sent} bytes, too few for their readouts")
    return 1000 * spent / BATCH


def measure_results(name: str, context: EngineContext) -> float:
    """Return the milliseconds per request from the end of a captured request to the end of its stream.

    Args:
        name: ``memory``, with the values of 16 probes, or ``filesystem``, with the rows of one layer.
        context: An engine context whose manager has the consumer.
    """
    manager = context.capture_manager
    fields = projected(probes=[f"bench/{each}" for each in PROBES]) if name == "memory" else {
        "capture": {name: {"hooks": {"post_block": [16]}, "positions": "all"}}
    }  # fmt: skip
    specs = capture_specs(complete_params(context, SamplingParams(max_tokens=CHUNKS, temperature=0, **fields)))
    [(_, spec)] = specs
    layers = [layer for _, each in spec.hooks for layer in each]
    codes = tuple(2 * (layer * len(POINT_NAMES) + POINT_NAMES.index("post_block")) for layer in layers)
    digest, width = (spec.reduce.digest, 4 * len(PROBES)) if name == "memory" else (b"", 2 * HIDDEN)
    rows = np.random.default_rng(4).integers(0, 60, (CHUNKS, len(codes) * width), dtype=np.uint8)
    store = CaptureStore(StoreLimits(1 << 20, 1 << 30, 60), f"benchmark-{os.getpid()}")
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message["body"])

    async def respond(number: int) -> None:
        http, request_id = RequestContext(), f"request-{number}"
        http.consumers = (name,)
        assembler = manager.new_assembler()
        assembler.add([RowChunk(request_id, 0, CHUNKS, codes, rows, digest)])
        writer = streaming_writer(http, send, store)
        for _ in range(CHUNKS):
            await writer.send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        http.results[0] = manager.submit(
            assembler, specs, request_id=request_id, sample=0, submission=number, prompt_token_ids=(1,) * 17,
            output_token_ids=(1,) * (CHUNKS - 16),
        )  # fmt: skip
        await writer.send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})

    async def batch() -> None:
        await asyncio.gather(*(respond(number) for number in range(BATCH)))

    started = time.process_time()
    asyncio.run(batch())
    spent = time.process_time() - started
    if sent < BATCH * (CHUNKS * len(CHUNK) + 100):
        raise RuntimeError(f"the streams carry {sent} bytes, too few for their results")
    return 1000 * spent / BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    context = make_context()
    gc.freeze()  # as vLLM does
    equal, directions = vectors(LAYERS, 1), probes()
    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        "own vectors at 3 sites": lambda i: {"steering_vectors": vectors(1, i + 10)},
        "own vectors at 96 sites": lambda i: {"steering_vectors": vectors(LAYERS, i + 10)},
        "the same vectors at 96 sites": lambda i: {"steering_vectors": equal},
        "a module of 3 sites by name": lambda i: {"steering_modules": ["calm"]},
        "16 probes at 4 layers": lambda i: projected(directions=directions),
        "16 probes by name": lambda i: projected(probes=[f"bench/{name}" for name in PROBES]),
    }
    cases |= {
        "16 readouts": lambda i: read_probes(list(directions)),
        "16 readouts by name": lambda i: read_probes([f"bench/{name}" for name in PROBES]),
    }
    plain = measure(lambda i: {}, context)
    found = {name: measure(fields, context) - plain for name, fields in cases.items()}
    name = "16 readouts by name"
    found[f"{name}, HTTP"] = measure(cases[name], context, http=True) - plain
    environment = {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        **identity(),
    }
    named = read_probes([f"bench/{name}" for name in PROBES])
    passed, read = (min(measure_stream(each, context) for _ in range(5)) for each in (None, named))
    with tempfile.TemporaryDirectory() as root:
        consumers = make_context({"filesystem": {"root": root, "layout": "packed"}})
        results = {
            what: min(measure_results(name, consumers) for _ in range(8)) - passed
            for what, name in (("16 probes, memory", "memory"), ("one layer to files", "filesystem"))
        }
        consumers.capture_manager.close()
    added = {"16 readouts": read - passed, **results}
    streams = {"chunks": CHUNKS, "plain_ms": passed, "added_ms_per_request": added}
    result = {"environment": environment, "plain_ms": plain, "added_ms_per_request": found, "streams": streams}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
