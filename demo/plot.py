# SPDX-License-Identifier: Apache-2.0
"""Picture of the demo: mood against perplexity for each layer and dose, with random directions as the control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from demo.study import MAX_PERPLEXITY, Cell


def plot(cells: Sequence[Cell], random: Sequence[Cell], path: Path) -> None:
    """Write the picture of a grid to ``path``."""
    (plain,) = [cell for cell in cells if cell.direction is None]
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    limit = MAX_PERPLEXITY * plain.perplexity
    axes.axvspan(limit, 4 * limit, color="0.93", label="incoherent: not chosen")
    layers = sorted({cell.direction.layer for cell in cells if cell.direction is not None})
    for index, layer in enumerate(layers):
        line = sorted((c for c in cells if c.direction and c.direction.layer == layer), key=lambda cell: cell.dose)
        line = sorted([*line, plain], key=lambda cell: cell.dose)
        colour = plt.get_cmap("viridis")(0.85 * index / max(1, len(layers) - 1))
        axes.plot([c.perplexity for c in line], [c.mood for c in line], marker="o", color=colour, label=f"layer {layer}")
    axes.scatter(
        [c.perplexity for c in random], [c.mood for c in random], marker="x", color="crimson", label="random directions"
    )
    axes.plot(plain.perplexity, plain.mood, marker="*", markersize=16, color="black", label="plain", linestyle="none")
    axes.set_xlim(0.9 * plain.perplexity, 1.05 * max(cell.perplexity for cell in (*cells, *random)))
    axes.set_xlabel("perplexity of the text under the model without steering")
    axes.set_ylabel("mood: happy minus sad words per hundred")
    axes.legend(fontsize=8)
    axes.set_title("SmolLM2-135M-Instruct, steered from sad to happy", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
