# SPDX-License-Identifier: Apache-2.0
"""Generated sections of docs/peers: what is refused, with the sentence that the code raises, and times."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from measured import machine_of
from pages import ROOT, load_result, table

from vllm_steer.errors import SteeringError
from vllm_steer.peers.refusals import (
    ARGUMENT,
    CLIENT,
    CLIENT_ARGUMENT,
    GENERATING,
    LLM,
    LOADING,
    MODEL,
    MODULE_FIELD,
    NAME,
)
from vllm_steer.peers.refusals import REFUSALS as REFUSED_NAMES
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS, problem_of

REFERENCE = "HF Transformers"
TASKS = {
    "activations": "*Activations*: the output of each layer at all tokens of {prompts} prompts of {length} tokens",
    "grid": "*Grid*: {grid_length} positions of each layer patched with rows of another prompt, and the "
    "log-probabilities of the next token",
    "steered": "*Steered*: {new_tokens} generated tokens of {steered} prompts, each with its own vector at one layer, "
    "and the output of another layer at all tokens",
    "doses": "*Doses*: {new_tokens} generated tokens of {dosed} prompts with {doses} doses of one vector at one layer "
    "and all tokens",
}
"""Description of the tasks of ``benchmarks/peers.py`` by name."""


class Refusal(NamedTuple):
    """An input that is refused."""

    shown: str
    """Code or JSON, as on the page."""
    call: Callable[[], Any]


def _named(page: str, calls: Mapping[str, Callable[[str], Any]]) -> list[Refusal]:
    """Return the refused names of a page, with the call that raises the error of a name by place."""
    places = REFUSED_NAMES[page]
    return [Refusal(place.format(name), partial(call, name)) for place, call in calls.items() for name in places[place]]


def _lens(**keys: Any) -> Callable[[], Any]:
    from vllm_steer.peers.vllm_lens.keys import read_keys

    return lambda: read_keys(keys, "extra_args")


def _lora() -> Any:
    from vllm_steer.peers.vllm_lens.keys import read_adapter

    return read_adapter({"lora_name": "a", "lora_path": "/adapters/a"})


def vllm_lens() -> list[Refusal]:
    import vllm_steer.peers.vllm_lens as package

    client, llm = package.VLLMLensClient(model="m"), package.LLM.__new__(package.LLM)
    vector = {"activations": [[[1.0]]], "layer_indices": [1]}
    matched, twice = {**vector, "norm_match": True}, {"activations": [[1.0], [1.0]], "layer_indices": [1, 1]}
    return [
        Refusal("`output_qk: true`", _lens(output_qk=True)),
        Refusal("`apply_hooks`, and the routes `/v1/hooks/*`", _lens(apply_hooks=["..."])),
        Refusal("`output_residual_stream: 3`", _lens(output_residual_stream=3)),
        Refusal("`activations_transport: shm`", _lens(activations_transport="shm")),
        Refusal("`position_indices: [-1]`", _lens(apply_steering_vectors=[{**vector, "position_indices": [-1]}])),
        Refusal(
            "`position_indices` with 2-D `activations`",
            _lens(apply_steering_vectors=[{**vector, "activations": [[1.0]], "position_indices": [1]}]),
        ),
        Refusal("`layer_indices: [1, 1]`", _lens(apply_steering_vectors=[twice])),
        Refusal(
            "two vectors with `norm_match` at one layer and token", _lens(apply_steering_vectors=[matched, matched])
        ),
        Refusal("`lora_request` with `lora_path` (HTTP)", _lora),
        *_named(
            "vllm-lens",
            {
                NAME: partial(getattr, package),
                LLM: partial(getattr, llm),
                CLIENT: partial(getattr, client),
                CLIENT_ARGUMENT: lambda name: client.generate("one", **{name: [1]}),
            },
        ),
    ]


def inspect() -> list[Refusal]:
    from vllm_steer.peers.inspect.fields import prepare

    def given(**body: Any) -> Callable[[], Any]:
        return lambda: prepare(body)

    return [
        Refusal("`extra_args: {apply_hooks}`", given(extra_args={"apply_hooks": ["..."]})),
        Refusal("`extra_args: {output_qk}`", given(extra_args={"output_qk": True})),
        Refusal("`output_residual_stream` beside `extra_args`", given(output_residual_stream=[1])),
        Refusal("`steering_name`", given(steering_name="calm")),
        Refusal("`steering` in `extra_args` and beside it", given(extra_args={"steering": []}, steering=[])),
        Refusal("`lora_request` with `lora_path`", given(lora_request={"lora_path": "/adapters/a"})),
    ]


def probe_hook() -> list[Refusal]:
    from vllm_steer.params import SamplingParams
    from vllm_steer.peers.probe_hook.options import ProbeOptions, check_global_steering, last_prompt
    from vllm_steer.registry.index import RegistryLimits
    from vllm_steer.registry.module import parse_module
    from vllm_steer.registry.snapshot import Snapshot

    flags = {
        "include_prefill": False, "include_decode": True, "last_prefill_token": False, "last_decode_token": False,
        "include_last": False,
    }  # fmt: skip
    steered = {"post_block": {1: [1.0]}}
    steered_decode = Snapshot().with_steering((), parse_module({"decode": steered}), RegistryLimits())
    plain, last = ProbeOptions.read([1], **flags), ProbeOptions.read([1], **flags | {"include_last": True})

    class Output:
        multi_modal_placeholders = (1,)

    return [
        Refusal("`layers=3`", lambda: ProbeOptions.read(3, **flags)),
        Refusal(
            "`include_decode=False` without `include_prefill`",
            lambda: ProbeOptions.read([1], **flags | {"include_decode": False}),
        ),
        Refusal("steering without the capture (`LLM`)", lambda: plain.params(SamplingParams(steering_vectors=steered))),
        Refusal(
            "`include_last` with steering",
            lambda: last.params(SamplingParams(steering_vectors=steered, capture=plain.capture())),
        ),
        Refusal(
            "`include_last` with global steering of generated tokens", lambda: check_global_steering(steered_decode)
        ),
        Refusal("`include_last` with images", lambda: last_prompt(Output(), [], 1)),
        Refusal("steering or captures (`AsyncLLM`)", lambda: plain.unsteered(SamplingParams(steering_vectors=steered))),
    ]


def nnterp() -> list[Refusal]:
    import vllm_steer.peers.nnterp as package

    bare = package.StandardizedTransformer.__new__(package.StandardizedTransformer)
    bare._tracer = None
    traces = {"model.trace(..., scan=True)": lambda: bare.trace("one", scan=True).__enter__()}
    return [
        *_named("nnterp", {MODEL: partial(getattr, bare), NAME: partial(getattr, package)}),
        Refusal("`model.steer(..., batch_index=0)`", lambda: bare.steer(1, None, batch_index=0)),
        *(Refusal(f"`{name}`", call) for name, call in traces.items()),
    ]


def transformer_lens() -> list[Refusal]:
    from types import SimpleNamespace

    from vllm_steer.peers.transformer_lens import HookedTransformer, SteeringDriver, get_act_name

    model = HookedTransformer.__new__(HookedTransformer)
    driver = SteeringDriver.__new__(SteeringDriver)
    name = "blocks.1.hook_resid_post"
    driver.supported_hook_points = frozenset({name})
    driver._model = SimpleNamespace(cfg=SimpleNamespace(d_model=2))

    def forward(**arguments: Any) -> Callable[[], Any]:
        return lambda: driver.forward([[1, 2]], **arguments)

    return [
        *_named("transformer-lens", {MODEL: partial(getattr, model)}),
        Refusal("`get_act_name('q', 1)`", lambda: get_act_name("q", 1)),
        Refusal("`get_act_name('pattern', 1)`", lambda: get_act_name("pattern", 1)),
        Refusal("`return_type='loss'`", lambda: model._run([], "loss", (), None)),
        *_named(
            "transformer-lens",
            {
                ARGUMENT: lambda name: model.run_with_cache("one", **{name: 1}),
                GENERATING: lambda name: model.generate("one", **{name: 1}),
                LOADING: lambda name: model.from_pretrained("m", **{name: 1}),
            },
        ),
        Refusal("`intervene={name: function}` (driver)", forward(intervene={name: print})),
        Refusal("`attention_mask` with zeros (driver)", forward(attention_mask=[[0, 1]])),
        Refusal("`past_key_values` (driver)", forward(past_key_values=1)),
    ]


def rhizonymph() -> list[Refusal]:
    from vllm_steer.params import compile_fields
    from vllm_steer.peers.rhizonymph.fields import translate_fields
    from vllm_steer.peers.rhizonymph.http import DYNAMIC_PROBLEM, rename_vectors

    def given(**fields: Any) -> Callable[[], Any]:
        return lambda: translate_fields(fields)

    def raise_dynamic() -> None:
        raise DYNAMIC_PROBLEM

    source = {"hook": "post_block", "layer": 1, "vector": [1.0]}
    apply = {"kind": "add", "steer": source}
    site = {"layer": 1, "hook": "post_block", "dest_position": 2}
    latch = {
        "when": {"kind": "probe", "probe": source, "threshold": 0.5, "sharpness": 2.0},
        "scope": "rest_of_request",
        "apply": apply,
    }
    own = {"kind": "add", "point": "post_block", "layers": 1, "vector": [1.0]}
    ranges = {"memory": {"hooks": {"post_block": {"ranges": [[0, 2]]}}}}
    return [
        Refusal("`scope: rest_of_conversation`", given(steering=[{"scope": "rest_of_conversation", "apply": apply}])),
        Refusal("`conversation_id`", given(conversation_id="a")),
        Refusal("`apply: {kind: attenuate}`", given(steering=[{"apply": {"kind": "attenuate"}}])),
        Refusal("`sharpness` with `rest_of_request`", lambda: compile_fields(translate_fields({"steering": [latch]}))),
        Refusal("gates and edits in one list", given(steering=[{"apply": apply}, own])),
        Refusal("`steer: calm`", given(steering=[{"apply": {"kind": "add", "steer": "calm"}}])),
        Refusal("`source_run`", given(patch=[{**site, "source_run": "a"}])),
        Refusal("`source_module`", given(patch=[{**site, "source_module": "a"}])),
        Refusal("`mask` of a patch site", given(patch=[{**site, "mask": {"indices": [1]}}])),
        Refusal("`source_inline` without its row", given(patch=[{**site, "source_inline": 0}])),
        Refusal(
            "`steer: {kind: name}`",
            given(steering=[{"apply": {"kind": "add", "steer": {"kind": "name", "name": "a"}}}]),
        ),
        *(
            each
            for each in _named(
                "rhizonymph",
                {
                    NAME: lambda name: translate_fields({name: {}}),
                    MODULE_FIELD: lambda name: rename_vectors({name: {}}),
                },
            )
            if each.shown != "`conversation_id`"
        ),
        Refusal("`hooks` with `ranges`", given(capture=ranges)),
        Refusal("`capture_wait: false`", given(capture_wait=False)),
        Refusal("`/v1/steering/dynamic`", raise_dynamic),
    ]


REFUSALS: Mapping[str, Callable[[], list[Refusal]]] = {
    "vllm-lens": vllm_lens,
    "inspect": inspect,
    "vllm-probe-hook": probe_hook,
    "nnterp": nnterp,
    "transformer-lens": transformer_lens,
    "rhizonymph": rhizonymph,
}
"""Inputs that the last section of each page lists."""
PEERS = {
    "vllm-lens": "vllm-lens", "vllm-probe-hook": "vllm-probe-hook", "nnterp": "nnterp",
    "transformer-lens": "TransformerLens", "rhizonymph": "RhizoNymph/vllm", "inspect": "Inspect AI",
}  # fmt: skip
"""Name in ``benchmarks/results/peers.json`` by page."""


def sentence(refusal: Refusal) -> str:
    """Return the error of a refused input.

    Raises:
        ValueError: The input is accepted.
    """
    try:
        refusal.call()
    except SteeringError as error:
        return str(error)
    raise ValueError(f"{refusal.shown} is not refused")


def refused(page: str) -> Callable[[], str]:
    """Return the function that makes a page's table of refusals."""
    return lambda: table(("input", "error"), [(each.shown, _code_free(sentence(each))) for each in REFUSALS[page]()])


def foreign(project: str) -> Callable[[], str]:
    """Return the function that makes the table of a project's fields that are refused without its interface."""

    def make() -> str:
        names = [name for name, (owner, _) in FIELDS_OF_OTHERS.items() if owner == project]
        return table(("field", "error"), [(f"`{name}`", f"{name}: {problem_of(name)}") for name in names])

    return make


def _code_free(text: str) -> str:
    """Return text in which Markdown has no special characters."""
    return text.replace("*", "\\*").replace("<", "&lt;")


def speed(page: str) -> Callable[[], str]:
    """Return the function that makes a page's table of times."""

    def make() -> str:
        found = load_result("peers.json")
        about, cases = found["setup"], found["cases"]
        ours = f"vllm-steer as {PEERS[page]}"
        chosen = [name for name in (ours, PEERS[page], REFERENCE) if name in cases]
        tasks = [task for task in TASKS if task in cases[ours]["tasks"]]
        rows = [
            (
                f"{name} ({', '.join(f'{package} {number}' for package, number in cases[name]['versions'].items())})",
                *(_cell(cases[name]["tasks"].get(task), cases[ours]["tasks"][task]) for task in tasks),
                f"{max(each['largest_difference'] for each in cases[name]['tasks'].values()):.0e}",
            )
            for name in chosen
        ]
        runs = " or ".join(map(str, sorted({cases[ours]["tasks"][task]["runs"] for task in tasks})))
        return (
            f"Seconds, and in brackets their ratio to vllm-steer, on {about['threads']} CPU thread with "
            f"`{about['model']}` (6 layers, hidden size 256) in\nfloat32: the minimum of {runs} runs, and the largest "
            f"difference from {REFERENCE} (`python -m benchmarks.peers`,\n`benchmarks/results/peers.json`). "
            f"{'. '.join(TASKS[task].format(**about) for task in tasks)}.\n"
            f"The machine was not idle: beside the benchmark ran {about['beside']}."
            " The model is so small that fixed costs of each step and request take most of the time.\n\n"
            + table(("", *tasks, "difference"), rows)
        )

    return make


def _cell(task: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> str:
    return "" if task is None else f"{task['seconds']:.2f} ({task['seconds'] / ours['seconds']:.2f})"


VECTORS_RESULT = "gpu-peers-llama-8b.json"
VECTORS_PICTURE = ROOT / "docs/assets/different-vectors.svg"


class Ratio(NamedTuple):
    """A ratio of throughput to stock vLLM: the median of the repetitions, the smallest and the largest."""

    median: float
    low: float
    high: float


def _vectors() -> dict[str, dict[int, Ratio]]:
    """Return the ratios of throughput by project and number of different vectors in the batch."""
    found: dict[str, dict[int, Ratio]] = {}
    for row in load_result(VECTORS_RESULT)["rows"]:
        if row["workload"] == "different vectors":
            found.setdefault(row["project"], {})[row["vectors"]] = Ratio(row["ratio"], *row["spread"])
    return found


def ratio_of_ours(vectors: int) -> float:
    """Return this project's ratio of throughput with a number of different vectors."""
    return _vectors()["vllm-steer"][vectors].median


def vectors() -> str:
    """Return the README's picture of throughput against the number of different vectors, with its caption."""
    result = load_result(VECTORS_RESULT)
    setup, versions = result["setup"], result["versions"]
    of_each = "; ".join(
        f"{project} {versions[project][project]} (vLLM {versions[project]['vllm']}): "
        f"{ratios[1].median:.2f} with one vector, {ratios[max(ratios)].median:.2f} with {max(ratios)}"
        for project, ratios in _vectors().items()
    )
    text = (
        f"Throughput of batches of 256 requests ({setup['prompt']} + {setup['generated']} tokens) with different "
        f"vectors at one layer, on one {machine_of(result)} with the layer sizes of Llama 3.1 8B, relative to stock "
        f"vLLM of the version that each project requires (`benchmarks/results/{VECTORS_RESULT}`). {of_each}. "
        f"{result['note']} Bars: the smallest and the largest repetition."
    )
    picture = VECTORS_PICTURE.relative_to(ROOT)
    return (
        f"![Throughput against the number of different vectors in a batch]({picture})\n\n"
        + textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
        + "\n"
    )


def vectors_picture() -> str:
    """Return the picture of :func:`vectors` as SVG, which depends on the results and on matplotlib's version alone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "vllm-steer", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.add_subplot()
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        for (project, ratios), marker in zip(_vectors().items(), "os^", strict=True):
            counts = sorted(ratios)
            medians, lows, highs = zip(*(ratios[count] for count in counts), strict=True)
            bars = np.abs(np.subtract((lows, highs), medians))
            line = axes.errorbar(counts, medians, yerr=bars, marker=marker, capsize=3)[0]
            axes.annotate(project, (counts[-1], medians[-1]), (10, 0), color=line.get_color(), **beside)
        axes.axhline(1, color="gray", linestyle="--")
        axes.annotate("stock vLLM", (counts[-1], 1), (10, 8), color="gray", **beside)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_ylim(0, 1.15)
        axes.set_xlabel("different vectors in a batch of 256 requests")
        axes.set_ylabel("throughput / stock vLLM")
        axes.set_xlim(0.8, 900)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()
