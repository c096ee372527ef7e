# SPDX-License-Identifier: Apache-2.0
"""``vllm-steer make``, ``dose`` and ``harvest``: directions from examples, what they do, and rows of many texts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_steer.cli.engine import start_engine, start_engines
from vllm_steer.cli.output import check_image, check_outputs, failing_on, print_table, warning_last
from vllm_steer.errors import SteeringError

MODEL_HELP = "The model, a name or a folder. Options of vLLM's engine may follow."
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
Layers = Annotated[str, typer.Option(help='Layers such as 12, "8,12", 8:24 or 8:24:4; or all. Layers count from 0.')]
Point = Annotated[str, typer.Option(help="Hook point.")]
Positions = Annotated[
    str | None,
    typer.Option(
        help='Tokens of each text, such as last_prompt, assistant or "[0, [4, 9], -1]"; all but the first by default.'
    ),
]
Pool = Annotated[str, typer.Option(help="mean or last of the tokens' rows.")]
Ray = Annotated[bool, typer.Option("--ray", help='Run on a Ray cluster, as in the guide "Lab".')]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]


@warning_last()
def make(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="mean, pca or probe.")],
    examples: Annotated[Path, typer.Argument(metavar="EXAMPLES", help="JSON lines of pairs, or of labelled texts.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="The .safetensors or .gguf file to write.")],
    layers: Layers = "all",
    point: Point = "post_block",
    positions: Positions = None,
    pool: Pool = "mean",
    best: Annotated[bool, typer.Option("--best", help="Write only the layer with the largest AUROC.")] = False,
    seed: Seed = 0,
) -> None:
    """Make a direction at each layer from examples, and write them as a module or a control vector.

    The guide "Lab" has the form of the examples. On a CPU, compiling the model takes minutes: add --enforce-eager.
    """
    check_outputs(out)
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_examples
        from vllm_steer.lab.methods import METHODS, scikit_learn
        from vllm_steer.lab.methods import make as make_directions
        from vllm_steer.registry.vector_files import check_suffix
        from vllm_steer.request.scalars import read_choice

        # Before the model is loaded, which takes long.
        chosen, read = read_choice(method, METHODS, "method"), read_examples(examples)
        if chosen == "probe":
            scikit_learn("linear_model")
        given = read_collection(layers, positions, pool)
        check_suffix(out)
        engine = start_engine(model, context.args, "make")
        found = make_directions(engine, read, method=chosen, point=point, seed=seed, use_tqdm=True, **given)
        found.save(out, [found.best] if best else None)
    lines = ((n, f"{each.dose:.3g}", f"{each.stream:.4g}", f"{each.auroc:.3f}") for n, each in found.items())
    print_table(("layer", "dose of strength 1", "stream", "AUROC on unseen examples"), lines)
    written = f"layer {found.best}" if best else f"{len(found)} layers, all of which steer a request that uses the file"
    typer.echo(f"{out}: {written}; best layer {found.best}")


def read_collection(layers: str, positions: str | None, pool: str) -> dict[str, Any]:
    """Return the arguments that choose the rows of examples; raise SteeringError for an invalid option."""
    from vllm_steer.lab.activations import POOLS
    from vllm_steer.request.scalars import read_choice

    given = {"pool": read_choice(pool, POOLS, "pool"), "layers": read_layer_range(layers)}
    return given | read_positions(positions)


def read_positions(text: str | None) -> dict[str, Any]:
    """Return the argument of a name of positions or of a JSON list; raise SteeringError for other texts."""
    from vllm_steer.request import CaptureSpec
    from vllm_steer.request.scalars import parse_json

    if text is None:
        return {}
    positions: Any = parse_json(text, "positions") if text.lstrip().startswith("[") else text
    CaptureSpec(hooks={"post_block": [0]}, positions=positions)  # refuses what is not positions
    return {"positions": positions}


def read_layer_range(text: str) -> Any:
    """Return the layers of ``12``, ``8,12``, ``8:24``, ``8:24:4`` or ``all``; raise SteeringError for other texts."""
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


@warning_last()
def dose(
    context: typer.Context,
    vectors: Annotated[Path, typer.Argument(metavar="VECTORS", help="A file of vectors in any format.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines of at least 8 prompts, half of which are held out.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="File of JSON lines for the texts; an interrupted study goes on there.")],
    words: Annotated[str | None, typer.Option(help="Score: words that count, with commas.")] = None,
    against: Annotated[str, typer.Option(help="With --words: words that count negatively.")] = "",
    score: Annotated[
        str | None, typer.Option(help="Score: MODULE:FUNCTION of prompt and text, or a probe's file.")
    ] = None,
    doses: Annotated[str, typer.Option(help="Doses, with commas.")] = "0.1,0.2,0.3,0.5,0.7,1",
    layers: Annotated[str | None, typer.Option(help="Layers as in make; all of the file by default.")] = None,
    examples: Annotated[Path | None, typer.Option(help="The examples, for controls with shuffled labels.")] = None,
    controls: Annotated[int, typer.Option(help="Random directions.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a text.")] = 48,
    chat: Annotated[bool, typer.Option(help="Whether prompts are messages of a user.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write the verdict and all numbers to this page.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to this image.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write all texts to this Parquet file.")] = None,
    ray: Ray = False,
    seed: Seed = 0,
) -> None:
    """Measure the effect and the cost of vectors at layers and doses, beside controls, and print a verdict."""
    check_outputs(out, html, plot, parquet)
    if html is not None or plot is not None:
        check_image(plot or Path("page.png"))
    with failing_on(SteeringError):
        from vllm_steer.lab.dose_study import dose as study
        from vllm_steer.lab.examples import read_examples, read_prompts
        from vllm_steer.registry.directions import Directions

        # Before the model is loaded, which takes long.
        given: dict[str, Any] = {
            "score": _score(words, against, score), "doses": _numbers(doses), "controls": controls, "seed": seed,
            "examples": None if examples is None else read_examples(examples), "max_tokens": max_tokens, "out": out,
            "layers": None if layers is None else read_layer_range(layers),
        }  # fmt: skip
        made, read = Directions.load(vectors), read_prompts(prompts, chat=chat)
        with _started(model, context.args, "dose", ray) as llm:
            result = study(llm, made, read, use_tqdm=True, **given)
        for path, write in ((html, result.to_html), (plot, result.plot), (parquet, result.save)):
            if path is not None:
                write(path)
    columns = ("prompts", "layer", "dose", "effect", "low", "high", "perplexity", "wrong_way", "coherent")
    cells = [each for each in (*result.choice, *result.held_out) if each.kind == "vector" and each.dose > 0]
    values = ([getattr(cell, name) for name in columns] for cell in cells)
    print_table(columns, (tuple(f"{v:.3g}" if isinstance(v, float) else v for v in line) for line in values))
    typer.echo(result.verdict)


def harvest(
    context: typer.Context,
    texts: Annotated[
        Path, typer.Argument(metavar="TEXTS", help="JSON lines (.jsonl), or a file with a text per line.")
    ],
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder of the files; an interrupted harvest goes on there.")],
    layers: Layers = "all",
    point: Point = "post_block",
    positions: Positions = None,
    row_dtype: Annotated[str | None, typer.Option(help="Dtype of the rows; the model's by default.")] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="End conversations with the beginning of an answer.")
    ] = False,
    truncate: Annotated[bool, typer.Option("--truncate", help="Use the beginning of texts that are too long.")] = False,
    sample: Annotated[int | None, typer.Option(help="Draw this number of texts at random; all by default.")] = None,
    ray: Ray = False,
    seed: Seed = 0,
) -> None:
    """Write the rows of many texts to capture files, which open_captures and the command captures read."""
    with failing_on(SteeringError):
        from vllm_steer.lab.examples import read_texts
        from vllm_steer.lab.harvest import harvest as collect

        read, numbers = read_texts(texts), read_layer_range(layers)  # before the model is loaded, which takes long
        given = read_positions(positions)
        with _started(model, context.args, "harvest", ray) as llm:
            found = collect(
                llm, read, out, point=point, layers=numbers, dtype=row_dtype, answer=answer, truncate=truncate,
                sample=sample, seed=seed, use_tqdm=True, **given,
            )  # fmt: skip
    typer.echo(f"{out}: {found.rows} rows per layer of {found.stored} texts")


def _started(model: str, words: list[str], command: str, ray: bool) -> AbstractContextManager[Any]:
    engines: AbstractContextManager[Any]
    engines = start_engines(model, words, command) if ray else nullcontext(start_engine(model, words, command))
    return engines


def _score(words: str | None, against: str, function: str | None) -> Any:
    """Return the score of the options; raise SteeringError for none, two, or one that cannot be read or imported."""
    import sys
    from importlib import import_module

    from vllm_steer.lab.probe_result import read_probe, readout_of
    from vllm_steer.lab.scores import Keywords, ProbeScore

    if (words is None) == (function is None):
        raise SteeringError("score", "give --words or --score with MODULE:FUNCTION or a probe's file")
    if words is not None:
        return Keywords(*([word.strip() for word in text.split(",") if word.strip()] for text in (words, against)))
    if Path(str(function)).is_file():
        _, probe, metadata, _ = read_probe(str(function))
        return ProbeScore(readout_of(probe), metadata.model)
    module, _, name = str(function).partition(":")
    sys.path.insert(0, "")  # the present folder, as for a script
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SteeringError("score", f"{function} cannot be imported: {error}; give MODULE:FUNCTION") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SteeringError("doses", f"{text!r} is not a list of numbers such as 0.1,0.2") from None
