# SPDX-License-Identifier: Apache-2.0
"""Picture of the demo: mood of the text against its perplexity, for each layer and dose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from demo.study import LAYERS, MAX_PERPLEXITY


def plot(results: dict[str, Any], path: Path) -> None:
    """Write the picture of the choice of layer and dose to ``path``."""
    plain, *cells = results["doses"]
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    limit, last = MAX_PERPLEXITY * plain["perplexity"], 1.05 * max(cell["perplexity"] for cell in cells)
    axes.axvspan(limit, max(last, 1.1 * limit), color="0.93", label="incoherent: not chosen")
    for index, layer in enumerate(LAYERS):
        line = sorted((c for c in (plain, *cells) if c["layer"] in (None, layer)), key=lambda cell: cell["dose"])
        colour = plt.get_cmap("viridis")(0.85 * index / max(1, len(LAYERS) - 1))
        axes.plot(
            [c["perplexity"] for c in line], [c["mood"] for c in line], marker="o", color=colour, label=f"layer {layer}"
        )
        for cell in line:
            if cell["layer"] is not None:
                where = (cell["perplexity"], cell["mood"])
                axes.annotate(f"{cell['dose']:+}", where, fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.plot(plain["perplexity"], plain["mood"], "k*", markersize=16, label="plain", linestyle="none")
    axes.set_xlabel("perplexity of the text under the model without steering")
    axes.set_ylabel("mood: happy minus sad words per hundred")
    axes.legend(fontsize=8)
    axes.set_title(f"{results['model']}, steered between sad and happy", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
