# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that carry steering.

vLLM's ``SamplingParams`` has one free-form field, ``extra_args``, that travels to the scheduler and to every worker.
The steering fields of a request are parsed here, once, and compiled to bytes under one key of it; nothing else of
vLLM's class changes, so clones, defaults and the wire form are vLLM's own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
from cachetools import LRUCache
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from vllm_steer.errors import SteeringError
from vllm_steer.program import Program, compile_program
from vllm_steer.program.program_files import ProgramFileCache, fetch_program
from vllm_steer.spec import (
    CaptureSpec,
    NamedProjection,
    Reference,
    RequestForm,
    parse_capture,
    parse_references,
)
from vllm_steer.spec.fields import parse_fields_with_paths
from vllm_steer.spec.references import MODULES_FIELD

EXTRA_KEY = "steer"
CAPTURE_KEY = "steer_capture"
MODULES_KEY = "steer_modules"
"""What names registered modules, until the request is admitted."""
APPLIED_KEY = "steer_applied"
"""What was applied, once the request is admitted: JSON as bytes, empty for nothing."""
CAPTURE_FIELD = "capture"
FIELDS: tuple[str, ...] = RequestForm.__struct_fields__
FILE_KEY = "steer_file"
"""In the place of the program between the front end and the scheduler: where that reads it."""
OWN_KEYS: tuple[str, ...] = (EXTRA_KEY, CAPTURE_KEY, MODULES_KEY, APPLIED_KEY, FILE_KEY)

Specs: TypeAlias = tuple[tuple[str, CaptureSpec], ...]
MOST_SPEC_BYTES = 64 << 20
"""Of the specs that are kept as they were decoded: those of a projection have its directions, up to 16 MiB of them."""


def compile_fields(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Parse and compile a request's steering and capture fields: what goes into ``extra_args``, empty for none.

    Raises :class:`SteeringError` naming the field that is wrong.
    """
    fields = dict(fields)
    captures = parse_capture(fields.pop(CAPTURE_FIELD, None))
    references = parse_references(fields.pop(MODULES_FIELD, None))
    edits = parse_fields_with_paths(fields)
    compiled: dict[str, bytes] = {}
    if edits or captures:
        program = compile_program(
            [edit for _, edit in edits],
            [spec for _, spec in captures],
            edit_paths=[path for path, _ in edits],
            capture_paths=[f"{CAPTURE_FIELD}.{consumer}" for consumer, _ in captures],
        )
        compiled[EXTRA_KEY] = program.encode_cached()
    if captures:
        compiled[CAPTURE_KEY] = encode_specs(captures)
    if references or any(isinstance(spec.reduce, NamedProjection) for _, spec in captures):
        compiled[MODULES_KEY] = msgspec.msgpack.encode(references)
    return compiled


def attach_steering(params: Any, fields: Mapping[str, Any]) -> None:
    """Put the compiled fields of a request onto vLLM's ``params``; nothing where none is given.

    Raises :class:`SteeringError` naming the field that is wrong.
    """
    compiled = compile_fields(fields)
    if not compiled:
        return
    for key in OWN_KEYS:
        if key in (params.extra_args or {}):
            raise SteeringError(f"extra_args.{key}", "is already set; give the steering fields or the compiled program")
    # A new dict: the caller's may be shared between several SamplingParams.
    params.extra_args = {**(params.extra_args or {}), **compiled}


def program_bytes(params: Any) -> bytes | None:
    """The compiled program on vLLM's sampling parameters, if there is one."""
    extra = getattr(params, "extra_args", None)
    return None if not extra else extra.get(EXTRA_KEY)


def has_steering(params: Any) -> bool:
    """Whether these parameters ask for any edit, of their own or of a module, or for a read."""
    return program_bytes(params) is not None or MODULES_KEY in (getattr(params, "extra_args", None) or {})


def program_of(params: Any) -> Program | None:
    """The decoded program, checked; raises :class:`SteeringError` on bytes that this package did not write."""
    data = program_bytes(params)
    return None if data is None else Program.from_bytes(data)


def encode_specs(specs: Specs) -> bytes:
    """The capture specs of a request as the bytes that ride in ``extra_args``, for the front end alone."""
    return msgspec.msgpack.encode([(name, spec.to_wire()) for name, spec in specs])


def capture_specs(params: Any) -> Specs:
    """Consumer and spec of each capture; raises :class:`SteeringError` on bytes that this package did not write."""
    return read_specs(getattr(params, "extra_args", None) or {})


def strip_for_engine(request: Any, program_files: ProgramFileCache | None = None) -> None:
    """Remove from an engine request what only the front end uses, and send a repeated program by reference.

    The specs of a projection are as large as its directions, which the program contains as well.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    reference = None
    if program_files is not None and EXTRA_KEY in extra:
        reference = program_files.reference(extra[EXTRA_KEY])
    if CAPTURE_KEY in extra or APPLIED_KEY in extra or reference is not None:
        # A copy: the samples of one request share their parameters.
        request.sampling_params = params = copy.copy(params)
        params.extra_args = {name: extra[name] for name in extra if name not in (CAPTURE_KEY, APPLIED_KEY)}
    if reference is not None:
        del params.extra_args[EXTRA_KEY]
        params.extra_args[FILE_KEY] = reference


def restore_program(request: Any) -> None:
    """The opposite, in the scheduler's process: the program is back in its place.

    Raises :class:`SteeringError` where it cannot be had.
    """
    extra = getattr(request.sampling_params, "extra_args", None)
    if extra and FILE_KEY in extra:
        extra[EXTRA_KEY] = fetch_program(extra.pop(FILE_KEY))


def read_references(extra: Mapping[str, Any]) -> tuple[Reference, ...] | None:
    """The modules that ``extra_args`` name; empty where only probes are named, None where nothing is.

    Raises :class:`SteeringError` on bytes that this package did not write.
    """
    data = extra.get(MODULES_KEY)
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=tuple[Reference, ...])
    except (msgspec.MsgspecError, TypeError) as error:
        raise SteeringError(f"extra_args.{MODULES_KEY}", f"is not ours ({error}); use {MODULES_FIELD}") from None


def read_specs(extra: Mapping[str, Any]) -> Specs:
    """As :func:`capture_specs`, from ``extra_args``."""
    data = extra.get(CAPTURE_KEY)
    if data is None:
        return ()
    if not isinstance(data, bytes):
        raise SteeringError(f"extra_args.{CAPTURE_KEY}", "not compiled specs; use capture instead")
    return _decode_specs(data)


# Looked at more than once on a request's way, and mostly the same for many.
_decoded: LRUCache[bytes, tuple[int, Specs]] = LRUCache(MOST_SPEC_BYTES, getsizeof=itemgetter(0))
_decoded_lock = threading.Lock()


def _decode_specs(data: bytes) -> Specs:
    with _decoded_lock:
        kept: tuple[int, Specs] | None = _decoded.get(data)
    if kept is not None:
        return kept[1]
    try:
        pairs = msgspec.msgpack.decode(data, type=list[tuple[str, dict[str, Any]]])
    except msgspec.MsgspecError as error:
        raise SteeringError(f"extra_args.{CAPTURE_KEY}", f"not compiled specs ({error}); use capture instead") from None
    specs = tuple((name, CaptureSpec.from_wire(wire)) for name, wire in pairs)
    # Twice: the bytes, and what is made of them; a small spec takes more.
    size = 2 * len(data) + 4096
    if size <= _decoded.maxsize:
        with _decoded_lock:
            _decoded[data] = size, specs
    return specs


class _SteeringMeta(type(VllmSamplingParams)):  # type: ignore[misc]
    """Takes the steering arguments out before vLLM's constructor sees the rest.

    vLLM's class is a msgspec Struct: its fields are its wire form and its constructor is not ``__init__``, so neither a
    new field nor an ``__init__`` would do.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        params = super().__call__(*args, **kwargs)
        if fields:  # vLLM clones every request's parameters through here
            attach_steering(params, fields)
        return params

    def __instancecheck__(cls, instance: object) -> bool:
        # vLLM makes and clones plain ones; user code that asks for "our" class means any sampling parameters.
        return isinstance(instance, VllmSamplingParams)


class SamplingParams(VllmSamplingParams, metaclass=_SteeringMeta):  # type: ignore[misc]
    """vLLM's ``SamplingParams`` and these arguments; all are checked here, before any engine hears of them.

    ``steering_vectors``, ``prefill_steering_vectors``, ``decode_steering_vectors``
        ``{point: {layer: vector | {"vector": vector, "scale": float}}}``: added to the residual stream of every
        token, of prompt tokens, of generated tokens. A vector is a list, numpy array or torch tensor of the model's
        hidden size.
    ``steering``
        a list of :class:`vllm_steer.Edit` or of dicts with its fields: the general form.
    ``steering_modules``
        registered modules by name, ``["calm", ("terse", 0.5)]``, the number scaling each of a module's edits; they
        apply ahead of the fields above, and behind the engine's global steering.
    ``capture``
        ``{consumer: spec}``: which rows of the stream go where; a spec is a dict or a :class:`vllm_steer.CaptureSpec`.

    Edits at one site apply in this order: ``steering_vectors``, ``prefill_...``, ``decode_...``, then ``steering`` in
    the order given. One object can be used for any number of requests. Raises :class:`vllm_steer.SteeringError`, a
    ``ValueError``, naming the field.
    """
