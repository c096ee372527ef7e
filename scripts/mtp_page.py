# SPDX-License-Identifier: Apache-2.0
"""Section of docs/reference/features.md about drafters with layers for multi-token prediction (MTP)."""

from __future__ import annotations

from pages import load_result, table

from tests.engine.mtp_models import EVERY_RUN, MODELS, NOT_COMPARABLE


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
