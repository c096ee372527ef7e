# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer make``: directions from examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_steer.cli.engine import start_engine
from vllm_steer.cli.output import check_output, failing_on, print_table

Model = Annotated[str, typer.Option(help="The model, a name or a folder. Options of vLLM's engine may follow.")]
Layers = Annotated[str, typer.Option(help='Layers such as 12, "8,12", 8:24 or 8:24:4; or all. Layers count from 0.')]
Point = Annotated[str, typer.Option(help="Hook point.")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]


def make(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="mean, pca or probe.")],
    examples: Annotated[Path, typer.Argument(metavar="EXAMPLES", help="JSON lines of pairs, or of labelled texts.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="The .safetensors or .gguf file to write.")],
    layers: Layers = "all",
    point: Point = "post_block",
    positions: Annotated[
        str | None, typer.Option(help="Tokens of each text, such as assistant; all but the first by default.")
    ] = None,
    pool: Annotated[str, typer.Option(help="mean or last of the tokens' rows.")] = "mean",
    best: Annotated[
        bool, typer.Option("--best", help="Write only the layer that separates unseen examples best.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Make a direction at each layer from examples, and write them as a module or a control vector.

    The guide "Lab" has the form of the examples. On a CPU, compiling the model takes minutes: add --enforce-eager.
    """
    from vllm_steer.errors import SteeringError

    check_output(out)
    with failing_on(SteeringError):
        from vllm_steer.lab.activations import POOLS
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.methods import METHODS
        from vllm_steer.request.scalars import read_choice

        # Before the model is loaded, which takes long.
        chosen, read = read_choice(method, METHODS, "method"), read_examples(examples)
        given: dict[str, Any] = {"pool": read_choice(pool, POOLS, "pool")}
        numbers = read_layer_range(layers)
        if out.suffix not in (".safetensors", ".gguf"):
            raise SteeringError("out", f"{out} has an unknown suffix; use .safetensors or .gguf")
        from vllm_steer.lab.methods import make as make_directions

        if positions is not None:
            given["positions"] = positions
        found = make_directions(
            start_engine(model, context.args, "make"), read, method=chosen, layers=numbers, point=point,
            seed=seed, use_tqdm=True, **given,
        )  # fmt: skip
        found.save(out, [found.best] if best else None)
    lines = ((n, f"{each.dose:.3g}", f"{each.stream:.4g}", f"{each.auroc:.3f}") for n, each in found.items())
    print_table(("layer", "dose of strength 1", "stream", "AUROC on unseen examples"), lines)
    written = f"layer {found.best}" if best else f"{len(found)} layers, all of which steer a request that uses the file"
    typer.echo(f"{out}: {written}; best layer {found.best}")


def read_layer_range(text: str) -> Any:
    """Return the layers of ``12``, ``8,12``, ``8:24``, ``8:24:4`` or ``all``; raise SteeringError for other texts."""
    from vllm_steer.errors import SteeringError
    from vllm_steer.request.sites import read_layers

    if text == "all":
        return text
    try:
        numbers = [int(part) for part in text.split(":")] if ":" in text else [int(part) for part in text.split(",")]
        return read_layers(range(*numbers) if ":" in text else numbers, "layers")
    except SteeringError:
        raise
    except (ValueError, TypeError):
        raise SteeringError("layers", f"{text!r} is not 12, 8,12, 8:24, 8:24:4 or all") from None
