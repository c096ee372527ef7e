# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters with steering and capture.

vLLM's ``SamplingParams`` has one free-form field, ``extra_args``, that travels to the scheduler and to every worker.
The steering fields of a request are parsed once and compiled to bytes under one key of ``extra_args``. Nothing else in
vLLM's class changes, so clones, defaults and the wire form are vLLM's own.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from cachetools import LRUCache

from vllm_steer.compat.internals import SamplingParams as VllmSamplingParams
from vllm_steer.errors import SteeringError
from vllm_steer.program import Program, compile_program
from vllm_steer.program.compiler import strength_of
from vllm_steer.program.program_files import ProgramFileCache, fetch_program
from vllm_steer.request import (
    CaptureSpec,
    NamedProjection,
    Reference,
    RequestForm,
    parse_capture,
    parse_readouts,
    parse_references,
    parse_stops,
)
from vllm_steer.request.condition import STOP_FIELD
from vllm_steer.request.counts import check_counts
from vllm_steer.request.edit_fields import parse_fields_with_paths
from vllm_steer.request.readout import READOUTS_FIELD
from vllm_steer.request.references import MODULES_FIELD
from vllm_steer.request.scalars import did_you_mean
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS, problem_of
from vllm_steer.request.vector import content_digest

if TYPE_CHECKING:
    from vllm_steer.request import Edit
    from vllm_steer.request.vector import VectorInput

PROGRAM_KEY = "steer"
CAPTURE_KEY = "steer_capture"
MODULES_KEY = "steer_modules"
"""References to registered modules, until the request is admitted."""
APPLIED_KEY = "steer_applied"
"""The applied steering as JSON, once the request is admitted; empty if nothing applies."""
CAPTURE_FIELD = "capture"
FIELDS: tuple[str, ...] = RequestForm.__struct_fields__
REPORT_KEY = "steer_report"
"""Paths of edits with strength 0, which are not compiled, and doses by path, until the request is admitted."""
FIELD_ALIASES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("vectors", "steering_vector", "steer", "apply_steering_vectors"), "steering_vectors")
    | dict.fromkeys(("edits", "edit", "interventions"), "steering")
    | dict.fromkeys(("modules", "module"), "steering_modules")
    | dict.fromkeys(("hooks", "capture_hooks", "output_residual_stream"), "capture")
)
"""Fields by names that other interfaces use, for error messages."""
FILE_KEY = "steer_file"
"""Reference to a file with the program, between the front end and the scheduler."""
LIVE_KEY = "steer_live"
"""The engine's id of a sample's live strengths. It is never used again, unlike request ids."""
PROMPT_KEY = "steer_prompt"
"""Index of the prompt within the HTTP body."""
EXTRA_ARGS_KEYS: tuple[str, ...] = (PROGRAM_KEY, CAPTURE_KEY, MODULES_KEY, APPLIED_KEY, REPORT_KEY, FILE_KEY)
RESERVED_KEYS = frozenset({*EXTRA_ARGS_KEYS, PROMPT_KEY, LIVE_KEY})
"""Keys of ``extra_args`` that this package writes."""

Specs: TypeAlias = tuple[tuple[str, CaptureSpec], ...]
MAX_SPEC_CACHE_BYTES = 64 << 20
"""Size of the decoded-spec cache. The spec of a projection contains its directions, up to 16 MiB."""


def compile_fields(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Parse and compile the steering and capture fields of a request.

    Args:
        fields: Values by name in :data:`FIELDS`; None counts as absent.

    Returns:
        Entries for ``extra_args``; empty if no field is given.

    Raises:
        SteeringError: A field is invalid.
    """
    fields = dict(fields)
    check_counts(fields)
    captures = parse_capture(fields.pop(CAPTURE_FIELD, None))
    readouts = parse_readouts(fields.pop(READOUTS_FIELD, None))
    stops = parse_stops(fields.pop(STOP_FIELD, None))
    references = parse_references(fields.pop(MODULES_FIELD, None))
    edits = parse_fields_with_paths(fields)
    compiled: dict[str, bytes] = {}
    if edits or captures or readouts or stops:
        program = compile_program(
            [edit for _, edit in edits],
            [spec for _, spec in captures],
            edit_paths=[path for path, _ in edits],
            capture_paths=[f"{CAPTURE_FIELD}.{consumer}" for consumer, _ in captures],
            readouts=readouts,
            stops=stops,
        )
        compiled[PROGRAM_KEY] = program.encode_cached()
    idle = [path for path, edit in edits if strength_of(edit) == 0.0]
    doses = {path: edit.given_dose for path, edit in edits if edit.given_dose is not None}
    if idle or doses:
        compiled[REPORT_KEY] = msgspec.msgpack.encode((idle, doses))
    if captures:
        compiled[CAPTURE_KEY] = encode_specs(captures)
    reduces = [spec.reduce for _, spec in captures] + [each.projections or each.probe for each in readouts.values()]
    if references or any(isinstance(reduce, NamedProjection) for reduce in reduces):
        compiled[MODULES_KEY] = msgspec.msgpack.encode(references)
    return compiled


def attach_steering(params: Any, fields: Mapping[str, Any]) -> None:
    """Compile the fields of a request into the ``extra_args`` of vLLM's ``params``.

    Raises:
        SteeringError: A field is invalid, or ``params`` already have steering or captures.
    """
    compiled = compile_fields(fields)
    if not compiled:
        return
    for key in EXTRA_ARGS_KEYS:
        if key in (params.extra_args or {}):
            raise SteeringError(
                f"extra_args.{key}",
                "is already set: these SamplingParams already have steering or captures; create new ones",
            )
    # A new dict, because several SamplingParams may share the caller's.
    params.extra_args = {**(params.extra_args or {}), **compiled}


def add_steering(params: Any, **fields: Any) -> Any:
    """Return a copy of vLLM's sampling parameters with steering and captures, for example of an engine's defaults.

    Args:
        params: Sampling parameters without steering or captures.
        **fields: Arguments of `SamplingParams` such as ``steering_vectors`` and ``capture``.

    Raises:
        SteeringError: A field is invalid, or ``params`` already have steering or captures.

    Examples:
        >>> from vllm_steer import SamplingParams, add_steering, has_steering
        >>> has_steering(add_steering(SamplingParams(), steering_vectors={"post_block": {1: [0.5]}}))
        True
    """
    copied = params.clone()
    attach_steering(copied, fields)
    return copied


def refuse_unknown_args(extra: Any) -> None:
    """Raise SteeringError if a key of ``extra_args`` looks like a field of this package or of a similar project.

    vLLM passes keys that it does not know to plugins and otherwise ignores them.
    """
    for name in extra if isinstance(extra, dict) else ():
        if name == PROGRAM_KEY and not isinstance(extra[name], bytes):
            raise SteeringError(f"extra_args.{name}", "is a field of vLLM-Hook; use SamplingParams(steering=...)")
        if name in RESERVED_KEYS or not isinstance(name, str):
            continue
        if name in FIELDS:
            # `capture` may have another meaning to a plugin, but not as an object.
            if name != CAPTURE_FIELD or isinstance(extra[name], Mapping):
                raise SteeringError(f"extra_args.{name}", f"would be ignored here; use SamplingParams({name}=...)")
        elif (problem := problem_of(name)) is not None:
            raise SteeringError(f"extra_args.{name}", problem)


def refuse_assigned_fields(params: Any) -> None:
    """Raise SteeringError if a field of this package or of a peer was assigned to sampling parameters.

    vLLM's class accepts attributes of any name, and nothing reads these.
    """
    for name in getattr(params, "__dict__", ()):
        field = name if name in FIELDS else FIELD_ALIASES.get(name)
        if field is not None:
            raise SteeringError(
                name, f"was assigned to sampling parameters, where it has no effect; use SamplingParams({field}=...)"
            )
        if name in FIELDS_OF_OTHERS:
            raise SteeringError(name, str(problem_of(name)))


def program_bytes(params: Any) -> bytes | None:
    """Return the compiled program in vLLM's sampling parameters, or None."""
    extra = getattr(params, "extra_args", None)
    return None if not extra else extra.get(PROGRAM_KEY)


def live_id(params: Any, request_id: str) -> str:
    """Return the id under which the engine keeps the live strengths of a sample."""
    return str((getattr(params, "extra_args", None) or {}).get(LIVE_KEY, request_id))


def set_live_id(request: Any) -> str:
    """Give an engine request an id for its live strengths that no other request has, and return the id.

    vLLM's own id may be that of an ended request (``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION``).
    """
    made = uuid.uuid4().hex
    # A copy: the samples of one request share their parameters.
    request.sampling_params = params = copy.copy(request.sampling_params)
    params.extra_args = {**params.extra_args, LIVE_KEY: made}
    return made


def has_steering(params: Any) -> bool:
    """Return whether the parameters contain edits, modules or captures.

    Examples:
        >>> import vllm_steer; vllm_steer.has_steering(vllm_steer.SamplingParams())
        False
    """
    return program_bytes(params) is not None or MODULES_KEY in (getattr(params, "extra_args", None) or {})


def program_of(params: Any) -> Program | None:
    """Return the decoded and verified program, or None; raise SteeringError if the bytes are not a valid program."""
    data = program_bytes(params)
    return None if data is None else Program.from_bytes(data)


def encode_specs(specs: Specs) -> bytes:
    """Encode capture specs for ``extra_args``; only the front end reads them."""
    return msgspec.msgpack.encode([(name, spec.to_wire()) for name, spec in specs])


def capture_specs(params: Any) -> Specs:
    """Return consumer and spec of each capture; raise SteeringError if the bytes are not valid specs.

    Examples:
        >>> from vllm_steer import SamplingParams, capture_specs
        >>> params = SamplingParams(capture={"memory": {"hooks": {"post_block": [1]}}})
        >>> [name for name, _ in capture_specs(params)]
        ['memory']
    """
    return read_specs(getattr(params, "extra_args", None) or {})


def strip_for_engine(request: Any, program_files: ProgramFileCache | None = None) -> None:
    """Remove from an engine request what only the front end uses, and send a repeated program by reference.

    The specs of a projection are as large as its directions, which the program contains as well.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    reference = None
    if program_files is not None and PROGRAM_KEY in extra:
        reference = program_files.reference(extra[PROGRAM_KEY])
    if CAPTURE_KEY in extra or APPLIED_KEY in extra or reference is not None:
        # A copy: the samples of one request share their parameters.
        request.sampling_params = params = copy.copy(params)
        params.extra_args = {name: extra[name] for name in extra if name not in (CAPTURE_KEY, APPLIED_KEY)}
    if reference is not None:
        del params.extra_args[PROGRAM_KEY]
        params.extra_args[FILE_KEY] = reference


def restore_program(request: Any) -> None:
    """Replace a reference to a program by the program, in the scheduler's process.

    Raises:
        SteeringError: The program's file cannot be read.
    """
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and FILE_KEY in extra:
        extra[PROGRAM_KEY] = fetch_program(extra.pop(FILE_KEY))


def read_references(extra: Mapping[str, Any]) -> tuple[Reference, ...] | None:
    """Return the modules named in ``extra_args``.

    Returns:
        The references; empty if only probes are named, None if neither modules nor probes are.

    Raises:
        SteeringError: The bytes are not valid references.
    """
    data = extra.get(MODULES_KEY)
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=tuple[Reference, ...])
    except (msgspec.MsgspecError, TypeError) as error:
        raise SteeringError(
            f"extra_args.{MODULES_KEY}", f"not compiled references ({error}); use {MODULES_FIELD} instead"
        ) from None


def read_specs(extra: Mapping[str, Any]) -> Specs:
    """Return consumer and spec of each capture in ``extra_args``; raise SteeringError if the bytes are invalid."""
    data = extra.get(CAPTURE_KEY)
    if data is None:
        return ()
    if not isinstance(data, bytes):
        raise SteeringError(f"extra_args.{CAPTURE_KEY}", "not compiled specs; use capture instead")
    return _decode_specs(data)


# The specs of a request are decoded several times on its way, and many requests have equal ones.
_decoded: LRUCache[bytes, tuple[int, Specs]] = LRUCache(MAX_SPEC_CACHE_BYTES, getsizeof=itemgetter(0))
_decoded_lock = threading.Lock()


def _decode_specs(data: bytes) -> Specs:
    with _decoded_lock:
        cached: tuple[int, Specs] | None = _decoded.get(data)
    if cached is not None:
        return cached[1]
    try:
        pairs = msgspec.msgpack.decode(data, type=list[tuple[str, dict[str, Any]]])
    except msgspec.MsgspecError as error:
        raise SteeringError(f"extra_args.{CAPTURE_KEY}", f"not compiled specs ({error}); use capture instead") from None
    specs = tuple((name, CaptureSpec.from_wire(wire)) for name, wire in pairs)
    # The bytes and the decoded specs, plus an overhead for small ones.
    size = 2 * len(data) + 4096
    if size <= _decoded.maxsize:
        with _decoded_lock:
            _decoded[data] = size, specs
    return specs


class _Shown(str):
    """Text that a container prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(original: Callable[[Any], str], params: Any) -> str:
    """Run ``SamplingParams.__repr__``, which vLLM's logs use, with the size and digest of what this package attached.

    A program contains every vector of its edits.
    """
    extra = params.extra_args
    if not isinstance(extra, dict) or RESERVED_KEYS.isdisjoint(extra):
        return original(params)
    params = copy.copy(params)
    params.extra_args = {
        name: _Shown(f"<{len(value)} bytes, {content_digest(value).hex()}>")
        if name in RESERVED_KEYS and isinstance(value, bytes)
        else value
        for name, value in extra.items()
    }
    return original(params)


class _SteeringMeta(type(VllmSamplingParams)):  # type: ignore[misc]
    """Metaclass that removes the steering arguments before vLLM's constructor receives the others.

    vLLM's class is a msgspec Struct. Its fields are its wire form, and its constructor does not call ``__init__``, so a
    subclass can add neither a field nor an ``__init__``.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        try:
            params = super().__call__(*args, **kwargs)
        except TypeError as error:
            for name in kwargs:
                known = name in cls.__struct_fields__
                hint = "" if known else did_you_mean(name, (*FIELDS, *cls.__struct_fields__), FIELD_ALIASES)
                if hint:
                    raise TypeError(f"{error}{hint}") from error
            raise
        refuse_unknown_args(kwargs.get("extra_args"))
        if fields:  # vLLM also clones parameters through this constructor
            attach_steering(params, fields)
        return params

    def __instancecheck__(cls, instance: object) -> bool:
        # vLLM creates and clones plain instances; user code that checks for this class means any sampling parameters.
        return isinstance(instance, VllmSamplingParams)


class SamplingParams(VllmSamplingParams, metaclass=_SteeringMeta):  # type: ignore[misc]
    """vLLM's ``SamplingParams`` with steering and capture.

    Edits at one site apply in this order: global steering of the engine, modules, ``steering_vectors``,
    ``prefill_steering_vectors``, ``decode_steering_vectors``, then ``steering`` in the order given. One object can be
    used for any number of requests.

    Args:
        steering_vectors: Vectors added to the residual stream of every token:
            ``{point: {layer: vector | {"vector": vector, "scale": float}}}``. A vector is a list, numpy array or torch
            tensor of the model's hidden size.
        prefill_steering_vectors: Vectors added at prompt tokens.
        decode_steering_vectors: Vectors added at generated tokens.
        steering: A list of `Edit` or of dicts of its arguments.
        steering_modules: Registered modules by name, such as ``["calm", ("terse", 0.5)]``. The number scales the
            module's edits; ``{"module": "calm", "dose": 0.5}`` gives a dose instead.
        capture: ``{consumer: spec}``: the rows that each consumer receives. A spec is a
            `CaptureSpec` or a dict of its arguments.
        readouts: ``{name: readout}``: numbers computed from the stream of each token, such as
            ``{"refusal": {"probe": weights, "point": "post_block", "layer": 14}}``.
            The guide on readouts lists the keys.
        stop_on: Conditions on readouts, any of which ends generation, such as
            ``[{"readout": "refusal", "above": 0.95, "tokens": 3}]``.
        **kwargs: Arguments of vLLM's ``SamplingParams``.

    Raises:
        SteeringError: An argument is invalid. Values that depend on the model are checked when the request is
            submitted.

    Examples:
        >>> from vllm_steer import SamplingParams
        >>> params = SamplingParams(
        ...     max_tokens=16,
        ...     steering_vectors={"post_block": {12: {"vector": [0.5] * 256, "scale": 8.0}}},
        ...     capture={"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}},
        ... )
        >>> params.max_tokens
        16
    """

    if TYPE_CHECKING:  # the metaclass takes these arguments; documentation and editors read them here

        def __init__(
            self,
            *,
            steering_vectors: Mapping[str, Mapping[int, VectorInput]] | None = None,
            prefill_steering_vectors: Mapping[str, Mapping[int, VectorInput]] | None = None,
            decode_steering_vectors: Mapping[str, Mapping[int, VectorInput]] | None = None,
            steering: Edit | Sequence[Edit | Mapping[str, Any]] | None = None,
            steering_modules: Sequence[str | tuple[str, float] | Mapping[str, Any]] | None = None,
            capture: Mapping[str, CaptureSpec | Mapping[str, Any]] | None = None,
            readouts: Mapping[str, Mapping[str, Any]] | None = None,
            stop_on: Sequence[Mapping[str, Any]] | None = None,
            **kwargs: Any,
        ) -> None: ...

    def __repr__(self) -> str:
        return shown(VllmSamplingParams.__repr__, self)
