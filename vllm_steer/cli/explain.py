# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer explain``: what a request would do, without running it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_steer.cli.output import failing_on, print_table

if TYPE_CHECKING:
    from vllm_steer.program import Program
    from vllm_steer.registry.directions import Directions
    from vllm_steer.request import Edit


def explain(
    request: Annotated[Path, typer.Argument(metavar="FILE", help="JSON body of a request; - for stdin.")],
    layers: Annotated[int, typer.Option(min=1, max=4096, help="Decoder layers of the model.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the prompt.")] = 128,
    stream: Annotated[
        Path | None, typer.Option(help="File written by make, whose lengths of the stream turn additions into doses.")
    ] = None,
) -> None:
    """Show where and how much a request edits, what it reads, what it needs, and which cache blocks it shares.

    Exits with status 1 if no server would take the request.
    """
    from vllm_steer.errors import SteeringError
    from vllm_steer.params import FIELDS, MODULES_KEY, PROGRAM_KEY, compile_fields, read_references
    from vllm_steer.program import Program
    from vllm_steer.registry.directions import Directions
    from vllm_steer.request.edit_fields import FIELD_NAMES, parse_fields_with_paths
    from vllm_steer.request.strict_json import parse_json
    from vllm_steer.request.unknown_fields import problem_of

    with failing_on(SteeringError, OSError, UnicodeDecodeError):
        text = sys.stdin.read() if str(request) == "-" else request.read_text()
        body = parse_json(text, str(request))
        if not isinstance(body, dict):
            raise SteeringError(str(request), "must be a JSON object, the body of a request")
        for name in body.keys() - set(FIELDS):
            if (problem := problem_of(name)) is not None:
                raise SteeringError(name, problem)
        fields = {name: body[name] for name in FIELDS if body.get(name) is not None}
        if not fields:
            raise SteeringError(str(request), f"has none of {', '.join(FIELDS)}; it runs as without steering")
        compiled = compile_fields(fields)
        known = None if stream is None else Directions.load(stream)
        edits = parse_fields_with_paths({name: fields[name] for name in FIELD_NAMES if name in fields})
        print_table(("edit", "kind", "site", "tokens", "change", "if"), [_edit(*each, known) for each in edits])
        for reference in read_references(compiled) or ():
            typer.echo(f"module {reference}, times {reference.scale:g}: its edits apply before those of the request")
        if PROGRAM_KEY in compiled:
            _print_program(Program.from_bytes(compiled[PROGRAM_KEY]), layers, prompt_tokens)
        elif MODULES_KEY not in compiled:
            typer.echo("nothing is left of the request: each of its edits has strength 0")


def _edit(path: str, edit: Edit, known: Directions | None) -> tuple[str, str, str, str, str, str]:
    """Return the row of an edit."""
    import numpy as np

    change = f"strength {edit.strength:g}"
    if edit.kind == "add":
        length = abs(edit.strength) * float(np.linalg.norm(edit.vector.astype(np.float64)))
        change = f"length {length:.4g}"
        named = [] if known is None or edit.layers == "all" else [known[n] for n in edit.layers if n in known]
        doses = [length / each.stream for each in named if each.point == edit.point and each.stream > 0]
        change += f", dose {' '.join(f'{dose:.3g}' for dose in doses)}" if doses else ""
    when = " and ".join(f"{each.readout}, {each.window}" for each in edit.when)
    when += f" live {edit.live}" if edit.live else ""
    where = f"{edit.point or 'point'} of {_layers(edit.layers)}" if edit.point or edit.layers else "the autoencoder's"
    return path, edit.kind, where, str(edit.tokens.to_wire()), change, when


def _layers(layers: Any) -> str:
    return "all layers" if layers == "all" or not layers else f"layer {', '.join(map(str, layers))}"


def _print_program(program: Program, layers: int, prompt_tokens: int) -> None:
    from vllm_steer.limits import ENGINE_LIMITS
    from vllm_steer.points import POINT_NAMES
    from vllm_steer.program import resolve

    for readout in program.readouts:
        place = f"{POINT_NAMES[readout.point]} of {_layers(readout.layers or (readout.layer,))}"
        place = "the site registered with it" if readout.omitted else place
        typer.echo(f"readout {readout.name}: {readout.kind.name} at {place}, tokens {readout.tokens}")
    for stop in program.stops:
        bound = f"{'above' if stop.bound.above else 'below'} {stop.bound.threshold:g}"
        typer.echo(f"stop: {program.readouts[stop.readout].name} {bound} at {stop.tokens} tokens in a row")
    for capture in program.captures:
        typer.echo(f"capture: {POINT_NAMES[capture.point]} of {_layers(capture.layers)}, tokens {capture.tokens}")
    if program.has_names or program.needs_prompt:
        typer.echo("The server fills in names and messages; what the request needs depends on them.")
        return
    resolved = resolve(program, prompt_tokens, layers)
    rows = resolved.token_programs
    needs: Mapping[str, int] = {
        "max_rows": len(rows),
        "max_instructions": sum(row.num_instructions for row in rows),
        "max_vectors": len({vector for row in rows for vector in row.vectors}),
        "capture_rows": resolved.max_captures,
    }
    print_table(
        ("needs", "count", "of the engine's default"),
        [(name, count, ENGINE_LIMITS[name].default) for name, count in needs.items() if count],
    )
    print_table(("positions from", "keys and values in the prefix cache"), _cache(resolved.segments, prompt_tokens))


def _cache(segments: Any, prompt_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield the first position of each stretch whose blocks are shared with the same requests, and with which."""
    last: Any = ()
    for segment in segments:
        if segment.kv_digest != last:
            last = segment.kv_digest
            where = f"{segment.start}{'' if segment.start < prompt_tokens else ' (generated)'}"
            shared = "as without steering" if last is None else f"shared with equal edits ({last.hex()[:12]})"
            yield where, shared
