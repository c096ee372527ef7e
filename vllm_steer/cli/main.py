# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-steer`` command. vLLM is imported only by the commands that need it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_steer.cli import captures, chat, keys, lab, modules, probe
from vllm_steer.cli.engine import ENGINE_CONTEXT
from vllm_steer.cli.explain import explain
from vllm_steer.cli.fuzz import fuzz
from vllm_steer.cli.output import fail, group
from vllm_steer.cli.patch import patch
from vllm_steer.errors import IncompatibleError
from vllm_steer.limits import ENGINE_LIMITS

app = group("Activation steering and capture for vLLM.")
app.add_typer(captures.app, name="captures")
app.command()(modules.convert)
app.command()(explain)
app.command()(fuzz)
app.command(context_settings=ENGINE_CONTEXT)(patch)
app.command(context_settings=ENGINE_CONTEXT)(lab.make)
app.command(context_settings=ENGINE_CONTEXT)(lab.dose)
app.command(context_settings=ENGINE_CONTEXT)(lab.harvest)
app.add_typer(probe.app, name="probe")
app.add_typer(modules.app, name="modules")
app.add_typer(keys.app, name="keys")
app.command(name="set")(modules.set_steering)
app.command()(modules.status)
app.command()(chat.chat)


@app.command(
    add_help_option=False,  # vLLM's own --help is shown
    context_settings=ENGINE_CONTEXT,
    options_metavar="MODEL ...",
)
def serve(context: typer.Context) -> None:
    """Serve a model with steering; takes the arguments of vllm serve."""
    from vllm_steer.cli.engine import run

    run(context.args)


def _same(flag: str, **options: Any) -> Any:
    return typer.Option(help=f"Same as {flag} of the server.", **options)


@app.command()
def doctor(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A local model folder, or its config.json.")],
    prove: Annotated[bool, typer.Option(help="Also compare a shrunk copy of the model with HF Transformers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    allow_unproven: Annotated[bool, _same("--steering-allow-unproven")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    points: Annotated[str | None, _same("--steering-points")] = None,
    max_rows: Annotated[int | None, _same("--steering-max-rows")] = None,
    max_vectors: Annotated[int | None, _same("--steering-max-vectors")] = None,
    max_instructions: Annotated[int | None, _same("--steering-max-instructions")] = None,
    max_matrix_rows: Annotated[int | None, _same("--steering-max-matrix-rows")] = None,
    max_conditions: Annotated[int | None, _same("--steering-max-conditions")] = None,
    record_columns: Annotated[int | None, _same("--steering-record-columns")] = None,
    max_segments: Annotated[int | None, _same("--steering-max-segments")] = None,
    capture_rows: Annotated[int | None, _same("--steering-capture-rows")] = None,
    capture_mib: Annotated[int | None, _same("--steering-capture-mib")] = None,
    sae: Annotated[list[str] | None, _same("--steering-sae", metavar="NAME=FOLDER")] = None,
    sae_any_site: Annotated[bool, _same("--steering-sae-any-site")] = False,
    module: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Also show the lengths of the stream that a module's file has; repeatable."),
    ] = None,
    max_num_batched_tokens: Annotated[int | None, _same("--max-num-batched-tokens")] = None,
    max_num_seqs: Annotated[int | None, _same("--max-num-seqs")] = None,
) -> None:
    """Report what a model supports, refuses and costs, from its configuration alone."""
    from vllm_steer.cli.doctor import run

    limits = {name: context.params[name] for name in ENGINE_LIMITS if name in context.params}
    for option, value in (("--max-num-batched-tokens", max_num_batched_tokens), ("--max-num-seqs", max_num_seqs)):
        if value is not None and value < 1:
            raise typer.BadParameter(f"must be at least 1, not {value}", param_hint=option)
    batch = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    settings = {
        "saes": _named_folders(sae or ()),
        "sae_any_site": sae_any_site,
        "allow_unproven": allow_unproven,
        "points": points.split(",") if points else [],
    }
    run(
        model,
        {**settings, **_given(limits)},
        {"trust_remote_code": trust_remote_code, **_given(batch)},
        as_json=as_json,
        with_proof=prove,
        modules=module or (),
    )


def _named_folders(texts: Iterable[str]) -> dict[str, str]:
    """Return the folders of ``--sae`` by name."""
    folders: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not folder:  # an empty path is the present folder
            raise typer.BadParameter(f"must be NAME=FOLDER, not {text!r}", param_hint="--sae")
        if name in folders:
            raise typer.BadParameter(f"the name {name!r} is given twice", param_hint="--sae")
        folders[name] = folder
    return folders


def _given(options: dict[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def version() -> None:
    """Print the versions of vllm-steer and vLLM, and the tested vLLM versions.

    Exits with status 1 if engines with steering do not start with this vLLM.
    """
    from vllm_steer._version import __version__
    from vllm_steer.compat.internals import NOT_INSTALLED
    from vllm_steer.compat.version import TESTED_RANGE, check_version, compare_installed, is_tested

    typer.echo(f"vllm-steer {__version__}")
    try:
        from vllm import __version__ as vllm_version
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
        raise fail(NOT_INSTALLED if missing else f"vLLM cannot be imported: {error}") from None
    typer.echo(f"vLLM {vllm_version}" + ("" if is_tested(vllm_version) else " (not tested)"))
    if not is_tested(vllm_version):
        typer.echo(str(compare_installed(vllm_version)))
    typer.echo(f"tested with vLLM {TESTED_RANGE}")
    try:
        check_version(vllm_version)
    except IncompatibleError as error:
        raise fail(error) from None


if __name__ == "__main__":
    app(prog_name="vllm-steer")
