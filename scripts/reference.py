# SPDX-License-Identifier: Apache-2.0
"""Writer of the generated sections of pages and of the package's record of proofs.

The sections derive from tables in the code and from benchmarks/results. ``--check`` fails if one is out of date.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import architectures
import features_page
import flags_page
import msgspec
import sections
from aims import table_of_aims
from pages import RESULTS, load_result, table

import vllm_steer.models.proofs
from tests.server.hostile.corpus import CATEGORIES, counts
from vllm_steer.limits import ENGINE_LIMITS, FORMAT_LIMITS, SERVER_LIMITS
from vllm_steer.metrics.definitions import METRICS, Metric
from vllm_steer.models.recipe import BLOCK_INPUT, BLOCK_OUTPUT, MLP_MIX, Recipe
from vllm_steer.models.recipes import RECIPES
from vllm_steer.points import OPTIONAL_POINTS, POINTS
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

PARITY = RESULTS / "parity.json"
PROOFS = Path(vllm_steer.models.proofs.__file__).with_name(vllm_steer.models.proofs.FILE)


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


def models() -> str:
    """Return the number of classes that serve each point on a branch, and the table of all classes."""
    served = Counter(point for recipe in RECIPES.values() for point in OPTIONAL_POINTS if recipe.refusal(point) is None)
    counts = ", ".join(f"{served[point]} serve `{point}`" for point in OPTIONAL_POINTS)
    rows = [(f"`{r.layer_class}`", stream(r), post_attn(r), branches(r)) for r in RECIPES.values()]
    return f"Of {len(RECIPES)} classes, {counts}.\n\n" + table(
        ("decoder layer", "stream", "`post_attn`", "points on the branches"), rows
    )


def points() -> str:
    rows = [
        (f"`{p.name}`", "with the flag" if p.optional else "always", p.identity, p.seen_by, *p.aliases.values())
        for p in POINTS.values()
    ]
    libraries = tuple(next(iter(POINTS.values())).aliases)
    return table(("point", "available", "value", "an edit affects", *libraries), rows)


def foreign_names() -> str:
    return table(("library", "names", "here", "notes"), [foreign_row(name) for name in FOREIGN_NAMES])


def foreign_row(name: ForeignName) -> tuple[str, ...]:
    """Return the row of a family of names: library, spellings, our point and layer, note."""
    layer = f"{name.layer}" if name.layer is not None else f"i{name.offset:+d}" if name.offset else "i"
    here = f"`{name.point}`, layer {layer}" if name.point else "not a hook point"
    return name.library, ", ".join(f"`{template}`" for template in name.templates), here, name.note


def form(form: type[msgspec.Struct]) -> str:
    """Return the table of the name, default and description of each field of a JSON form."""
    schema = json_schema(form)
    rows = [
        (
            f"`{name}`",
            "required" if name in schema["required"] else f"`{json.dumps(field['default'])}`",
            field.get("description", ""),
        )
        for name, field in schema["properties"].items()
    ]
    return table(("field", "default", "meaning"), rows)


def edits() -> str:
    rows = [(f"`{k.name}`", ", ".join(f"`{p}`" for p in k.params), f"`{k.formula}`") for k in KINDS.values()]
    return table(("kind", "parameters", "new value"), rows)


def engine_limits() -> str:
    rows = [
        (f"`{limit.name}`", f"`{limit.flag}`", str(limit.default), f"{limit.low} to {limit.high}", limit.help)
        for limit in ENGINE_LIMITS.values()
    ]
    return table(("setting", "flag", "default", "range", "limits"), rows)


def server_limits() -> str:
    rows = [
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
    return table(("scope", "flag", "default", "range", "name in a key", "status", "limits"), rows)


def format_limits() -> str:
    return table(("limit", "value", "counts"), [(each.name, f"{each.value:,}", each.help) for each in FORMAT_LIMITS])


def switches() -> str:
    rows = [
        (f"`{s.name}`", f"`{s.flag}`", f"`{s.default}`" if s.default is not None else "by engine", s.help)
        for s in SWITCHES
    ]
    return table(("setting", "flag that changes it", "default", "meaning of the flag"), rows)


def choices() -> str:
    rows = [
        (f"`{s.name}`", f"`{s.flag}`", ", ".join(f"`{name}`" for name in s.choices), s.help)
        for s in (POLICY, *MULTI_CHOICES)
    ]
    return table(("setting", "flag", "values", "meaning"), rows)


def bad_input() -> str:
    """Return the table of the invalid requests that the tests send, counted from their corpus."""
    found = counts()
    rows = [(name, category.description, f"{found[name]:,}") for name, category in CATEGORIES.items()]
    return table(("category", "what", "requests"), [*rows, ("all", "", f"{sum(found.values()):,}")])


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
    head = ("model", "decoder layer", *(f"edited {p}" for p in points), "plain", *(f"captured {p}" for p in points))
    return (
        f"Run: {figures['mode']}, vLLM {about['vllm']}, Transformers {about['transformers']}. `tests/conformance` requires\n"
        f"each figure to be below {figures['tolerance']:.0e}.\n\n" + table(head, rows)
    )


def cache() -> str:
    results = load_result("cache-hits.json")
    setup = results["setup"]
    rows = [
        (row["case"], f"{row['cached_tokens']:,} of {row['prompt_tokens']:,}", f"{100 * row['hit_rate']:.1f} %")
        for row in results["rows"]
    ]
    return (
        f"Hit rates of {setup['requests']} requests with a common prefix of {setup['shared_prefix']:,} tokens and "
        f"{setup['own_tokens']} tokens of their own, one after\nanother, in blocks of {setup['block_size']} tokens. The first "
        "request is not counted (`benchmarks/cache_hits.py`).\n\n"
        + table(("requests", "cached prompt tokens", "hit rate"), rows)
    )


def rights(route: SteeringRoute) -> str:
    """Return the rights that a route requires."""
    names = (route.right.value, (route.openapi_extra or {}).get(patch.ALSO_KEY))
    return ", ".join(f"`{name}`" for name in names if name)


def routes() -> str:
    routers = (
        make_router(None, 0),
        live.make_router(None, None),
        captures.make_router(None),
        capabilities.make_router(None),
        patch.make_router(None, 0),
    )
    routes = [route for router in routers for route in router.routes if isinstance(route, SteeringRoute)]
    rows = [(f"`{' '.join(sorted(r.methods))}`", f"`{r.path_format}`", rights(r), r.summary or "") for r in routes]
    return table(("method", "path", "right", "purpose"), rows)


def errors() -> str:
    rows = [
        (f"{status.value} {status.phrase}", f"`{kind}`", (cls.__doc__ or "").strip().partition("\n")[0])
        for cls, status, kind in ERRORS
    ]
    return table(("status", "type", "when"), rows)


def fields(described: Mapping[str, Mapping[str, Any]]) -> str:
    return table(("field", "description"), [(f"`{name}`", field["description"]) for name, field in described.items()])


def unsteerable() -> str:
    """Return the paragraph on the routes that run the model and cannot steer."""
    return (
        "Routes that run the model but cannot steer refuse all these fields at the top level of a JSON body:\n"
        f"{', '.join(f'`{route}`' for route in sorted(UNSTEERABLE_ROUTES))}.\n"
        f"So do the forms of {' and '.join(f'`{route}`' for route in FORM_ROUTES)}, and events of `{REALTIME_ROUTE}`, also "
        "in their `session`.\n"
    )


def unknown_fields() -> str:
    rows = [(f"`{name}`", project, advice) for name, (project, advice) in FIELDS_OF_OTHERS.items()]
    return table(("field", "project", "message"), rows)


def metrics() -> str:
    def labels(metric: Metric) -> str:
        return ", ".join(
            f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in metric.labels.items()
        )

    endings = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    rows = [(f"`{metric.name}{endings[metric.type]}`", metric.type, labels(metric), metric.help) for metric in METRICS]
    return table(("name", "type", "labels", "description"), rows)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "models.md": {"models": models},
    "points.md": {"points": points, "names": foreign_names},
    "edits.md": {"kinds": edits, "edit": partial(form, EditForm), "capture": partial(form, CaptureForm)},
    "limits.md": {
        "engine": engine_limits,
        "server": server_limits,
        "format": format_limits,
        "switches": switches,
        "choices": choices,
    },
    "flags.md": flags_page.SECTIONS,
    "parity.md": {"parity": parity},
    "features.md": features_page.SECTIONS,
    "cache.md": {"hits": cache},
    "architectures.md": architectures.SECTIONS,
    "performance.md": {"aims": table_of_aims},
    "http.md": {
        "routes": routes,
        "rights": lambda: table(("right", "to"), [(f"`{right}`", text) for right, text in RIGHT_DESCRIPTIONS.items()]),
        "errors": errors,
        "requests": partial(fields, REQUEST_FIELDS),
        "unsteerable": unsteerable,
        "unknown": unknown_fields,
        "responses": partial(fields, ANSWER_FIELDS),
    },
    "metrics.md": {"metrics": metrics},
    "bad-input.md": {"requests": bad_input},
}
"""Generated sections of the pages of docs/reference."""


def proofs() -> str:
    """The file from which ``vllm-steer doctor`` names the proof of a model, a row on a line."""
    rows = ",\n".join(" " + msgspec.json.encode(row).decode() for row in architectures.record())
    return f"[\n{rows}\n]\n"


def main() -> None:
    stale = []
    pages = sections.pages({f"docs/reference/{name}": each for name, each in PAGES.items()} | sections.SECTIONS)
    for path, text in {**pages, PROOFS: proofs()}.items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/reference.py")


if __name__ == "__main__":
    main()
