# SPDX-License-Identifier: Apache-2.0
"""Text output of ``vllm-steer doctor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from vllm_steer.cli.output import printable

if TYPE_CHECKING:
    from vllm_steer.engine.report import CapabilityReport, PointReport, ProofReport

Print = Callable[..., None]


def print_report(report: CapabilityReport) -> None:
    """Print a report."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{printable(report.architecture or 'unknown architecture')} on vLLM {report.vllm}")
    if not report.vllm_is_tested:
        console.print(f"vLLM {report.vllm} is not tested; tested are {report.vllm_tested}")
        console.print(printable(report.vllm_check or ""))
    if not report.examined:
        console.print(f"cannot be examined on this machine, since vLLM refuses it: {printable(report.problem or '')}")
        console.print(
            "run doctor where the model is to be served; many models with sparse or linear attention need a GPU"
        )
        console.print(_proofs_text(report))
        return
    if report.problem is not None:
        console.print(f"cannot be steered: {printable(report.problem)}")
        return
    console.print(f"{report.num_layers} layers, hidden size {report.hidden_size}, {report.dtype}\n")
    console.print(_points_table(report))
    for point in report.points:
        _print_restrictions(point, console.print)
    console.print("\nnames in other libraries")
    for point in report.points:
        for library, name in point.names_elsewhere.items():
            console.print(f"{point.name}: {name} ({library})")
    console.print("\nrecipes")
    for recipe in report.recipes:
        before = recipe.post_attn_in_front_of
        mid = f"post_attn before {before}" if before else "no post_attn"
        console.print(f"{recipe.layer_class}: {len(recipe.layers)} layers, stream {recipe.stream}, {mid}")
    for reason in report.unproven:
        console.print(f"unproven: {reason}")
    console.print(_proofs_text(report))
    console.print("\nvLLM settings that conflict with steering")
    for conflict in report.conflicts:
        console.print(f"{conflict.setting}: {conflict.reason}" + (" (set here)" if conflict.present else ""))
    total = sum(report.table_bytes.values()) / 2**20
    limits = ", ".join(f"{name} {value}" for name, value in report.limits.items())
    console.print(f"\ntables: {total:.1f} MiB on each rank, with {limits}")
    largest = sorted(report.table_bytes.items(), key=lambda item: -item[1])[:3]
    console.print("largest: " + ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in largest))


def print_proof(proof: Mapping[str, Any]) -> None:
    """Print the result of ``--prove``."""
    if "no_reference" in proof:
        typer.echo(f"HF Transformers cannot build this model: {printable(proof['no_reference'])}")
    typer.echo(f"\nproof of the shrunk model: {proof['kind']}")
    typer.echo(f"conclusive steps between points: {proof['conclusive']} of {proof['hops']}")
    for name, what in (("value_error", "rows of a plain request"), ("cause_error", "rows after an edit")):
        if proof[name] is not None:
            typer.echo(f"{what}: largest relative error {proof[name]:.1e}")
    typer.echo("agrees" if proof["agrees"] else "DOES NOT AGREE")


def _points_table(report: CapabilityReport) -> Any:
    from rich.table import Table

    table = Table("point", "value", "edits", "reads", box=None, pad_edge=False)
    for point in report.points:
        values = ("yes" if supported else "no" for supported in (point.edits, point.reads))
        table.add_row(point.name, point.value, *(("off", "off") if _is_off(point) else values))
    return table


def _is_off(point: PointReport) -> bool:
    return not point.on and not point.refused


def _print_restrictions(point: PointReport, write: Print) -> None:
    if _is_off(point):
        write(f"{point.name} is off; enable it with {point.switched_on_by}")
    for verb, refused in (("edited", point.refused), ("read", point.unread)):
        layers_by_reason: dict[str, int] = {}
        for reason in refused.values():
            layers_by_reason[reason] = layers_by_reason.get(reason, 0) + 1
        for reason, count in layers_by_reason.items():
            write(f"{point.name} cannot be {verb} on {count} layers: {printable(reason)}")


def _proofs_text(report: CapabilityReport) -> str:
    return "proof: " + ("; ".join(map(_proof_text, report.proofs)) or "none recorded")


def _proof_text(proof: ProofReport) -> str:
    errors = [("rows", proof.value_error), ("log-probabilities", proof.cause_error)]
    figures = [f"{what} within {error:.1e}" for what, error in errors if error is not None]
    return f"{proof.kind} on {proof.architecture} ({', '.join([*figures, proof.dtype, f'vLLM {proof.vllm}'])})"
