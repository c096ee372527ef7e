# SPDX-License-Identifier: Apache-2.0
"""Tracking of the resources held by the in-flight requests of one API server process, per API key and in total.

A request's reservation starts when its sampling parameters are parsed and ends when it completes, fails or its client
disconnects. Not thread-safe: call from the event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI

from vllm_steer.errors import SteeringError
from vllm_steer.limits import (
    KEY_CAPTURE_MIB,
    KEY_POOL_MIB,
    KEY_PROGRAMS,
    KEY_REQUESTS,
    KEY_STORE_MIB,
    KEY_STUDIES,
    KEY_STUDY_RUNS,
    MAX_NORM,
    MAX_PROGRAMS,
    MAX_STUDIES,
    REQUEST_EDITS,
    REQUEST_LAYERS,
    REQUEST_VECTORS,
    SERVER_LIMITS,
    ServerLimit,
)
from vllm_steer.program import Program
from vllm_steer.program.compiled_capture import CompiledCapture
from vllm_steer.program.compiled_edit import CompiledEdit
from vllm_steer.program.magnitude import StreamsAt, check_magnitude
from vllm_steer.request import CaptureSpec
from vllm_steer.request.projection import Projection
from vllm_steer.server.access_errors import KeyLimitError, ServerFullError, TooLargeError
from vllm_steer.server.auth.keys import Key
from vllm_steer.server.routes.base import state_of
from vllm_steer.server.settings import value_of

STEERING = "steering"


@dataclass(frozen=True)
class ProgramUsage:
    """Resources of one request's program, without global steering."""

    digest: bytes
    """Digest of the whole program."""
    vectors: Mapping[bytes, int]
    """Sizes in bytes by vector digest."""


@dataclass
class KeyUsage:
    """Resources held by the requests of one API key."""

    key: Key
    requests: int = 0
    programs: Counter[bytes] = field(default_factory=Counter)
    vectors: Counter[bytes] = field(default_factory=Counter)
    vector_bytes: int = 0
    row_bytes: int = 0
    studies: int = 0


class QuotaTracker:
    """Usage counters and limits of one process. Several processes divide the limits of keys among them."""

    def __init__(self, args: object) -> None:
        """Read the limits from the parsed flags of a server."""
        self._values = {limit: value_of(args, limit) for limit in SERVER_LIMITS}
        self._processes = max(getattr(args, "api_server_count", None) or 1, 1)
        self._usage: dict[str, KeyUsage] = {}
        self.programs: Counter[bytes] = Counter()
        """Running requests by the digest of their program."""
        self.studies = 0

    def reserve(self, key: Key | None) -> Reservation:
        """Start the reservation of one request, which the caller must release; raises ``KeyLimitError``."""
        if key is None:
            return Reservation(self, None)
        usage = self._usage.setdefault(key.sha256, KeyUsage(key))
        if usage.requests >= self.limit(KEY_REQUESTS, key):
            raise self.too_many("authorization", KEY_REQUESTS, key)
        usage.requests += 1
        return Reservation(self, usage)

    def limit(self, limit: ServerLimit, key: Key | None) -> int:
        """Return this process's share of a limit."""
        configured = self.configured(limit, key)
        return configured if limit.scope == "request" else -(-configured // self._processes)  # rounded up

    def configured(self, limit: ServerLimit, key: Key | None) -> int:
        """Return the value of a limit as set for the key, or else by the server's flags."""
        value = self._values[limit]
        return value if key is None or limit.key_name is None else key.limits.get(limit.key_name, value)

    def measure(
        self,
        program: Program,
        shared: Program | None,
        num_layers: int,
        specs: Sequence[CaptureSpec] = (),
        streams_at: StreamsAt | None = None,
    ) -> ProgramUsage:
        """Return the resources of a program without those of global steering.

        Args:
            program: The composed program of the request.
            shared: Global steering, whose edits come first in ``program``.
            num_layers: Number of layers of the model.
            specs: Captures of the request. Projections that the front end computes are not part of the program, but
                their directions count as vectors.
            streams_at: Known lengths of the stream, for errors.

        Raises:
            TooLargeError: The program exceeds a limit per request.
            SteeringError: An edit exceeds the norm limit.
        """
        edits = program.edits if shared is None else program.edits[len(shared.edits) :]
        used = {digest: len(vector) for digest, vector in zip(program.digests, program.vectors, strict=True)}
        for spec in specs:
            if isinstance(spec.reduce, Projection) and not spec.reduce.in_engine:
                used.update((digest, 4 * spec.reduce.directions.shape[1]) for digest in spec.reduce.digests)
        shared_vectors = {} if shared is None else shared.by_digest
        vectors = {digest: size for digest, size in used.items() if digest not in shared_vectors}
        parts: list[CompiledEdit | CompiledCapture] = [*edits, *program.captures]
        layers = {layer for part in parts for layer in part.layers or range(num_layers)}
        layers.update(layer for readout in program.readouts for layer in readout.layers or (readout.layer,))
        self.check_count(REQUEST_EDITS, len(edits))
        self.check_count(REQUEST_VECTORS, len(vectors))
        self.check_count(REQUEST_LAYERS, len(layers))
        first = len(program.edits) - len(edits)
        check_magnitude(program, self.limit(MAX_NORM, None), first, streams_at=streams_at)
        return ProgramUsage(program.digest, vectors)

    def check_count(self, limit: ServerLimit, count: int) -> None:
        """Raise ``TooLargeError`` if one request has more than ``limit`` allows."""
        maximum = self.limit(limit, None)
        if count > maximum:
            what = limit.name.partition("_")[2]
            raise TooLargeError(STEERING, f"has {count} {what}; at most {maximum} are allowed ({limit.flag})")

    @property
    def in_use(self) -> dict[str, int]:
        """Resources currently held by all requests together; all zero if there are none."""
        usages = self._usage.values()
        return {
            "requests": sum(usage.requests for usage in usages),
            "programs": len(self.programs),
            "vector_bytes": sum(usage.vector_bytes for usage in usages),
            "row_bytes": sum(usage.row_bytes for usage in usages),
            "keys": len(self._usage),
        }

    def forget_unused(self, usage: KeyUsage) -> None:
        """Forget a key that holds nothing any more."""
        if not usage.requests and not usage.studies:
            del self._usage[usage.key.sha256]

    def check_bytes(self, limit: ServerLimit, key: Key, request: int, total: int) -> None:
        """Raise ``AccessError`` if the bytes of one request, or of all requests of the key, exceed a limit."""
        maximum = self.limit(limit, key) << 20
        field, what = ("capture", "captured rows") if limit.prefix == "capture" else (STEERING, "vectors")
        if request > maximum:
            raise TooLargeError(
                field, f"may need {-(-request >> 20)} MiB; {self._describe(limit, key)}; use fewer or smaller {what}"
            )
        if total > maximum:
            raise self.too_many(field, limit, key)

    def too_many(self, field: str, limit: ServerLimit, key: Key) -> KeyLimitError:
        """Return the error for a key whose requests together would exceed a limit."""
        return KeyLimitError(field, f"{self._describe(limit, key)}; retry when another request of the key has ended")

    def _describe(self, limit: ServerLimit, key: Key) -> str:
        shared = f", divided among {self._processes} server processes" if self._processes > 1 else ""
        own = limit.key_name is not None and limit.key_name in key.limits
        source = f"the key's own limit {limit.key_name}" if own else limit.flag
        return f"the limit of the key {key.name} is {self.configured(limit, key)}: {limit.help} ({source}{shared})"


class Reservation:
    """Resources held by one HTTP request. Its methods raise ``AccessError``, and then reserve nothing."""

    def __init__(self, tracker: QuotaTracker, usage: KeyUsage | None) -> None:
        self.tracker = tracker
        self._usage = usage
        self._program: ProgramUsage | None = None
        self._row_bytes = 0
        self._released = False

    def reserve_program(
        self,
        program: Program,
        shared: Program | None,
        num_layers: int,
        specs: Sequence[CaptureSpec] = (),
        streams_at: StreamsAt | None = None,
    ) -> None:
        """Reserve the resources of the request's program, once; see `QuotaTracker.measure`."""
        if self._program is not None or self._released:
            raise SteeringError(STEERING, "the request already has a program")
        tracker, usage = self.tracker, self._usage
        found = tracker.measure(program, shared, num_layers, specs, streams_at)
        maximum = tracker.limit(MAX_PROGRAMS, None)
        if found.digest not in tracker.programs and len(tracker.programs) >= maximum:
            raise ServerFullError(
                STEERING, f"this server already runs {maximum} distinct programs ({MAX_PROGRAMS.flag}); retry later"
            )
        if usage is not None:
            if found.digest not in usage.programs and len(usage.programs) >= tracker.limit(KEY_PROGRAMS, usage.key):
                raise tracker.too_many(STEERING, KEY_PROGRAMS, usage.key)
            new = sum(size for digest, size in found.vectors.items() if digest not in usage.vectors)
            tracker.check_bytes(KEY_POOL_MIB, usage.key, sum(found.vectors.values()), usage.vector_bytes + new)
            usage.programs[found.digest] += 1
            usage.vectors.update(found.vectors.keys())
            usage.vector_bytes += new
        tracker.programs[found.digest] += 1
        self._program = found

    @property
    def counts_rows(self) -> bool:
        """Whether captured rows count, which they do for requests with an API key only."""
        return self._usage is not None

    def reserve_rows(self, num_bytes: int) -> None:
        """Reserve memory for the captured rows of one prompt, in the model's dtype."""
        usage = self._usage
        if usage is not None and not self._released:
            total = usage.row_bytes + num_bytes
            self.tracker.check_bytes(KEY_CAPTURE_MIB, usage.key, self._row_bytes + num_bytes, total)
            usage.row_bytes = total
            self._row_bytes += num_bytes

    def reserve_study(self) -> Callable[[], None]:
        """Count a patching study, which may outlive its request, and return its release."""
        tracker, usage = self.tracker, self._usage
        if tracker.studies >= tracker.limit(MAX_STUDIES, None):
            raise ServerFullError(
                "study",
                f"this server already runs {tracker.studies} patching studies ({MAX_STUDIES.flag}); retry later",
            )
        if usage is not None:
            if usage.studies >= tracker.limit(KEY_STUDIES, usage.key):
                raise tracker.too_many("study", KEY_STUDIES, usage.key)
            usage.studies += 1
        tracker.studies += 1
        return self._release_study

    def _release_study(self) -> None:
        self.tracker.studies -= 1
        if self._usage is not None:
            self._usage.studies -= 1
            self.tracker.forget_unused(self._usage)

    def check_study(self, runs: int, row_bytes: int) -> None:
        """Reserve the captured rows of a study and check its number of runs."""
        maximum = self.tracker.configured(KEY_STUDY_RUNS, None if self._usage is None else self._usage.key)
        if runs > maximum:
            raise TooLargeError(
                "study",
                f"has {runs} runs of cells; at most {maximum} are allowed ({KEY_STUDY_RUNS.flag}); use fewer points, "
                "layers, positions, pairs or draws, [start, stop] pairs, or control=False with a subspace",
            )
        self.reserve_rows(row_bytes)

    @property
    def store_bytes(self) -> int | None:
        """The key's limit of stored captures in bytes, over all processes; None if the request has no key."""
        return None if self._usage is None else self.tracker.configured(KEY_STORE_MIB, self._usage.key) << 20

    def release(self) -> None:
        """Release all resources. Later calls do nothing."""
        if self._released:
            return
        self._released = True
        program, usage = self._program, self._usage
        if program is not None:
            _decrement(self.tracker.programs, program.digest)
        if usage is None:
            return
        usage.requests -= 1
        usage.row_bytes -= self._row_bytes
        if program is not None:
            _decrement(usage.programs, program.digest)
            for digest, size in program.vectors.items():
                usage.vector_bytes -= size if _decrement(usage.vectors, digest) else 0
        self.tracker.forget_unused(usage)


def quota_tracker_of(app: FastAPI) -> QuotaTracker:
    """Return the quota tracker of a server, which the first call creates."""
    return state_of(app, "vllm_steer_quota_tracker", lambda: QuotaTracker(getattr(app.state, "args", None)))


def _decrement(counter: Counter[bytes], item: bytes) -> bool:
    """Decrement the count of an item and return whether it became zero."""
    counter[item] -= 1
    if counter[item]:
        return False
    del counter[item]
    return True
