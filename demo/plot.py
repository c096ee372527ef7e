# SPDX-License-Identifier: Apache-2.0
"""Plot of the demo: style score against steering strength, one line per layer, with plain sampling as baseline."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from demo.sweep import Cell


def plot(cells: list[Cell], path: Path) -> None:
    """Write the plot of a sweep to ``path``."""
    plain = next(cell for cell in cells if cell.layer is None)
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    figure, axes = plt.subplots(figsize=(7.5, 4.6), constrained_layout=True)
    colours = plt.get_cmap("viridis")
    for layer in layers:
        line = sorted((c for c in cells if c.layer == layer), key=lambda c: c.strength)
        # Strength 0 is plain sampling.
        points = sorted([*((c.strength, c) for c in line), (0.0, plain)], key=lambda p: p[0])
        axes.plot(
            [s for s, _ in points],
            [c.scores.mean() for _, c in points],
            marker="o",
            color=colours(layer / max(1, len(layers) - 1) * 0.9),
            label=f"layer {layer}",
        )
    axes.axhline(plain.scores.mean(), color="black", linestyle="--", linewidth=1, label="plain sampling")
    axes.set_xlabel("strength of the code-minus-prose vector at post_block")
    axes.set_ylabel("style score: 0 prose, 1 code (mean)")
    axes.set_ylim(0, 1)
    axes.legend(loc="best", fontsize=8, ncols=2)
    axes.set_title("Steering the demo model", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
