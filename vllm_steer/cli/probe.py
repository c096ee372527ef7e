# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer probe``: train a linear probe on labelled texts, and check a probe on others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli.engine import ENGINE_CONTEXT, start_engine
from vllm_steer.cli.lab import Layers, Model, Point, Pool, Positions, Seed, read_collection
from vllm_steer.cli.output import check_output, failing_on, group, print_table
from vllm_steer.errors import SteeringError

app = group("Train probes on labelled texts, and check them on others.")
_Examples = Annotated[Path, typer.Argument(metavar="EXAMPLES", help="JSON lines of labelled texts, or of pairs.")]


@app.command(context_settings=ENGINE_CONTEXT)
def train(
    context: typer.Context,
    examples: _Examples,
    model: Model,
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    layers: Layers = "all",
    point: Point = "post_block",
    positions: Positions = None,
    pool: Pool = "mean",
    seed: Seed = 0,
) -> None:
    """Train a linear probe, write it as a module, and print whether it separates unseen texts.

    A third of the texts is held out. On a CPU, compiling the model takes minutes: add --enforce-eager.
    """
    check_output(out)
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.methods import logistic_regression
        from vllm_steer.lab.probe_texts import split_texts
        from vllm_steer.lab.probes import train_probe

        # Before the model is loaded, which takes long.
        if out.suffix != ".safetensors":
            raise SteeringError("out", f"{out} has an unknown suffix; use .safetensors")
        logistic_regression()
        read = read_examples(examples)
        split_texts(read, seed)
        given = read_collection(layers, positions, pool)
        engine = start_engine(model, context.args, "probe train")
        found = train_probe(engine, read, point=point, seed=seed, use_tqdm=True, **given)
        found.save(out)
    columns = ("layer", "AUROC on unseen training texts")
    print_table(columns, ((layer, f"{value:.3f}") for layer, value in found.aurocs.items()))
    typer.echo(found.result.verdict)
    typer.echo(f'{out}: the probe "probe" at {found.point} of layer {found.layer}')


@app.command(context_settings=ENGINE_CONTEXT)
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of a module with a probe.")],
    examples: _Examples,
    model: Model,
    name: Annotated[str | None, typer.Option(help="Name of the probe, if the file has several.")] = None,
    seed: Seed = 0,
) -> None:
    """Score other labelled texts with a probe, as the engine serves it, and print whether it is better than chance.

    Exits with status 1 if it is not.
    """
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.probe_texts import read_unseen
        from vllm_steer.lab.probes import check_probe, read_probe

        read = read_examples(examples)  # before the model is loaded, which takes long
        read_unseen(read, read_probe(file, name)[1].provenance)
        engine = start_engine(model, context.args, "probe check")
        result = check_probe(engine, file, read, name=name, seed=seed, use_tqdm=True)
    typer.echo(result.verdict)
    if not result.better_than_chance:
        raise typer.Exit(1)
