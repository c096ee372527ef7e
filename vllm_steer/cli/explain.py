# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer explain``: what a request would do, without running it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.output import failing_on, print_table
from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    from vllm_steer.program import Program
    from vllm_steer.registry.directions import Directions
    from vllm_steer.request import Edit, Readout
    from vllm_steer.request.condition import Bound


def explain(
    request: Annotated[Path, typer.Argument(metavar="FILE", help="JSON body of a request; - for stdin.")],
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Decoder layers of the model.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the prompt.")] = 128,
    module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="File written by make: vectors that the request names, and lengths of the stream; repeatable.",
        ),
    ] = None,
) -> None:
    """Show where and how much a request edits, what it reads, what it needs, and which cache blocks it shares.

    Global steering of a server comes on top. Exits with status 1 if the request is invalid.
    """
    from vllm_steer.params import CAPTURE_FIELD, FIELDS, PROGRAM_KEY, compile_fields
    from vllm_steer.program import Program
    from vllm_steer.registry.expression import Expression
    from vllm_steer.request import parse_capture, parse_readouts, parse_references, parse_stops
    from vllm_steer.request.condition import STOP_FIELD
    from vllm_steer.request.edit_fields import FIELD_NAMES, GENERAL_FIELD, parse_fields_with_paths
    from vllm_steer.request.readout import READOUTS_FIELD
    from vllm_steer.request.references import MODULES_FIELD
    from vllm_steer.request.strict_json import parse_json
    from vllm_steer.request.unknown_fields import problem_of

    with failing_on(SteeringError, OSError, UnicodeDecodeError):
        known = _modules(module or ())
        body = parse_json(sys.stdin.read() if str(request) == "-" else request.read_text(), str(request))
        if not isinstance(body, dict):
            raise SteeringError(str(request), "must be a JSON object, the body of a request")
        for name in body.keys() - set(FIELDS):
            if (problem := problem_of(name)) is not None:
                raise SteeringError(name, problem)
        fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
        if not fields:
            raise SteeringError(str(request), f"has none of {', '.join(FIELDS)}; it runs as without steering")
        if isinstance(text := fields.get(GENERAL_FIELD), str):
            fields[GENERAL_FIELD] = Expression.parse(text).edits(known)
        elif isinstance(text, list):
            fields[GENERAL_FIELD] = [_with_vector(each, f"{GENERAL_FIELD}[{i}]", known) for i, each in enumerate(text)]
        compiled = compile_fields(fields)
        edits = parse_fields_with_paths({name: fields[name] for name in FIELD_NAMES if name in fields})
        if edits:
            rows = [_edit(path, edit, known.values()) for path, edit in edits]
            print_table(("edit", "kind", "site", "tokens", "strength", "length", "dose", "if"), rows)
        references = parse_references(fields.get(MODULES_FIELD))
        for reference in references:
            amount = f"scale {reference.scale:g}" if reference.dose is None else f"dose {reference.dose:g}"
            typer.echo(f"module {reference}, {amount}: its edits apply before those of the request")
        for name, readout in parse_readouts(fields.get(READOUTS_FIELD)).items():
            typer.echo(f"readout {name}: {readout.kind.name} at {_site(readout)}, tokens {readout.positions.to_wire()}")
        for stop in parse_stops(fields.get(STOP_FIELD)):
            typer.echo(f"stop: {stop.readout} {_bound(stop.bound)}, tokens in a row: {stop.tokens}")
        for consumer, spec in parse_capture(fields.get(CAPTURE_FIELD)):
            for point, where in spec.hooks:
                typer.echo(f"capture {consumer}: {point} of {_layers(where)}, tokens {spec.tokens.to_wire()}")
        program = Program.from_bytes(compiled[PROGRAM_KEY]) if PROGRAM_KEY in compiled else None
        if references or (program is not None and (program.has_names or program.needs_prompt)):
            typer.echo("What the request needs and shares depends on modules, names or messages of the server.")
        elif program is not None:
            _print_needs(program, layers, prompt_tokens)


def _modules(given: Iterable[str]) -> dict[str, Directions]:
    """Read ``NAME=FILE`` options."""
    from vllm_steer.registry.directions import Directions

    pairs = [each.partition("=") for each in given]
    if wrong := [name for name, equals, file in pairs if not (name and equals and file)]:
        raise SteeringError("module", f"{wrong[0]!r} is not NAME=FILE, such as calm=calm.safetensors")
    return {name: Directions.load(file) for name, _, file in pairs}


def _with_vector(edit: Any, path: str, known: Mapping[str, Directions]) -> Any:
    """Return an edit with the vectors of the module that it names."""
    from vllm_steer.request.capture_source import names_rows

    if not isinstance(edit, dict) or not names_rows(vector := edit.get("vector")) or "module" not in vector:
        return edit
    found = known.get(str(name := vector["module"]))
    if found is None:
        raise SteeringError(f"{path}.vector.module", f"{name!r} is not a --module; give its file as NAME=FILE")
    return {**edit, "vector": found}


def _edit(path: str, edit: Edit, known: Iterable[Directions]) -> tuple[str, ...]:
    """Return the row of an edit. Length and dose have the sign of the strength."""
    import numpy as np

    length = dose = ""
    if edit.kind == "add":
        added = edit.strength * float(np.linalg.norm(edit.vector.astype(np.float64)))
        sites = [each[n] for each in known for n in each if edit.layers == "all" or n in edit.layers]
        sites = [each for each in sites if each.point == edit.point]
        streams = {f"{each.layer}": each.stream for each in sites if each.stream > 0}
        length, dose = f"{added:.4g}", ", ".join(f"{added / stream:.3g}" for stream in streams.values())
    when = " and ".join(f"{each.readout} {_bound(each.bound)} ({each.window})" for each in edit.when)
    if edit.live:
        when = f"{when + ', ' if when else ''}times the live strength {edit.live}"
    tokens = str(edit.tokens.to_wire())
    return path, edit.kind, _site(edit), tokens, f"{edit.strength:g}", length, dose, when


def _bound(bound: Bound) -> str:
    return f"below {bound.below:g}" if bound.above is None else f"above {bound.above:g}"


def _site(part: Edit | Readout) -> str:
    """Return the site of an edit or a readout."""
    single = getattr(part, "layer", None)
    layers = part.layers if single is None else (single,)
    if part.point is None or not layers:
        return "the site that is registered with it"
    return f"{part.point} of {_layers(layers)}"


def _layers(layers: Any) -> str:
    return "all layers" if layers == "all" else f"layer {', '.join(map(str, layers))}"


def _print_needs(program: Program, layers: int, prompt_tokens: int) -> None:
    """Print what a program needs of the engine's tables, and which blocks of the prefix cache it shares."""
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
    """Return who shares the cache blocks of a request with these starts and digests of edited keys and values.

    A key of a block includes all edits up to its end (`vllm_steer.engine.cache_keys`), those of earlier tokens as well.
    """
    if not edited:
        return "all blocks are shared with requests without steering"
    digest = hashlib.blake2b(repr(edited).encode(), digest_size=6).hexdigest()
    others = "no other request, because of live strengths" if live else f"requests with equal edits ({digest})"
    start = edited[0][0]
    before = f"blocks before position {start} are shared with requests without steering, " if start else ""
    return f"{before}{'those from it on' if start else 'all blocks'} with {others}"
