# SPDX-License-Identifier: Apache-2.0
"""Writer of the generated pages of docs/reference and of the package's record of proofs.

The pages derive from tables in the code and from benchmarks/results. ``--check`` fails if a page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import architectures
import bad_input
import features_page
import flags_page
import msgspec
import performance
import sections
from pages import RESULTS, ROOT, load_result, table

import vllm_steer.models.proofs
from vllm_steer.limits import ENGINE_LIMITS, FORMAT_LIMITS, SERVER_LIMITS
from vllm_steer.metrics.definitions import METRICS, Metric
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, MLP_MIX, Recipe
from vllm_steer.models.recipes import RECIPES
from vllm_steer.points import OPTIONAL_POINTS, POINTS, POINTS_FLAG
from vllm_steer.request import KINDS
from vllm_steer.request.capture import CaptureForm
from vllm_steer.request.edit import EditForm
from vllm_steer.request.field_types import json_schema
from vllm_steer.request.unknown_fields import FIELDS_OF_OTHERS
from vllm_steer.server.auth.rights import RIGHT_DESCRIPTIONS
from vllm_steer.server.http.error_response import ERRORS
from vllm_steer.server.http.request_guard import FORM_ROUTES, UNSTEERABLE_ROUTES
from vllm_steer.server.http.schemas import ANSWER_FIELDS, REQUEST_FIELDS
from vllm_steer.server.http.websocket import REALTIME_ROUTE
from vllm_steer.server.routes import capabilities, captures, live, patch
from vllm_steer.server.routes.base import SteeringRoute
from vllm_steer.server.routes.modules import make_router
from vllm_steer.settings import MULTI_CHOICES, POLICY, SWITCHES
from vllm_steer.site_names import FOREIGN_NAMES, ForeignName

FOLDER = ROOT / "docs" / "reference"
PARITY = RESULTS / "parity.json"
PROOFS = Path(vllm_steer.models.proofs.__file__).with_name(vllm_steer.models.proofs.FILE)
NOTE = "<!-- Written by scripts/reference.py from the tables in the code and the results in benchmarks/results. -->\n\n"


def post_attn(recipe: Recipe) -> str:
    """Return where ``post_attn`` is, or why it is refused."""
    if recipe.post_attn in (BLOCK_INPUT, BLOCK_OUTPUT):
        return f"{recipe.post_attn}, because it has one branch"
    if recipe.parallel:
        partial = ", not under tensor parallelism" if recipe.partial_sums else ""
        return f"capture only: input of the block + output of `{recipe.attn_out}`{partial}"
    if recipe.post_attn == MLP_MIX:
        return f"input of {MLP_MIX}"
    if (reason := recipe.refusal("post_attn")) is not None:
        return "refused: " + reason.format(layer="the block").partition(";")[0]
    behind = "; attention to the encoder follows" if recipe.cross_attention else ""
    return f"input of `{recipe.post_attn}`{behind}"


def stream(recipe: Recipe) -> str:
    """Return in which form the stream travels."""
    if recipe.stream:
        return f"{recipe.stream} of several"
    if recipe.reduced_by:
        return f"{recipe.shape}, fused all-reduce"
    return f"{recipe.shape}, looped" if recipe.runs is not None else recipe.shape


def branches(recipe: Recipe) -> str:
    return ", ".join(f"`{point}`" for point in OPTIONAL_POINTS if recipe.refusal(point) is None) or "none"


def _counts() -> str:
    """Return the sentence with the number of classes that serve each point on a branch."""
    served = Counter(point for recipe in RECIPES.values() for point in OPTIONAL_POINTS if recipe.refusal(point) is None)
    counts = ", ".join(f"{served[point]} serve `{point}`" for point in OPTIONAL_POINTS)
    return f"Of {len(RECIPES)} classes, {counts}."


def models() -> str:
    rows = [(f"`{r.layer_class}`", stream(r), post_attn(r), branches(r)) for r in RECIPES.values()]
    return (
        "# Models\n\n"
        "vllm-steer supports a model if its decoder layers are of the classes below. [Architectures](architectures.md) says\n"
        "how each class was proven, [parity](parity.md) has the figures. If a class implements several kinds of block, the row\n"
        "describes the usual one. The engine refuses every other class at start, and also a listed class whose `forward` is not\n"
        "the code that was proven (`models/digests.json`). All classes serve `pre_attn` and `post_block`.\n\n"
        "* *Stream*: `pair`: the layer returns `(hidden_states, residual)`, whose sum is the stream; `single`: it returns one tensor; `fused\n"
        "  all-reduce`: a pair whose all-reduce is fused with the addition and RMSNorm; `looped`: the layers run several times per\n"
        "  token ([below](#blocks-that-are-joined-otherwise)); `of several`: the layer has [several streams](streams.md), of which the\n"
        "  hook points are on one, or on their mean.\n"
        "* *`post_attn`*: the submodule that reads the stream at `post_attn`. *Capture only* means that captures are served and edits\n"
        "  refused, and gives the sum that a capture returns.\n"
        f"* *Points on the branches*: those of {', '.join(f'`{point}`' for point in OPTIONAL_POINTS)} that the class serves in an\n"
        f"  engine with `{POINTS_FLAG}`. Requests at another one are refused with the reason. {_counts()}\n\n"
        + table(("decoder layer", "stream", "`post_attn`", "points on the branches"), rows)
        + _EXCEPTIONS
    )


_EXCEPTIONS = """
## Blocks that are joined otherwise

In most models block *i + 1* reads what block *i* leaves, so `post_block` of *i* is `pre_attn` of *i + 1*. These differ:

* **Looped models** (`looped` in the table) run their layers several times per token. A layer number counts runs, as vLLM
  counts the key-value caches of these models: run *r* of layer *i* of a stack of *n* layers is layer *r n + i*. An edit at
  every layer is an edit at every run. IQuest-LoopCoder with *n* layers and `loop_num` 2 has layers 0 to *2n - 1*, and the
  second run of layer 3 is layer *n + 3*; it also attends to the keys and values of the first run. HRM-Text has
  `H_cycles * (L_cycles + 1)` runs of a stack; the last run of each cycle is the high stack, the others are the low one. The
  first layer of a run reads the sum of the states of both stacks, each behind a norm, and not the `post_block` before it.
* **Solar** mixes an earlier stream into the input of some blocks (`bskcn_3` and `bskcn_4` in its configuration): `pre_attn`
  is the mixture. The earlier stream is copied in front of the blocks in `bskcn_1` and `bskcn_2`. An edit at `post_block` of the
  block before is part of the copy; an edit at `pre_attn` of the block itself is not.
* **Encoder-decoders** are steered in the decoder. `post_attn` is the stream after self-attention and before the attention to
  the encoder, so `post_block` is `post_attn` plus what that attention and the MLP add. `mlp_in` is the output of the MLP's norm.
* **Layers that reduce in the norm** (DeepSeek V3.2, GLM 5, MiniMax M3, Dots 3) leave the branches as partial sums under tensor
  parallelism. The taps run behind the fused kernel, on the complete stream that it returns, and the norm is computed again from
  the edited stream. `attn_out` and `mlp_out` are refused under tensor parallelism, and so is pipeline together with tensor
  parallelism.
* **Several streams**: `pre_attn` of Gemma 3n is a prediction from all streams, and some layers of Kimi K3 begin a new sum
  ([definitions](streams.md)).
"""


def points() -> str:
    rows = [
        (f"`{p.name}`", "with the flag" if p.optional else "always", p.identity, p.seen_by, *p.aliases.values())
        for p in POINTS.values()
    ]
    libraries = tuple(next(iter(POINTS.values())).aliases)
    return (
        "# Hook points\n\nHook points in order of computation. Points on a branch exist only in engines that were started with\n"
        f'them: `{POINTS_FLAG} {",".join(OPTIONAL_POINTS)}` or `steering_config={{"points": [...]}}`.\n'
        "Requests at a point that the model does not support are refused with the reason ([models](models.md)). Some models\n"
        "carry [several residual streams](streams.md); the page on them says which of them the points are on.\n\n"
        + table(("point", "available", "value", "an edit affects", *libraries), rows)
        + "\n\n## Names in other libraries\n\nEdits, captures, readouts and the command line also accept the names in rows without a note. A name without a\n"
        'layer replaces our point: `Edit(point="hook_resid_post", layers=3)`, `hooks={"resid_post": [3]}`. A name with a layer is a\n'
        'whole site: `Edit(point="blocks.3.hook_resid_post")`, `hooks=["blocks.3.hook_resid_post"]`. Rows with a note are refused\n'
        "there, because their meaning depends on the model; the error has our name. `{i}` is the layer, and `[3]` and `.3` are\n"
        "equivalent. Prefixes of HF model classes, such as `model.`, are ignored.\n\n"
        "`vllm_steer.site(name, num_layers=...)` returns point and layer of an accepted name with a layer, and of `hidden_states[i]`, whose last\n"
        "entry it refuses.\n\n"
        + table(("library", "names", "here", "notes"), [foreign_row(name) for name in FOREIGN_NAMES])
    )


def foreign_row(name: ForeignName) -> tuple[str, ...]:
    """Return the row of a family of names: library, spellings, our point and layer, note."""
    layer = f"{name.layer}" if name.layer is not None else f"i{name.offset:+d}" if name.offset else "i"
    here = f"`{name.point}`, layer {layer}" if name.point else "not a hook point"
    return name.library, ", ".join(f"`{template}`" for template in name.templates), here, name.note


def form_rows(form: type[msgspec.Struct]) -> list[tuple[str, ...]]:
    """Return name, default and description of each field of a JSON form."""
    schema = json_schema(form)
    return [
        (
            f"`{name}`",
            "required" if name in schema["required"] else f"`{json.dumps(field['default'])}`",
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    ]


def edits() -> str:
    rows = [(f"`{k.name}`", ", ".join(f"`{p}`" for p in k.params), f"`{k.formula}`") for k in KINDS.values()]
    return (
        "# Edits\n\n`x` is a token's row of the residual stream, `v` the vector, `u = v / ||v||` its direction, `s` the strength\n"
        '(called `scale` in the short form `{"vector": ..., "scale": ...}` and in references to modules).\n'
        "Edits are computed in float32 and rounded once to the model's dtype. Edits at one site apply in this order: after global\n"
        "steering and the request's modules ([order](../guides/modules.md#order)), `steering_vectors`,\n"
        "`prefill_steering_vectors`, `decode_steering_vectors`, then `steering` in the order given.\n\n"
        + table(("kind", "parameters", "new value"), rows)
        + "\n## Fields of an edit\n\n"
        + table(("field", "default", "meaning"), form_rows(EditForm))
        + '\n`tokens` of an edit and `positions` of a capture also accept `{"generated": [[8, null]]}`, which counts from the first\n'
        "generated token: here all from the ninth on ([token selectors](../guides/steering.md#token-selectors)).\n"
        + "\n## Fields of a capture spec\n\nAll other keys are options of the consumer.\n\n"
        + table(("field", "default", "meaning"), form_rows(CaptureForm))
    )


def limits() -> str:
    rows = [
        (f"`{limit.name}`", f"`{limit.flag}`", str(limit.default), f"{limit.low} to {limit.high}", limit.help)
        for limit in ENGINE_LIMITS.values()
    ]
    server = [
        (
            limit.scope,
            f"`{limit.flag}`",
            str(limit.default),
            f"{limit.low} to {limit.high}",
            "" if limit.key_name is None else f"`{limit.key_name}`",
            "" if limit.status is None else f"{limit.status.value}",
            limit.help,
        )
        for limit in SERVER_LIMITS
    ]
    fixed = [(limit.name, f"{limit.value:,}", limit.help) for limit in FORMAT_LIMITS]
    return (
        "# Limits\n\nThis page lists every limit of the engine, the server and the request format.\n\n"
        "## Limits of an engine\n\n"
        "Fixed when the engine starts: `steering_config={...}` of `LLM`, or server flags. A request that exceeds one of them by\n"
        "itself is refused. A request that does not fit beside the running requests waits. The [glossary](glossary.md) explains\n"
        "table rows, instructions, segments and programs.\n\n"
        + table(("setting", "flag", "default", "range", "limits"), rows)
        + "\n## Limits of a server\n\n"
        "Checked before a request reaches the engine. The scope `request` covers one request, `key` everything in flight for one\n"
        "API key (only with `--steering-keys`), and `server` everything. The usage of a request ends when it completes, fails or\n"
        "its client disconnects. With several API servers (`--api-server-count`), each enforces its share of the `key` and\n"
        "`server` limits, rounded up; storage on disk and the registry are counted once for all servers. A key can have limits of\n"
        "its own: `vllm-steer keys new --limit NAME=N`.\n\n"
        "Status 413: the request is too large by itself. 429: the key's other requests use up the limit; 503: all requests do.\n"
        "429 and 503 carry `Retry-After`. Without a status, the request is served as described.\n\n"
        + table(("scope", "flag", "default", "range", "name in a key", "status", "limits"), server)
        + "\n## Limits of the request format\n\n"
        "Fixed; a request that exceeds one of them is refused with status 400, or with `SteeringError` offline.\n\n"
        + table(("limit", "value", "counts"), fixed)
        + "\n## Switches\n\n"
        + table(
            ("setting", "flag that changes it", "default", "meaning of the flag"),
            [
                (f"`{s.name}`", f"`{s.flag}`", f"`{s.default}`" if s.default is not None else "by engine", s.help)
                for s in SWITCHES
            ],
        )
        + "\n## Choices\n\n"
        + table(
            ("setting", "flag", "values", "meaning"),
            [
                (f"`{s.name}`", f"`{s.flag}`", ", ".join(f"`{name}`" for name in s.choices), s.help)
                for s in (POLICY, *MULTI_CHOICES)
            ],
        )
    )


def parity() -> str:
    figures = json.loads(PARITY.read_text())
    about = figures["environment"]

    def cell(number: float | None) -> str:
        return "refused" if number is None else f"{number:.0e}"

    rows = [
        (m["model"], f"`{m['layer']}`", *map(cell, (*m["edits"].values(), m["plain"], *m["rows"].values())))
        for m in figures["models"]
    ]
    points = tuple(f"`{p}`" for p in figures["models"][0]["edits"])
    return (
        "# Parity with HF Transformers\n\n"
        f"Tiny models of real architectures, random weights, float32, {figures['mode']}, vLLM {about['vllm']}, Transformers\n"
        f"{about['transformers']}; raw figures in `benchmarks/results/{PARITY.name}`, written by\n"
        f"`python scripts/parity_table.py --json benchmarks/results/{PARITY.name}`. `tests/conformance` requires each to be below {figures['tolerance']:.0e}.\n\n"
        "*Edited*: the largest difference of a log-probability, over all requests that edit the point, all tokens and the whole\n"
        "vocabulary. *Plain*: the same for requests without edits in the same batch. *Captured*: the largest distance of a row\n"
        "from HF's, in lengths of HF's row, over all requests, layers and tokens. `refused`: the engine refuses edits at the point.\n\n"
        + table(
            ("model", "decoder layer", *(f"edited {p}" for p in points), "plain", *(f"captured {p}" for p in points)),
            rows,
        )
    )


def cache() -> str:
    results = load_result("cache-hits.json")
    setup = results["setup"]
    rows = [
        (row["case"], f"{row['cached_tokens']:,} of {row['prompt_tokens']:,}", f"{100 * row['hit_rate']:.1f} %")
        for row in results["rows"]
    ]
    return (
        "# Prefix cache\n\n"
        f"Hit rates of {setup['requests']} requests with a common prefix of {setup['shared_prefix']:,} tokens and "
        f"{setup['own_tokens']} tokens of their own, one after\nanother, in blocks of {setup['block_size']} tokens. The first "
        "request is not counted (`benchmarks/cache_hits.py`).\n\n"
        + table(("requests", "cached prompt tokens", "hit rate"), rows)
        + "\n"
        "A block's key contains the content of the edits that can have changed the block, from the first edited token on. Blocks\n"
        "ahead of that token keep vLLM's own keys, and so do all blocks if only the last layer is edited after its attention.\n"
        "Inkling, whose layers cache their branches, and looped models have keys of their own for those edits too.\n"
        "A request's `cache_salt` is part of the same keys.\n\n"
        "The keys of image tokens contain vLLM's hash of the image. In models whose image tokens attend to all tokens of their\n"
        "image, later ones included (Gemma 3, Gemma 4 with bidirectional vision, Molmo 2, PaliGemma and others for which vLLM's\n"
        "`is_mm_prefix_lm` holds), an edit can change all tokens of an image that it touches. There, a block that overlaps an\n"
        "image or a video, with the tokens that mark it, has the edits up to the end of the image in its key. Blocks ahead of\n"
        "the image keep theirs. In other models, and for audio, only edits of earlier tokens and of the block count.\n\n"
        "Captures do not change keys, but captured positions must be computed: a request uses no cached block from its first\n"
        "captured position on, and none at all if it captures its prompt and a layer has a window or a state. If vLLM computes\n"
        "images in one step, and the first captured position is within an image, it uses no cached block of the image either.\n"
    )


def rights(route: SteeringRoute) -> str:
    """Return the rights that a route requires."""
    names = (route.right.value, (route.openapi_extra or {}).get(patch.ALSO_KEY))
    return ", ".join(f"`{name}`" for name in names if name)


def http() -> str:
    routers = (
        make_router(None, 0),
        live.make_router(None, None),
        captures.make_router(None),
        capabilities.make_router(None),
        patch.make_router(None, 0),
    )
    routes = [route for router in routers for route in router.routes if isinstance(route, SteeringRoute)]
    rows = [(f"`{' '.join(sorted(r.methods))}`", f"`{r.path_format}`", rights(r), r.summary or "") for r in routes]
    answers = [
        (f"{status.value} {status.phrase}", f"`{kind}`", (cls.__doc__ or "").strip().partition("\n")[0])
        for cls, status, kind in ERRORS
    ]
    fields = [(f"`{name}`", field["description"]) for name, field in REQUEST_FIELDS.items()]
    others = [(f"`{name}`", project, advice) for name, (project, advice) in FIELDS_OF_OTHERS.items()]
    response_fields = [(f"`{name}`", field["description"]) for name, field in ANSWER_FIELDS.items()]
    return (
        "# HTTP\n\n`/openapi.json` of a running server documents every field.\n\n## Routes\n\n"
        + table(("method", "path", "right", "purpose"), rows)
        + "\n## Rights\n\n"
        "Rights of the keys in `--steering-keys`. Steering fields require `steer`; `capture`, `readouts` and `stop_on` require `capture`.\n\n"
        + table(("right", "to"), [(f"`{right}`", text) for right, text in RIGHT_DESCRIPTIONS.items()])
        + "\n## Errors of these routes\n\n"
        + table(("status", "type", "when"), answers)
        + "\n## Fields of completion, chat and responses requests\n\n"
        + table(("field", "description"), fields)
        + "\n## Unknown fields\n\n"
        "vLLM ignores unknown fields. With `--enable-steering`, an unknown field whose name is similar to one of the fields above is\n"
        "refused with HTTP 400, and so are these fields of other projects; the same holds inside `vllm_xargs`, `extra_args` and\n"
        "`extra_body`, and for `SamplingParams(extra_args=...)`. All other unknown fields are ignored, as in stock vLLM.\n\n"
        "Routes that run the model but cannot steer refuse all these fields at the top level of a JSON body:\n"
        f"{', '.join(f'`{route}`' for route in sorted(UNSTEERABLE_ROUTES))}.\n"
        f"So do the forms of {' and '.join(f'`{route}`' for route in FORM_ROUTES)}, and events of `{REALTIME_ROUTE}`, also in their "
        "`session`.\n\n"
        + table(("field", "project", "message"), others)
        + "\n## Fields of their responses\n\n"
        + table(("field", "description"), response_fields)
    )


def metrics() -> str:
    def labels(metric: Metric) -> str:
        return ", ".join(
            f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in metric.labels.items()
        )

    rows = [
        (f"`{name}`", metric.type, labels(metric), metric.help)
        for metric in METRICS
        for name in [next(iter(metric.series))]
    ]
    return (
        "# Metrics\n\n"
        "A server with `--enable-steering` adds these metrics to vLLM's at `/metrics`, aggregated over all API server processes.\n"
        "Offline, `vllm_steer.LLM(..., disable_log_stats=False).get_metrics()` returns them, without the suffixes `_total` and\n"
        "`_bucket`. With `--disable-log-stats`, the metrics with the label `engine` are missing, since vLLM then sends no engine\n"
        "statistics. Histograms also have `_sum` and `_count`. [Operating](../guides/operating.md) describes what to monitor.\n\n"
        + table(("name", "type", "labels", "description"), rows)
    )


PAGES: dict[str, Callable[[], str]] = {
    "models.md": models,
    "points.md": points,
    "edits.md": edits,
    "limits.md": limits,
    "flags.md": flags_page.page,
    "parity.md": parity,
    "features.md": features_page.page,
    "cache.md": cache,
    "architectures.md": architectures.page,
    "performance.md": performance.page,
    "http.md": http,
    "metrics.md": metrics,
    "bad-input.md": bad_input.page,
}


def proofs() -> str:
    """The file from which ``vllm-steer doctor`` names the proof of a model, a row on a line."""
    rows = ",\n".join(" " + msgspec.json.encode(row).decode() for row in architectures.record())
    return f"[\n{rows}\n]\n"


def main() -> None:
    stale = []
    pages = {FOLDER / name: NOTE + page() for name, page in PAGES.items()} | sections.pages()
    for path, text in {**pages, PROOFS: proofs()}.items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/reference.py")


if __name__ == "__main__":
    main()
