# SPDX-License-Identifier: Apache-2.0
"""Live strengths: change a named factor of a running request's edits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_steer.errors import SteeringError
from vllm_steer.frontend.context import context_of
from vllm_steer.frontend.sample_state import SampleState, sample_of
from vllm_steer.metrics.collectors import add
from vllm_steer.program import Program
from vllm_steer.program.magnitude import check_magnitude
from vllm_steer.program.overflow import check_overflow
from vllm_steer.request.scalars import closest, read_number, shown

SET_STRENGTH_RPC = "steering_set_strength"
ENDED = -1
"""Answer of a worker for a request that has ended."""


class UnknownRequestError(SteeringError):
    """No running request of the caller has this id."""


class EndedRequestError(SteeringError):
    """The request has ended, or several running requests have this id."""


class LiveSample(NamedTuple):
    """A sample of a request. A later request may get the same id from vLLM."""

    engine_id: str
    """vLLM's internal id."""
    live_id: str
    """Id of its live strengths; empty if it has none."""
    number: int = 0
    """Index of its output or choice."""


class LivePosition(int):
    """The position from which on a change of live strengths holds for every sample of a request.

    Attributes:
        positions: The first position of each running sample, by the index of its output or choice.
    """

    positions: Mapping[int, int]

    @classmethod
    def of(cls, positions: Mapping[int, int]) -> LivePosition:
        """Return the position for samples with these first positions."""
        found = cls(max(positions.values()))
        found.positions = positions
        return found


def live_sample(state: Any) -> LiveSample:
    """Return the ids of the sample of one of vLLM's states."""
    sample = sample_of(state)
    return LiveSample(state.request_id, "" if sample is None else sample.live_id, state.request_index)


def samples_of(output_processor: Any, request_id: str) -> list[LiveSample]:
    """Return the running samples of a request, by the id that was given to the engine client.

    Raises:
        EndedRequestError: Several running requests have this id.
    """
    running = output_processor.request_states
    engine_ids = output_processor.external_req_ids.get(request_id, ())
    states = [running[each] for each in engine_ids if each in running]
    requests = {id(state if state.parent_req is None else state.parent_req) for state in states}
    if len(requests) > 1:
        raise EndedRequestError(
            "request_id", f"{len(requests)} running requests have the id {request_id[:80]!r}; give each its own id"
        )
    return [live_sample(state) for state in states]


def check_live(vllm_config: Any, program: Program | None) -> None:
    """Raise SteeringError for live strengths that the engine can never change."""
    if program is not None and program.layout.live and vllm_config.parallel_config.data_parallel_size > 1:
        names = ", ".join(program.layout.live)
        raise SteeringError("steering.live", f"{names} cannot change with data parallelism; use one engine per server")


class RunningSample(NamedTuple):
    """A sample that was running when its change was checked."""

    ids: LiveSample
    sample: SampleState
    state: Any
    """vLLM's state, which has the sample's tokens after its end too."""


def _running_sample(running: Mapping[str, Any], ids: LiveSample) -> RunningSample | None:
    """Return a sample, or None if it has ended, also if a later request has its id from vLLM."""
    state = running.get(ids.engine_id)
    sample = None if state is None else sample_of(state)
    return RunningSample(ids, sample, state) if sample is not None and sample.live_id == ids.live_id else None


def check_strengths(
    engine: Any, request_id: str, samples: Sequence[LiveSample], strengths: Mapping[str, Any]
) -> tuple[list[RunningSample], dict[str, float]]:
    """Return a request's running samples, and the checked strengths, which count as set from now on.

    Args:
        engine: vLLM's ``LLMEngine`` or ``AsyncLLM``.
        request_id: The client's id of the request, for messages.
        samples: The request's samples.
        strengths: New factors by name.

    Raises:
        SteeringError: The request is not running, has no such live strength, a strength is not a finite number,
            exceeds the server's limit of the norm that an edit may add, or overflows with the edit's own numbers.
    """
    running = engine.output_processor.request_states
    found = [each for ids in samples if (each := _running_sample(running, ids)) is not None]
    if not found and samples:
        raise EndedRequestError("request_id", f"{request_id[:80]!r} has ended; send a new request with other strengths")
    if not found:
        raise UnknownRequestError("request_id", f"{request_id[:80]!r} is not a running request")
    if not strengths:
        raise SteeringError("strengths", "is empty; give a number for at least one name")
    sample = found[0].sample
    names = sample.live_names
    for name in strengths:
        if name not in names:
            similar = closest(name, names)
            hint = f"did you mean {similar}?" if similar else f"its names are: {', '.join(names) or 'none'}"
            raise SteeringError(shown(name).strip("'"), f"is not a live strength of this request; {hint}")
    checked = {name: read_number(value, name) for name, value in strengths.items()}
    context = context_of(engine.output_processor)
    if context is not None and sample.readouts is not None:
        registry, program = context.registry, sample.readouts.program
        check_magnitude(program, registry.max_norm, strengths=checked, streams_at=registry.streams_at)
        dtype, num_layers = context.capabilities.dtype, context.capabilities.num_layers
        # Samples differ if an earlier change was of one of them, as by a controller.
        for in_force in {frozenset(each.sample.live_strengths.items()) for each in found}:
            check_overflow(program, dtype, num_layers, checked, dict(in_force))
    for each in found:
        each.sample.live_strengths.update(checked)
    return found, checked


def rpc_args(samples: Iterable[RunningSample], strengths: Mapping[str, float]) -> tuple[list[str], dict[str, float]]:
    """Return the arguments of the workers' method that changes strengths."""
    return [each.ids.live_id for each in samples], dict(strengths)


def first_position(
    engine: Any, request_id: str, samples: Sequence[RunningSample], answers: Sequence[Sequence[int]]
) -> LivePosition:
    """Return the position from which a change holds for every sample that it reached, and count the change.

    A sample may have ended since, perhaps by the change. It was reached if it computed the position before.

    Args:
        engine: vLLM's ``LLMEngine`` or ``AsyncLLM``.
        request_id: The client's id of the request, for messages.
        samples: The request's samples, from :func:`check_strengths`.
        answers: Answers of all workers, each with one position per sample.

    Raises:
        EndedRequestError: All samples ended before the change had an effect.
    """
    running = engine.output_processor.request_states
    positions = {
        each.ids.number: position
        for each, position in zip(samples, map(max, zip(*answers, strict=True)), strict=True)
        if position != ENDED
        and (_running_sample(running, each.ids) is not None or position < each.sample.num_forwarded(each.state))
    }
    if not positions:
        raise EndedRequestError(
            "request_id", f"{request_id[:80]!r} ended before the change; send a new request with another strength"
        )
    name = engine.vllm_config.model_config.served_model_name
    add("live_changes", model_name=name if isinstance(name, str) else str(engine.vllm_config.model_config.model))
    return LivePosition.of(positions)


async def set_strength(
    engine: Any, request_id: str, samples: Sequence[LiveSample], strengths: Mapping[str, Any]
) -> LivePosition:
    """Set live strengths of the samples of a request of an ``AsyncLLM``, and return the first position that has them.

    Raises:
        SteeringError: See :func:`check_strengths` and :func:`first_position`.
    """
    running, checked = check_strengths(engine, request_id, samples, strengths)
    answers = await engine.collective_rpc(SET_STRENGTH_RPC, args=rpc_args(running, checked))
    return first_position(engine, request_id, running, answers)
