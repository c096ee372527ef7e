# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer``: nothing of vLLM is loaded before a command needs it."""

from __future__ import annotations

import typer

from vllm_steer.cli import captures

app = typer.Typer(
    help="Activation steering and capture for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(captures.app, name="captures")


@app.command(
    add_help_option=False,  # vLLM's
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="MODEL ...",
)
def serve(context: typer.Context) -> None:
    """Serve a model with steering; all arguments are those of vllm serve."""
    from vllm_steer.cli.serve import run

    run(context.args)


@app.command()
def version() -> None:
    """Print the versions of vllm-steer and vLLM, and which vLLM it is tested with."""
    from vllm_steer._version import __version__
    from vllm_steer.compat import TESTED_RANGE, is_tested

    typer.echo(f"vllm-steer {__version__}")
    try:
        from vllm import __version__ as vllm_version
    except ImportError as error:
        typer.echo(f"vLLM cannot be imported: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"vLLM {vllm_version}" + ("" if is_tested(vllm_version) else " (not tested)"))
    typer.echo(f"tested with vLLM {TESTED_RANGE}")


if __name__ == "__main__":
    app(prog_name="vllm-steer")
