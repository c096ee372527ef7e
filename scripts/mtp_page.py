# SPDX-License-Identifier: Apache-2.0
"""Section of docs/reference/features.md about drafters with layers for multi-token prediction (MTP)."""

from __future__ import annotations

from pages import load_result, table

from tests.engine.mtp_models import EVERY_RUN, MODELS, NOT_COMPARABLE

TEXT = """
## Layers for multi-token prediction

With `speculative_config={"method": "mtp", ...}`, vLLM drafts with layers of the target's checkpoint. They read the
target's last hidden states, with all edits. They are not tapped: they have no edits of their own, are not captured, and
do not count as layers. The target decides about every token. Tokens, captured rows at all hook points, readouts, gates
and stops are compared with the same requests without drafts, for these drafters of vLLM
(`engine/test_speculation.py::test_mtp_layers`, on a CPU, with random weights):

"""
NOT = """
The engine also starts with other drafters, because it taps no layer of a drafter. With these, the comparison is not
possible on a CPU: vLLM's outputs differ from those without drafts, also without steering.

"""
REST = """
No test compares the outputs with these drafters of vLLM: {names}.
"""


def mtp_drafters() -> str:
    registry = load_result("architectures.json")["registry"]
    names = {
        entry["architecture"] for entry in registry if entry["kind"] == "drafter" and "MTP" in entry["architecture"]
    }
    rows = [
        (
            f"`{model.drafter}`",
            f"`{model.layer}`",
            "in every run" if name in EVERY_RUN else "in turn with other families",
        )
        for name, model in MODELS.items()
    ]
    rest = sorted(names - {model.drafter for model in MODELS.values()} - NOT_COMPARABLE.keys())
    reasons = [(f"`{name}`", why) for name, why in NOT_COMPARABLE.items()]
    return (
        TEXT
        + table(("drafter", "its decoder layer", "compared"), rows)
        + NOT
        + table(("drafter", "why"), reasons)
        + REST.format(names=", ".join(f"`{name}`" for name in rest))
    )
