# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-steer`` command. vLLM is imported only by the commands that need it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli import captures, chat, keys, modules, steering
from vllm_steer.cli.fuzz import fuzz
from vllm_steer.cli.output import fail
from vllm_steer.cli.patch import patch

app = typer.Typer(
    help="Activation steering and capture for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(captures.app, name="captures")
app.command()(fuzz)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(patch)
app.add_typer(modules.app, name="modules")
app.add_typer(keys.app, name="keys")
app.command(name="set")(steering.set_steering)
app.command()(steering.status)
app.command()(chat.chat)


@app.command(
    add_help_option=False,  # vLLM's own --help is shown
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="MODEL ...",
)
def serve(context: typer.Context) -> None:
    """Serve a model with steering; takes the arguments of vllm serve."""
    from vllm_steer.cli.serve import run

    run(context.args)


@app.command()
def doctor(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A local model folder, or its config.json.")],
    prove: Annotated[bool, typer.Option(help="Also compare a shrunk copy of the model with HF Transformers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    allow_unproven: Annotated[bool, typer.Option(help="Same as --steering-allow-unproven of the server.")] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    points: Annotated[str | None, typer.Option(help="Same as --steering-points of the server.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Same as --steering-max-rows of the server.")] = None,
    max_vectors: Annotated[int | None, typer.Option(help="Same as --steering-max-vectors of the server.")] = None,
    max_instructions: Annotated[
        int | None, typer.Option(help="Same as --steering-max-instructions of the server.")
    ] = None,
    max_matrix_rows: Annotated[
        int | None, typer.Option(help="Same as --steering-max-matrix-rows of the server.")
    ] = None,
    max_conditions: Annotated[int | None, typer.Option(help="Same as --steering-max-conditions of the server.")] = None,
    record_columns: Annotated[int | None, typer.Option(help="Same as --steering-record-columns of the server.")] = None,
    max_segments: Annotated[int | None, typer.Option(help="Same as --steering-max-segments of the server.")] = None,
    capture_rows: Annotated[int | None, typer.Option(help="Same as --steering-capture-rows of the server.")] = None,
    capture_mib: Annotated[int | None, typer.Option(help="Same as --steering-capture-mib of the server.")] = None,
    sae: Annotated[
        list[str] | None, typer.Option(help="Same as --steering-sae of the server.", metavar="NAME=FOLDER")
    ] = None,
    sae_any_site: Annotated[bool, typer.Option(help="Same as --steering-sae-any-site of the server.")] = False,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Same as --max-num-batched-tokens of the server.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Same as --max-num-seqs of the server.")] = None,
) -> None:
    """Report what a model supports, refuses and costs, from its configuration alone."""
    from vllm_steer.cli.doctor import run

    limits = {
        "max_rows": max_rows,
        "max_vectors": max_vectors,
        "max_instructions": max_instructions,
        "max_matrix_rows": max_matrix_rows,
        "max_conditions": max_conditions,
        "record_columns": record_columns,
        "max_segments": max_segments,
        "capture_rows": capture_rows,
        "capture_mib": capture_mib,
    }
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
    from vllm_steer.errors import IncompatibleError

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
