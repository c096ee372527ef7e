# SPDX-License-Identifier: Apache-2.0
"""Model-based tests of the quota tracker."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from vllm_steer.errors import SteeringError
from vllm_steer.limits import KEY_CAPTURE_MIB, KEY_LIMITS, KEY_REQUESTS, SERVER_LIMITS
from vllm_steer.program import Program, compile_program
from vllm_steer.registry.module import parse_module
from vllm_steer.request import parse_capture, parse_fields, parse_readouts
from vllm_steer.request.projection import Projection
from vllm_steer.request.scalars import FLOAT32_MAX
from vllm_steer.server.access_errors import AccessError, KeyLimitError, ServerFullError, TooLargeError
from vllm_steer.server.auth.keys import Key, generate_key
from vllm_steer.server.quota import tracker as tracker_module
from vllm_steer.server.quota.tracker import QuotaTracker, Reservation
from vllm_steer.server.settings import value_of

WIDTH, LAYERS = 1 << 16, 4
MIB = 1 << 20
SIZE = 4 * WIDTH
"""Of one vector: four of them are a MiB."""

FLAGS: dict[str, int] = {
    "steering_key_requests": 3,
    "steering_key_programs": 2,
    "steering_key_pool_mib": 1,
    "capture_key_mib": 1,
    "steering_max_programs": 3,
}


def key_of(name: str, **limits: int) -> Key:
    return generate_key(name, (), limits)[0]


def program_of(*vectors: int, width: int = WIDTH) -> Program:
    """Return a program that adds these vectors, each identified by a number."""
    return compile_program(
        parse_fields(
            {
                "steering": [
                    {"kind": "add", "point": "post_block", "layers": [1], "vector": np.full(width, float(number + 1))}
                    for number in vectors
                ]
            }
        )
    )


SETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), (2, 3), (0, 1, 2, 3), (4, 5, 6), (0, 1, 2, 3, 4))
PROGRAMS = [program_of(*numbers) for numbers in SETS]


class TrackerMachine(RuleBasedStateMachine):
    """Requests of two keys and without a key start, reserve and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = QuotaTracker(SimpleNamespace(**FLAGS))
        self.keys: list[Key | None] = [key_of("one"), key_of("other", steering_programs=1, steering_requests=2), None]
        self.active: list[dict[str, Any]] = []

    def of_key(self, key: Key | None) -> list[dict[str, Any]]:
        return [each for each in self.active if each["key"] is key]

    @rule(number=st.integers(0, 2))
    def reserve(self, number: int) -> None:
        key = self.keys[number]
        room = key is None or len(self.of_key(key)) < (2 if number else 3)
        if not room:
            with pytest.raises(KeyLimitError):
                self.tracker.reserve(key)
            return
        self.active.append({"key": key, "reservation": self.tracker.reserve(key), "set": None, "rows": 0})

    @rule(data=st.data(), number=st.integers(0, len(SETS) - 1))
    def reserve_program(self, data: st.DataObject, number: int) -> None:
        if not self.active:
            return
        each = data.draw(st.sampled_from(self.active))
        if each["set"] is not None:
            with pytest.raises(SteeringError):
                each["reservation"].reserve_program(PROGRAMS[number], None, LAYERS)
            return
        expected = self.expected_error(each["key"], number)
        if expected is None:
            each["reservation"].reserve_program(PROGRAMS[number], None, LAYERS)
            each["set"] = number
        else:
            with pytest.raises(expected):
                each["reservation"].reserve_program(PROGRAMS[number], None, LAYERS)

    def expected_error(self, key: Key | None, number: int) -> type[AccessError] | None:
        everywhere = {each["set"] for each in self.active} - {None}
        if len(everywhere | {number}) > 3:
            return ServerFullError
        if key is None:
            return None
        own = {each["set"] for each in self.of_key(key)} - {None}
        if len(own | {number}) > (1 if key is self.keys[1] else 2):
            return KeyLimitError
        if len(SETS[number]) > 4:
            return TooLargeError
        return KeyLimitError if len({v for each in (*own, number) for v in SETS[each]}) > 4 else None

    @rule(data=st.data(), num_bytes=st.sampled_from([0, MIB // 4, MIB // 2, MIB, MIB + 1]))
    def reserve_rows(self, data: st.DataObject, num_bytes: int) -> None:
        keyed = [each for each in self.active if each["key"] is not None]
        if not keyed:
            return
        each = data.draw(st.sampled_from(keyed))
        together = sum(other["rows"] for other in self.of_key(each["key"])) + num_bytes
        if each["rows"] + num_bytes > MIB:
            with pytest.raises(TooLargeError):
                each["reservation"].reserve_rows(num_bytes)
        elif together > MIB:
            with pytest.raises(KeyLimitError):
                each["reservation"].reserve_rows(num_bytes)
        else:
            each["reservation"].reserve_rows(num_bytes)
            each["rows"] += num_bytes

    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        if not self.active:
            return
        each = data.draw(st.sampled_from(self.active))
        self.active = [other for other in self.active if other is not each]
        for _ in range(1 + twice):
            each["reservation"].release()

    @invariant()
    def usage_equals_the_reservations(self) -> None:
        keyed = [each for each in self.active if each["key"] is not None]
        vectors = {(id(each["key"]), v) for each in keyed if each["set"] is not None for v in SETS[each["set"]]}
        assert self.tracker.in_use == {
            "requests": len(keyed),
            "programs": len({each["set"] for each in self.active} - {None}),
            "vector_bytes": SIZE * len(vectors),
            "row_bytes": sum(each["rows"] for each in self.active),
            "keys": len({id(each["key"]) for each in keyed}),
        }

    def teardown(self) -> None:
        for each in self.active:
            each["reservation"].release()
        assert set(self.tracker.in_use.values()) == {0}


def run_machine() -> None:
    run_state_machine_as_test(
        TrackerMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            phases=[Phase.generate],  # no shrinking: the controls fail on purpose
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )


def test_usage_is_consistent() -> None:
    """Catches resources that are never released, released twice or reserved on rejection, and exceeded limits."""
    run_machine()


@pytest.mark.parametrize(
    "fault", ["vectors leak", "rows leak", "programs leak", "reserved when rejected", "released twice"]
)
def test_machine_detects_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the state machine detects each of these faults."""
    release = Reservation.release

    def leaking(self: Reservation) -> None:
        if fault == "rows leak":
            self._row_bytes = 0
        else:
            self._program = None
        release(self)

    def reserve_first(self: Reservation, num_bytes: int) -> None:
        if self._usage is not None:
            self._usage.row_bytes += num_bytes
            own = self._row_bytes + num_bytes
            self.tracker.check_bytes(KEY_CAPTURE_MIB, self._usage.key, own, self._usage.row_bytes)
            self._row_bytes = own

    def again(self: Reservation) -> None:
        release(self)
        self._released = self._usage is None
        release(self)

    if fault == "vectors leak":
        decrement = tracker_module._decrement
        monkeypatch.setattr(tracker_module, "_decrement", lambda counter, item: decrement(counter, item) and False)
    elif fault == "reserved when rejected":
        monkeypatch.setattr(Reservation, "reserve_rows", reserve_first)
    else:
        monkeypatch.setattr(Reservation, "release", again if fault == "released twice" else leaking)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception, ExceptionGroup)):
        run_machine()


def test_global_steering_does_not_count_for_keys() -> None:
    """Catches global steering that counts for a key or against a norm limit, or that hides the key's own edits."""
    shared, own = program_of(0, 1, 2, 3), program_of(0, 1, 2, 3, 4)
    tracker = QuotaTracker(SimpleNamespace(**FLAGS, steering_request_edits=1, steering_request_vectors=1))
    tracker.reserve(key_of("one")).reserve_program(own, shared, LAYERS)
    assert tracker.in_use["vector_bytes"] == SIZE
    with pytest.raises(TooLargeError, match="5 edits; at most 1"):
        tracker.reserve(key_of("two")).reserve_program(own, None, LAYERS)
    with pytest.raises(TooLargeError, match="edits"):
        tracker.reserve(key_of("two")).reserve_program(program_of(0, 1, 2, 3, 4, 5), shared, LAYERS)
    strict = QuotaTracker(SimpleNamespace(steering_max_norm=600))
    strict.reserve(None).reserve_program(program_of(0, 1, 2, 3, 1), shared, LAYERS)
    with pytest.raises(SteeringError, match="a norm of 1280"):
        strict.reserve(None).reserve_program(own, shared, LAYERS)


@pytest.mark.parametrize(
    ("limits", "source"),
    [({}, "(--steering-key-requests)"), ({"steering_requests": 3}, "(the key's own limit steering_requests)")],
)
def test_errors_name_the_source_of_a_limit(limits: dict[str, int], source: str) -> None:
    """Catches a flag as the source of a limit that the key file sets."""
    tracker, key = QuotaTracker(SimpleNamespace(**FLAGS)), key_of("alice", **limits)
    held = [tracker.reserve(key) for _ in range(3)]
    with pytest.raises(KeyLimitError, match="the limit of the key alice is 3: ") as caught:
        tracker.reserve(key)
    assert caught.value.problem.endswith(f" {source}; retry when another request of the key has ended")
    for each in held:
        each.release()


def test_limits_of_one_request() -> None:
    """Catches layers ignored for `all`, reads that do not count, and vectors that count twice."""
    tracker = QuotaTracker(
        SimpleNamespace(steering_request_layers=3, steering_request_vectors=2, steering_request_edits=9)
    )
    reservation = tracker.reserve(None)
    some = program_of(0, 0, 1, 1, width=8)
    reservation.reserve_program(some, None, LAYERS)
    reservation.release()
    edit = {"kind": "add", "point": "post_block", "vector": [1.0]}
    for layers, most in (("all", LAYERS), ([0, 1, 2, 3], LAYERS)):
        with pytest.raises(TooLargeError, match=f"has {most} layers; at most 3 are allowed .--steering-request-layers"):
            tracker.reserve(None).reserve_program(
                compile_program(parse_fields({"steering": [{**edit, "layers": layers}]})), None, LAYERS
            )
        captures = [spec for _, spec in parse_capture({"memory": {"hooks": {"post_block": layers}}})]
        with pytest.raises(TooLargeError, match="layers"):
            tracker.reserve(None).reserve_program(compile_program([], captures), None, LAYERS)
    with pytest.raises(TooLargeError, match="3 vectors"):
        tracker.reserve(None).reserve_program(program_of(0, 1, 2, width=8), None, LAYERS)


def test_all_layers_of_a_lens_count() -> None:
    """Catches a lens that counts as one layer and reads several."""
    tracker = QuotaTracker(SimpleNamespace(steering_request_layers=1))
    lens = {"lens": {"top_k": 1}, "point": "post_block"}
    for readout, most in (({**lens, "layer": 3}, None), ({**lens, "layers": [0, 1, 2, 3]}, 4)):
        refused = pytest.raises(TooLargeError, match=f"has {most} layers; at most 1 are allowed")
        with nullcontext() if most is None else refused:
            program = compile_program([], readouts=parse_readouts({"words": readout}))
            tracker.reserve(None).reserve_program(program, None, LAYERS)


@pytest.mark.parametrize(("count", "in_engine"), [(6, True), (300, False)])
def test_directions_count_as_vectors(count: int, in_engine: bool) -> None:
    """Catches directions that no limit of a key bounds, wherever the projections are computed."""
    directions = np.eye(count, 512, dtype="f4")
    captures = parse_capture({"memory": {"hooks": {"post_block": [1]}, "reduce": {"directions": directions}}})
    specs = [spec for _, spec in captures]
    assert isinstance(specs[0].reduce, Projection) and specs[0].reduce.in_engine == in_engine
    program = compile_program([], specs)
    tracker = QuotaTracker(SimpleNamespace(**FLAGS, steering_request_vectors=count))
    reservation = tracker.reserve(key_of("one"))
    reservation.reserve_program(program, None, LAYERS, specs)
    assert tracker.in_use["vector_bytes"] == 4 * 512 * count
    reservation.release()
    assert tracker.in_use["vector_bytes"] == 0
    small = QuotaTracker(SimpleNamespace(**FLAGS, steering_request_vectors=count - 1))
    with pytest.raises(TooLargeError, match=f"has {count} vectors; at most {count - 1}"):
        small.reserve(key_of("one")).reserve_program(program, None, LAYERS, specs)


@pytest.mark.parametrize(
    ("edit", "adds"),
    [
        ({"kind": "add", "vector": [3.0, 4.0]}, 5.0),
        ({"kind": "add", "vector": [3.0, 4.0], "strength": -4.0}, 20.0),
        ({"kind": "add", "vector": [3e38, 3e38]}, 4.2e38),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": -30.0}, 30.0),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": 1.0, "high": 30.0}, 30.0),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": 1.0, "high": 1.0, "strength": -20.0}, 20.0),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": 20.0, "strength": 0.5}, 20.0),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": FLOAT32_MAX}, FLOAT32_MAX),
        ({"kind": "clamp", "vector": [3.0, 4.0], "high": -FLOAT32_MAX}, FLOAT32_MAX),
        ({"kind": "clamp", "vector": [3.0, 4.0], "low": -FLOAT32_MAX, "high": FLOAT32_MAX, "strength": 20.0}, 0.0),
        ({"kind": "add_normed", "vector": [3.0, 4.0], "strength": 100.0}, 0.0),
        ({"kind": "ablate", "vector": [3.0, 4.0], "strength": 100.0}, 0.0),
    ],
)
def test_norm_limit(edit: dict[str, Any], adds: float) -> None:
    """Catches a strength, bound or overflow that bypasses the norm limit, and a rejected edit below it."""
    whole = {"point": "post_block", "layers": [1], **edit}
    program = compile_program(parse_fields({"steering": [whole]}))
    for max_norm in (0, 10, 25, 10**6):
        tracker = QuotaTracker(SimpleNamespace(steering_max_norm=max_norm))
        if max_norm and adds > max_norm:
            with pytest.raises(SteeringError, match="--steering-max-norm") as error:
                tracker.reserve(None).reserve_program(program, None, LAYERS)
            assert not isinstance(error.value, AccessError)
            scaled = {**edit, "strength": 0.0}
            scaled_program = compile_program(parse_fields({"steering": [{**whole, **scaled}]}))
            tracker.reserve(None).reserve_program(scaled_program, None, LAYERS)
        else:
            tracker.reserve(None).reserve_program(program, None, LAYERS)


def test_registry_applies_the_norm_limit() -> None:
    """Catches modules or global steering with a norm that requests may not use, and a dose of another site."""
    from tests.registry.modules import CAPABILITIES
    from vllm_steer.registry.index import RegistryLimits
    from vllm_steer.registry.registry import SteeringRegistry
    from vllm_steer.registry.storage import MemoryStore

    store = MemoryStore()
    free = SteeringRegistry(CAPABILITIES, store)
    strict = SteeringRegistry(CAPABILITIES, store, RegistryLimits(max_norm=10))
    about = {"stream": '{"1": 50.0, "2": 1.0}'}
    large = {"post_block": {"1": [100.0] + [0.0] * (CAPABILITIES.hidden_size - 1)}}
    for change in (lambda: strict.register("calm", base=large), lambda: strict.set(base=large)):
        with pytest.raises(SteeringError, match="--steering-max-norm"):
            change()
    doses = r"a norm of 100, a dose of 2; this server allows 10, a dose of 0.2 \(--steering-max-norm\)"
    with pytest.raises(SteeringError, match=doses):
        strict.register("calm", base=large, provenance=about)
    free.register(
        "calm", base={"post_block": {"1": [1.0] * CAPABILITIES.hidden_size}}, provenance={"stream": '{"1": 9}'}
    )
    free.register("calm", base=large, provenance=about)
    other = {"post_block": {"2": large["post_block"]["1"]}, "pre_attn": {"3": large["post_block"]["1"]}}
    free.register("other", base=other, provenance={"stream": '{"0": 9.0, "1": 400.0, "2": 1.0}'})
    with pytest.raises(SteeringError, match=doses):
        strict.set(modules=["calm"])
    with pytest.raises(SteeringError, match="a norm of 100; this server"):
        strict.set(base={"pre_attn": large["post_block"]})
    assert strict.set(modules=[("calm", 0.1)]).digest is not None
    assert parse_module({"base": large}).program.edits


@pytest.mark.parametrize("processes", [None, 0, 1, 2, 3, 64])
def test_processes_divide_limits(processes: int | None) -> None:
    """Catches a limit multiplied by the number of API servers, and a share of zero."""
    count = max(processes or 1, 1)
    key = key_of("one", steering_requests=7)
    total = 0
    for _ in range(count):
        tracker = QuotaTracker(SimpleNamespace(api_server_count=processes))
        entered = 0
        while True:
            try:
                tracker.reserve(key)
            except KeyLimitError as error:
                assert ("server processes" in str(error)) == (count > 1)
                break
            entered += 1
        assert entered >= 1
        total += entered
    assert 7 <= total < 7 + count


def test_limit_table() -> None:
    """Catches duplicate names, a default out of range, and a wrong name among the limits of keys."""
    assert len({limit.dest for limit in SERVER_LIMITS}) == len(SERVER_LIMITS)
    assert all(limit.low <= limit.default <= limit.high for limit in SERVER_LIMITS)
    assert list(KEY_LIMITS) == ["steering_requests", "steering_programs", "steering_pool_mib", "capture_mib",
                                "capture_store_mib", "steering_study_runs", "steering_studies"]  # fmt: skip
    assert value_of(SimpleNamespace(steering_key_requests=4), KEY_REQUESTS) == 4
    assert value_of(None, KEY_REQUESTS) == KEY_REQUESTS.default


def test_studies_are_limited() -> None:
    """Catches studies that are counted twice, or per server only, and a slot that is free while a study still runs."""
    tracker = QuotaTracker(SimpleNamespace(steering_key_studies=1, steering_max_studies=2, steering_key_study_runs=10))
    one, two = key_of("one"), key_of("two", steering_study_runs=20)
    first, second = tracker.reserve(one), tracker.reserve(one)
    end_first = first.reserve_study()
    with pytest.raises(KeyLimitError):
        second.reserve_study()
    other, third = tracker.reserve(two), tracker.reserve(None)
    end_other = other.reserve_study()
    with pytest.raises(ServerFullError):
        third.reserve_study()
    other.check_study(20, 0)
    with pytest.raises(TooLargeError, match="has 20 runs"):
        first.check_study(20, 0)
    end_other()
    first.release()
    second.release()  # the key has no request any more, but its study's thread still runs
    second = tracker.reserve(one)
    with pytest.raises(KeyLimitError):
        second.reserve_study()
    end_first()
    end_second = second.reserve_study()
    for reservation in (second, other, third):
        reservation.release()
    end_second()
    tracker.reserve(None).reserve_study()
    assert tracker.in_use["keys"] == 0


def test_rows_of_a_matrix_are_vectors() -> None:
    """Catches matrices of `replace` that count as one vector, or not at all."""
    rows = np.stack([np.full(WIDTH, float(number + 1)) for number in range(3)])
    edit = {"kind": "replace", "point": "post_block", "layers": [1], "vector": rows, "tokens": [0, 1, 2]}
    usage = QuotaTracker(None).measure(compile_program(parse_fields({"steering": [edit]})), None, LAYERS)
    assert len(usage.vectors) == 3 and sum(usage.vectors.values()) == 3 * SIZE
    with pytest.raises(TooLargeError, match="3 vectors"):
        QuotaTracker(SimpleNamespace(steering_request_vectors=2)).measure(
            compile_program(parse_fields({"steering": [edit]})), None, LAYERS
        )
