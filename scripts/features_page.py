# SPDX-License-Identifier: Apache-2.0
"""Page docs/reference/features.md: the tests that prove steering and capture with each feature of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpu_page import gpu_outcome, gpu_tests
from pages import load_result, table

from tests.engine.mtp_models import EVERY_RUN, MODELS, NOT_COMPARABLE

SHOWN: Final[Mapping[str, str]] = {
    "a mix of all that one engine does": "random combinations of features ([`vllm-steer fuzz`](../design/oracle.md))",
    "draft models and EAGLE heads, which are not steered": "speculative decoding, draft model and EAGLE",
    "dummy batches of data parallel ranks": "empty batches of idle data-parallel ranks",
    "expert parallel (on CPU with the kernel's ids repaired)": "expert parallel (on a CPU; the test corrects the "
    "expert ids that crash vLLM's kernel there)",
    "micro-batching, context parallelism, fast prefill, elastic experts, pooling (refused)": "micro-batching, prefill "
    "context parallelism, fast prefill, elastic experts, pooling (refused)",
    "MTP layers, which are not steered": "speculative decoding, layers for multi-token prediction (MTP)",
    "plain code for steps without edits and captures": "[plain code](../guides/operating.md#plain-code): a second "
    "compilation without taps, for steps without edits and captures",
    "speculative decoding, draft model and EAGLE": "speculative decoding, draft model and EAGLE (the drafters are not "
    "steered)",
    "speculative decoding, layers for multi-token prediction (MTP)": "speculative decoding, layers for multi-token "
    "prediction (MTP) (these layers are not steered)",
    "streaming, engine in a process of its own": "streaming with `AsyncLLM`, whose engine is a separate process",
    "waiting for a place in the tables": "requests that wait for room in the tables, or for the capture budget",
}
"""Names of features that need more words on the page than in the marks of tests."""
OUTCOMES = {"passed": "", "skipped": " (not run: it needs a GPU)"}


def features() -> str:
    """Return the table of features."""
    record = load_result("features.json")
    proofs: dict[str, dict[str, list[str]]] = {}
    for test, entry in record.items():
        for name, *sides in entry["features"]:
            for side in sides:
                cell = proofs.setdefault(_shown(name), {}).setdefault(side, [])
                if (shown := _test(test, entry["outcome"])) not in cell:
                    cell.append(shown)
    rows = [
        (
            name,
            *("<br>".join(sides.get(side, ["no test"])) for side in ("steer", "capture")),
            "<br>".join(sides.get("react", [])),
        )
        for name, sides in sorted(proofs.items(), key=lambda item: item[0].strip("`[").lower())
    ]
    head = ("feature", "steer", "capture", "readouts, gates, stops")
    return table(head, rows)


def _shown(name: str) -> str:
    """Return the name of a feature on the page; features with one name share a row."""
    name = SHOWN.get(name, name)
    return SHOWN.get(name, name)


def _test(test: str, outcome: str) -> str:
    outcome = gpu_outcome(test) or outcome
    return f"`{test.removeprefix('tests/')}`{OUTCOMES.get(outcome, f' ({outcome})')}"


def drafters() -> str:
    """Return the table of the drafters whose outputs are compared."""
    rows = [
        (
            f"`{model.drafter}`",
            f"`{model.layer}`",
            "in every run" if name in EVERY_RUN else "in turn with other families",
        )
        for name, model in MODELS.items()
    ]
    return table(("drafter", "its decoder layer", "compared"), rows)


def not_comparable() -> str:
    """Return the table of the drafters that cannot be compared, and the names of those that no test compares."""
    registry = load_result("architectures.json")["registry"]
    names = {each["architecture"] for each in registry if each["kind"] == "drafter" and "MTP" in each["architecture"]}
    rest = sorted(names - {model.drafter for model in MODELS.values()} - NOT_COMPARABLE.keys())
    return (
        table(("drafter", "why"), [(f"`{name}`", why) for name, why in NOT_COMPARABLE.items()])
        + "\nNo test compares the outputs with these drafters of vLLM: "
        + f"{', '.join(f'`{name}`' for name in rest)}.\n"
    )


SECTIONS = {"features": features, "mtp": drafters, "mtp-not-comparable": not_comparable, "gpu": gpu_tests}
