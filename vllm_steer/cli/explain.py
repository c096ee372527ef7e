# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer explain``: what a request would do, without running it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.output import failing_on, print_table
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.program import Program
    from vllm_steer.registry.snapshot import Snapshot
    from vllm_steer.request import Edit, Readout
    from vllm_steer.request.condition import Bound
    from vllm_steer.request.probe import Probe


def explain(
    request: Annotated[Path, typer.Argument(metavar="FILE", help="JSON body of a request; - for stdin.")],
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Decoder layers of the model.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the prompt.")] = 128,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="File of a module that the request names; repeatable."),
    ] = None,
) -> None:
    """Show where and how much a request edits, what it reads, what it needs, and which cache blocks it shares.

    Global steering of a server comes on top. Exits with status 1 if the request is invalid.
    """
    from vllm_steer.models.sae_features import FeatureReader
    from vllm_steer.params import CAPTURE_FIELD, FIELDS, PROGRAM_KEY, compile_fields
    from vllm_steer.program import Program
    from vllm_steer.registry.composer import RequestComposer, find_probe
    from vllm_steer.registry.errors import UnknownModuleError
    from vllm_steer.request import NamedProjection, parse_capture, parse_readouts, parse_references, parse_stops
    from vllm_steer.request.condition import STOP_FIELD
    from vllm_steer.request.edit_fields import FIELD_NAMES, parse_fields_with_paths
    from vllm_steer.request.readout import READOUTS_FIELD
    from vllm_steer.request.references import MODULES_FIELD
    from vllm_steer.request.scalars import parse_json
    from vllm_steer.request.unknown_fields import problem_of
    from vllm_steer.server.http.request_context import RequestContext
    from vllm_steer.server.http.row_sources import with_rows

    name = "stdin" if str(request) == "-" else str(request)
    with failing_on(SteeringError):
        snapshot = _registry(module or ())
        body = parse_json(_read(request), name)
        if not isinstance(body, dict):
            raise SteeringError(name, "must be a JSON object, the body of a request")
        for key in body.keys() - set(FIELDS):
            if (problem := problem_of(key)) is not None:
                raise SteeringError(key, problem)
        fields: Mapping[str, Any] = {key: body[key] for key in FIELDS if body.get(key) is not None}
        if not fields:
            inside = [key for key, value in body.items() if isinstance(value, dict) and value.keys() & set(FIELDS)]
            hint = f"its {inside[0]} has some: write them beside model" if inside else "it runs as without steering"
            raise SteeringError(name, f"has none of {', '.join(FIELDS)}; {hint}")
        try:
            fields = with_rows(fields, RequestContext(snapshot=snapshot))
        except UnknownModuleError as error:
            raise SteeringError(error.field, f"{error.problem}; give its file with --module NAME=FILE") from None
        compiled = compile_fields(fields)
        edits = parse_fields_with_paths({key: fields[key] for key in FIELD_NAMES if key in fields})
        named, unknown = [], ""
        for i, reference in enumerate(parse_references(fields.get(MODULES_FIELD))):
            path = f"{MODULES_FIELD}[{i}]"
            try:
                found = snapshot.find(reference, path)[0]
            except UnknownModuleError:
                amount = f"scale {reference.scale:g}" if reference.dose is None else f"dose {reference.dose:g}"
                typer.echo(f"module {reference}, {amount}: its edits apply before the request's own")
                unknown = f"{reference}"
                continue
            parts = snapshot.content(found.digest).all_edits
            scales = found.scales or (found.scale,) * len(parts)
            named += [(f"{path} {found.name}", each, scale) for each, scale in zip(parts, scales, strict=True)]
        if rows := [_edit(*each, snapshot, layers) for each in (*named, *((path, edit, 1.0) for path, edit in edits))]:
            print_table(("edit", "kind", "site", "tokens", "strength", "length", "dose", "if"), rows)
        for key, readout in parse_readouts(fields.get(READOUTS_FIELD)).items():
            part: Any = readout
            if isinstance(readout.probe, NamedProjection) and readout.point is None:
                with suppress(UnknownModuleError):
                    part = find_probe(readout.probe.probes[0], snapshot, f"{READOUTS_FIELD}.{key}.probe")
            where = _site(part, f"{READOUTS_FIELD}.{key}", layers)
            typer.echo(f"readout {key}: {readout.kind.name} at {where}, tokens {readout.positions.to_wire()}")
        for stop in parse_stops(fields.get(STOP_FIELD)):
            typer.echo(f"stop: {stop.readout} {_bound(stop.bound)}, tokens in a row: {stop.tokens}")
        for consumer, spec in parse_capture(fields.get(CAPTURE_FIELD)):
            for point, chosen in spec.hooks:
                sites = _layers(chosen, f"{CAPTURE_FIELD}.{consumer}.hooks", layers)
                typer.echo(f"capture {consumer}: {point} of {sites}, tokens {spec.tokens.to_wire()}")
        try:
            composer = RequestComposer(FeatureReader({}), layers)
            composed = {} if unknown else composer.compose(compiled, snapshot)
        except UnknownModuleError as error:
            composed, unknown = {}, error.problem.split("'")[1]
        program = Program.from_bytes(composed[PROGRAM_KEY]) if PROGRAM_KEY in composed else None
        if unknown:
            typer.echo(
                f"What the request needs and shares depends on the module {unknown}: add --module {unknown}=FILE."
            )
        elif program is not None and program.needs_prompt:
            typer.echo("What the request needs and shares depends on the messages of the conversation.")
        elif program is not None:
            _print_needs(program, layers, prompt_tokens)


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except OSError as error:
        raise SteeringError(str(path), f"cannot be read: {error.strerror or error}; give a JSON file, or -") from None
    except UnicodeDecodeError as error:
        raise SteeringError(str(path), f"is not UTF-8 text: {error.reason}") from None


def _registry(given: Iterable[str]) -> Snapshot:
    """Return a registry with the modules of ``NAME=FILE`` options."""
    from vllm_steer.registry.index import RegistryLimits
    from vllm_steer.registry.snapshot import Snapshot
    from vllm_steer.registry.vector_files import read_vector_file
    from vllm_steer.request.references import read_name

    snapshot = Snapshot()
    for name, equals, file in (each.partition("=") for each in given):
        if not (name and equals and file):
            raise SteeringError("module", f"{name!r} is not NAME=FILE, such as calm=calm.safetensors")
        module, metadata = read_vector_file(file)
        snapshot = snapshot.with_module(read_name(name, "module"), module, metadata, 0.0, RegistryLimits())
    return snapshot


def _edit(path: str, edit: Edit, scale: float, snapshot: Snapshot, layers: int) -> tuple[str, ...]:
    """Return the table row of an edit, with its strength times a scale. Length and dose have the strength's sign."""
    import numpy as np

    length = dose = ""
    strength = edit.strength * scale
    if edit.kind == "add":
        added = strength * float(np.linalg.norm(edit.vector.astype(np.float64)))
        streams = dict.fromkeys(snapshot.streams_at(str(edit.point), () if edit.layers == "all" else edit.layers))
        length, dose = f"{added:.4g}", ", ".join(f"{added / stream:.3g}" for stream in streams)
    when = " and ".join(f"{each.readout} {_bound(each.bound)} ({each.window})" for each in edit.when)
    if edit.live:
        when = f"{when + ', ' if when else ''}times the live strength {edit.live}"
    tokens = str(edit.tokens.to_wire())
    return path, edit.kind, _site(edit, path, layers), tokens, f"{strength:g}", length, dose, when


def _bound(bound: Bound) -> str:
    return f"below {bound.below:g}" if bound.above is None else f"above {bound.above:g}"


def _site(part: Edit | Readout | Probe, path: str, layers: int) -> str:
    """Return the site of an edit, a readout or a module's probe."""
    single = getattr(part, "layer", None)
    chosen = getattr(part, "layers", None) if single is None else (single,)
    if part.point is None or not chosen:
        return "the site that is registered with it"
    return f"{part.point} of {_layers(chosen, path, layers)}"


def _layers(chosen: Any, path: str, layers: int) -> str:
    """Return the names of layers; raise SteeringError for one that the model does not have."""
    if chosen == "all":
        return "all layers"
    if (last := max(chosen)) >= layers:
        problem = f"{last} is not a layer of a model with {layers} layers, which count from 0"
        raise SteeringError(f"{path}.layers", f"{problem}; give the model's number of layers with --layers")
    return f"layer {', '.join(map(str, chosen))}"


def _print_needs(program: Program, layers: int, prompt_tokens: int) -> None:
    """Print how much of the engine's tables a program needs, and which blocks of the prefix cache it shares."""
    from vllm_steer.limits import ENGINE_LIMITS
    from vllm_steer.program import resolve

    resolved = resolve(program, prompt_tokens, layers)
    rows = resolved.token_programs
    needs: Mapping[str, int] = {
        "max_rows": len(rows),
        "max_instructions": sum(row.num_instructions for row in rows),
        "max_vectors": len({vector for row in rows for vector in row.vectors}),
        "capture_rows": resolved.max_captures,
    }
    print_table(
        ("limit", "needed", "the engine's default"),
        [(name, count, ENGINE_LIMITS[name].default) for name, count in needs.items() if count],
    )
    edited = [(segment.start, segment.kv_digest) for segment in resolved.segments if segment.kv_digest is not None]
    typer.echo(f"prefix cache: {_shared(edited, live=any(edit.live for edit in program.edits))}")


def _shared(edited: Sequence[tuple[int, bytes]], *, live: bool) -> str:
    """Return which requests share the cache blocks of one with these starts and digests of edited keys and values.

    A key of a block includes all edits up to its end (`vllm_steer.engine.cache_keys`), those of earlier tokens as well.
    """
    if not edited:
        return "all blocks are shared with requests without steering"
    digest = hashlib.blake2b(repr(edited).encode(), digest_size=6).hexdigest()
    others = "no other request, because of live strengths" if live else f"requests with equal edits (digest {digest})"
    start = edited[0][0]
    before = f"blocks before position {start} are shared with requests without steering, " if start else ""
    return f"{before}{'those from it on' if start else 'all blocks are shared'} with {others}"
