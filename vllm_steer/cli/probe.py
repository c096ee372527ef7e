# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer probe``: train a probe on labelled texts, check a probe on others, and compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_steer.cli.engine import ENGINE_CONTEXT, start_engine
from vllm_steer.cli.lab import MODEL_HELP, Layers, Model, Point, Pool, Positions, Seed, read_collection
from vllm_steer.cli.output import check_outputs, failing_on, group, print_table, warning_last
from vllm_steer.errors import SteeringError

app = group("Train probes on labelled texts, and check them on others.")
_Examples = Annotated[Path, typer.Argument(metavar="EXAMPLES", help="JSON lines of labelled texts, or of pairs.")]


_FalsePositives = Annotated[
    float | None,
    typer.Option(help="Write the threshold with this share of false positives on these texts into the file."),
]


@app.command(context_settings=ENGINE_CONTEXT)
@warning_last()
def train(
    context: typer.Context,
    examples: _Examples,
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Instead of a model: folder of a harvest of the same examples.")
    ] = None,
    method: Annotated[str, typer.Option(help="logistic, ridge, mean or mlp.")] = "logistic",
    layers: Layers = "all",
    point: Point = "post_block",
    positions: Positions = None,
    pool: Pool = "mean",
    false_positives: _FalsePositives = None,
    seed: Seed = 0,
) -> None:
    """Train a probe, write it as a module, and print whether it separates unseen texts.

    A third of the texts is held out. On a CPU, compiling the model takes minutes: add --enforce-eager.
    """
    check_outputs(out)
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.methods import read_probe_method
        from vllm_steer.lab.probe_result import check_rate
        from vllm_steer.lab.probe_texts import split_texts
        from vllm_steer.lab.probes import train_probe

        # Before the model is loaded, which takes long.
        if out.suffix != ".safetensors":
            raise SteeringError("out", f"{out} has an unknown suffix; use .safetensors")
        if (model is None) == (rows is None):
            raise SteeringError("model", "give --model, or --rows with the folder of a harvest")
        if rows is not None and context.args:
            raise SteeringError("rows", f"{' '.join(context.args)} is not an option of stored rows; see --help")
        given = read_collection(layers, positions, pool) | {"method": read_probe_method(method, pool)}
        read = read_examples(examples)
        texts, held_out = split_texts(read, seed)
        if false_positives is not None:
            check_rate(false_positives, texts.labels[held_out])
        engine = rows if model is None else start_engine(model, context.args, "probe train")
        found = train_probe(engine, read, point=point, seed=seed, use_tqdm=True, **given)
        found.save(out)
        columns = ("layer", "AUROC on unseen training texts")
        print_table(columns, ((layer, f"{value:.3f}") for layer, value in found.aurocs.items()))
        typer.echo(found.result.verdict)
        typer.echo(found.result.recalls)
        typer.echo(f'{out}: the probe "probe" at {found.point} of layer {found.layer}')
        if false_positives is not None:
            typer.echo(f"{out}: {found.result.store_threshold(out, false_positives)}")


@app.command(context_settings=ENGINE_CONTEXT)
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of a module with a probe.")],
    examples: _Examples,
    model: Model,
    new: Annotated[Path | None, typer.Option(help="Compare with the probe of this file on the same texts.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the probe, if the file has several.")] = None,
    false_positives: _FalsePositives = None,
    seed: Seed = 0,
) -> None:
    """Score other labelled texts with a probe, as the engine serves it, and print whether it is better than chance.

    Exits with status 1 if it is not, or if the threshold of its file is stale. With --new, exits with status 1 unless
    the new probe passes.
    """
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.probe_result import check_rate, read_probe
        from vllm_steer.lab.probe_texts import read_unseen
        from vllm_steer.lab.probes import check_probe, compare_probes

        read = read_examples(examples)  # before the model is loaded, which takes long
        for path in (file, *([] if new is None else [new])):
            unseen = read_unseen(read, path, read_probe(path, name)[2].provenance)
        if false_positives is not None:
            check_rate(false_positives, unseen.labels)
            if new is not None:
                raise SteeringError("false_positives", "cannot be combined with --new; check one file to write it")
        engine = start_engine(model, context.args, "probe check")
        if new is not None:
            compared = compare_probes(engine, file, new, read, name=name, seed=seed, use_tqdm=True)
            typer.echo(compared.verdict)
            for path, each in ((file, compared.old), (new, compared.new)):
                typer.echo(f"{path}: {each.recalls}")
            raise typer.Exit(int(compared.state != "PASS"))
        result = check_probe(engine, file, read, name=name, seed=seed, use_tqdm=True)
        typer.echo(result.verdict)
        typer.echo(result.recalls)
        if result.stored is not None:
            typer.echo(result.threshold_verdict)
        if false_positives is not None:
            typer.echo(f"{file}: {result.store_threshold(file, false_positives, name)}")
        elif result.threshold_state == "stale":
            raise typer.Exit(1)
    if not result.better_than_chance:
        raise typer.Exit(1)
