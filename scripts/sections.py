# SPDX-License-Identifier: Apache-2.0
"""Generated sections of hand-written pages, between ``<!-- NAME: ... -->`` and ``<!-- NAME end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import demo_section
import frontier_page
import patching_sections
import peer_sections
from gpu_page import gpu_failures, newest_version
from measured import Cost as Measured
from measured import current, kind_of, machine_of, newest_costs, of_any_code, read
from pages import ROOT, table
from rooms import ROOMS

from vllm_steer.compat.stages import REQUEST_STAGES
from vllm_steer.compat.version import CONFLICTS
from vllm_steer.models.parallelism import PARALLELISM
from vllm_steer.vectors.formats import FORMATS


class Cost(NamedTuple):
    """A row of the README's table."""

    workload: str
    variant: str
    batch: str
    published: str = ""
    """A ratio that another project publishes for a similar workload."""


COSTS = (
    Cost("no steering", "idle", "256"),
    Cost("steer one site, every request", "one site", "256", "0.89 (EasySteer, 256 requests)"),
    Cost("steer all 96 sites (32 layers, 3 points)", "all sites", "1"),
    Cost("different edits for each request", "own program each", "256", "0.18 (EasySteer, 256 configurations)"),
    Cost("capture one layer, all tokens", "capture one layer, all tokens", "1000", "0.82 (vllm-lens, eager)"),
)

SERVED = {
    "idle": "server: no steering in any request",
    "vector": "server: a vector in the body of each request",
    "probes": "server: 16 probes at one layer, returned at the end",
    "readouts": "server: 16 probes at one layer, streamed with each token",
    "gate": "server: an edit with a gate, its probe streamed with each token",
    "capture": "server: one layer to files, all tokens",
}
"""Rows of the README's table that are measured through the server, by way of ``benchmarks/serve.py``."""

START = """
With the layer sizes of Llama 3.1 8B on an {machine}, a server with steering started {later:.0f} s later than stock vLLM
({steered:.0f} s against {stock:.0f} s, with empty compile caches) and had {less:.2f} GiB less KV cache
([Performance](../reference/performance.md)). {note}`--no-steering-plain-code` omits the second compilation.
""".lstrip()


def ratio(cost: Cost, figure: str) -> str:
    """Return a figure of a workload, marked if it is of an earlier build; empty if it was not measured."""
    found = cost_of(cost)
    value, now = found.figures.get(figure), current(kind_of(cost.variant), found.result)
    return "" if value is None else f"{value:.2f}{'' if now else '²'}"


def cost_of(cost: Cost) -> Measured:
    """Return the measurement of a workload: of the present code, or the newest of an earlier build."""
    now = newest_costs("llama-8b", cost.variant).get(cost.batch)
    return now or newest_costs("llama-8b", cost.variant, fits=of_any_code)[cost.batch]


GLANCE = """
* **Speed** (layer sizes of Llama 3.1 8B, 256 requests at once{build}; the hosts ran other jobs too): {idle:.0%} of
  stock vLLM's throughput while no request steers ({idle_gpu}), {own:.0%} with different edits in each request
  ({own_gpu}), {pictured:.0%} with 256 different vectors ({peers_gpu}). Through the server, with a vector, 16
  probes, a gate or a capture in each request: {low:.0%} to {high:.0%}, with {slow_low:.2f} to {slow_high:.2f} times the
  time per token ({served_gpu}; [cost](#cost)).
* **Memory and start** ({start_gpu}{build}): {less:.2f} GiB less for the key-value cache; a server starts {later:.0f}
  s later, {again:.0f} s with filled compile caches.
* **Limits**: decoder layers of [proven classes](docs/reference/architectures.md) only; `vllm-steer doctor MODEL`
  checks a model ([limitations](#limitations)).
""".lstrip()


def glance() -> str:
    """Return the README's sentences on cost and limits."""
    idle, _, _, own, _ = (cost_of(cost) for cost in COSTS)
    served, started = read("gpu-serve-llama-8b.json"), read("gpu-start-llama-8b.json")
    ways = [each for each in served["figures"] if each["concurrency"] == 256 and each["way"] in SERVED]
    ways = [each for each in ways if each["way"] != "idle"]
    throughput, slower = ([each[figure][0] for each in ways] for figure in ("tokens_per_second", "token_ms"))
    stock, steering = (started["servers"][kind] for kind in ("stock", "steering"))
    kinds = {"idle steps": idle.result, "steered steps": own.result, "server": served, "requests": started}
    earlier = not all(current(kind, result) for kind, result in kinds.items())
    return GLANCE.format(
        idle=idle.figures["throughput"],
        own=own.figures["throughput"],
        idle_gpu=machine_of(idle.result),
        own_gpu=machine_of(own.result),
        pictured=peer_sections.ratio_of_ours(256),
        peers_gpu=machine_of(read(peer_sections.VECTORS_RESULT)),
        served_gpu=machine_of(served),
        start_gpu=machine_of(started),
        low=min(throughput),
        high=max(throughput),
        slow_low=min(slower),
        slow_high=max(slower),
        less=stock["cache_gib"] - steering["cache_gib"],
        later=steering["start_seconds"] - stock["start_seconds"],
        again=steering["restart_seconds"] - stock["restart_seconds"],
        build=", an earlier build" if earlier else "",
    )


def costs() -> str:
    """Return the README's table of costs, in which figures of earlier builds are marked."""
    rows = []
    for cost in COSTS:
        shown = (ratio(cost, figure) for figure in ("throughput", "per token"))
        gpu = machine_of(cost_of(cost).result)
        rows.append((cost.workload, gpu, f"{int(cost.batch):,}", *shown, cost.published))
    served = read("gpu-serve-llama-8b.json")
    mark = "" if current("server", served) else "²"
    for each in served["figures"]:
        if each["concurrency"] == 256 and each["way"] in SERVED:
            shown = (f"{each[figure][0]:.2f}{mark}" for figure in ("tokens_per_second", "token_ms"))
            rows.append((SERVED[each["way"]], machine_of(served), "256", *shown, ""))
    return (
        "A model with the layer sizes of Llama 3.1 8B and random weights, on one GPU. The figures are ratios to stock\n"
        "vLLM with compilation and CUDA graphs, measured in turns on the same GPU. They come from the results that\n"
        "[Performance](docs/reference/performance.md) shows with their targets, beside what steering adds to\n"
        "the start of a server and to the first token:\n\n"
        + table(("workload", "GPU", "requests", "throughput", "time per token", "published by others¹"), rows)
        + "\n¹ On other models and machines; see [comparison](docs/explanation/comparison.md).\n"
        + ("² Of an earlier build.\n" if "²" in str(rows) else "")
    )


def start() -> str:
    """Return the operator's guide's paragraph about the start of a server, from ``benchmarks/start.py``."""
    result = read("gpu-start-llama-8b.json")
    stock, steering = (result["servers"][kind] for kind in ("stock", "steering"))
    return START.format(
        machine=machine_of(result),
        stock=stock["start_seconds"],
        steered=steering["start_seconds"],
        later=steering["start_seconds"] - stock["start_seconds"],
        less=stock["cache_gib"] - steering["cache_gib"],
        note=f"{note} " if (note := result.get("note", "")) else "",
    )


def rooms() -> str:
    """Return the architecture page's table of the rooms of the package."""
    return table(
        ("room", "contents"), [(", ".join(f"`{name}`" for name in room.names), room.contents) for room in ROOMS]
    )


def stages() -> str:
    """Return the architecture page's table of the stages that a request passes."""
    rows = [
        (
            stage.name,
            stage.takes,
            stage.passes_on,
            ", ".join(dict.fromkeys(f"`{method_name(join.method)}`" for join in stage.joins)),
        )
        for stage in REQUEST_STAGES
    ]
    return table(("stage", "input", "output", "methods of vLLM and torch.nn that are wrapped or overridden"), rows)


def conflicts() -> str:
    """Return the table of vLLM settings that are refused with steering."""
    return table(("setting", "reason"), [(f"{conflict.setting}", conflict.reason) for conflict in CONFLICTS])


def method_name(path: str) -> str:
    """Return the last two parts of a method's path, for example ``Scheduler.schedule``."""
    return ".".join(path.rpartition(":")[2].split(".")[-2:])


def splits() -> str:
    """Return the table of splits over several ranks that are proven or refused."""
    shown = {"proven": "proven", "unproven": "refused", "not in vLLM": "vLLM has none"}
    return table(
        ("family", "tensor parallel", "pipeline parallel", "both", "a stage hands over"),
        [(row.family, shown[row.tensor], shown[row.pipeline], shown[row.both], row.between) for row in PARALLELISM],
    )


def vector_formats() -> str:
    """Return the table of the formats of vector files."""
    head = ("`--format`", "tools", "recognised by", "layer numbers", "traps")
    return table(head, [(f"`{n}`", f.tools, f.content, f.numbering, f.traps) for n, f in FORMATS.items()])


FOREIGN = {"vllm-lens": "vllm-lens", "rhizonymph": "RhizoNymph/vllm"}
"""Projects whose fields are refused by name without their interface, by page."""
SECTIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {
        "try": demo_section.try_it,
        "glance": glance,
        "answers": demo_section.answers,
        "vectors": peer_sections.vectors,
        "costs": costs,
    },
    "docs/design/architecture.md": {"rooms": rooms, "stages": stages},
    "docs/index.md": {"demo": demo_section.figures},
    "docs/explanation/patching-compared.md": {"speed": patching_sections.speed},
    "docs/explanation/limitations.md": {"conflicts": conflicts, "gpu-failures": gpu_failures},
    "docs/guides/operating.md": {"start": start},
    "docs/guides/releases.md": {"newest-version": newest_version},
    "docs/guides/vector-files.md": {"formats": vector_formats},
    "docs/reference/streams.md": {"kernels": frontier_page.mixes, "splits": splits},
    **{
        f"docs/peers/{page}.md": {
            **({} if page == "inspect" else {"speed": peer_sections.speed(page)}),
            **({"foreign": peer_sections.foreign(FOREIGN[page])} if page in FOREIGN else {}),
            "refused": peer_sections.refused(page),
        }
        for page in peer_sections.REFUSALS
    },
}


def pages(sections: Mapping[str, Mapping[str, Callable[[], str]]]) -> dict[Path, str]:
    """Return pages with their generated sections up to date, and the picture of one of them."""
    picture = {peer_sections.VECTORS_PICTURE: peer_sections.vectors_picture()}
    return picture | {ROOT / name: fill((ROOT / name).read_text(), each) for name, each in sections.items()}


def fill(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """Return ``text`` with the content between the markers of each section replaced.

    Raises:
        ValueError: If the markers of a section are missing or appear more than once.
    """
    for name, make in sections.items():
        markers = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- {name} end -->)"
        content = f"\n{make()}\n"
        text, count = re.subn(markers, lambda found, new=content: found[1] + new + found[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name}: found {count} pairs of markers instead of one")
    return text
