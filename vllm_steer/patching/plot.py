# SPDX-License-Identifier: Apache-2.0
"""Heat maps of a sweep, and its grids as an HTML page without scripts."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_steer.errors import install_hint

if TYPE_CHECKING:
    from vllm_steer.patching.result import PatchingResult


def plot(result: PatchingResult, path: Path, metric: str) -> None:
    """Write one heat map per point; cells within the noise have a dot, missing cells are grey.

    Args:
        result: The sweep.
        path: Image file; its suffix selects the format.
        metric: Name of the metric.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib; {install_hint('patching')}") from error
    info = result.info
    rows, columns, points = len(info.layers), len(info.column_names), len(info.points)
    width, height = max(3.2, 0.42 * columns + 1.8), max(2.4, 0.26 * rows + 1.9)
    figure = Figure(figsize=(width * points, height), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, points, squeeze=False)[0]
    grids = [result.grid(point, metric) for point in info.points]
    # Centred on the unpatched run, so that cells without effect are white.
    centre = float(result.baseline(metric).mean())
    known = [np.abs(grid - centre)[~np.isnan(grid)] for grid in grids]
    reach = max((float(each.max()) for each in known if each.size), default=0.0) or 1.0
    for axis, point, grid in zip(axes, info.points, grids, strict=True):
        axis.set_facecolor("0.8")
        image = axis.imshow(
            grid, cmap="RdBu_r", vmin=centre - reach, vmax=centre + reach, aspect="auto", origin="lower",
            interpolation="nearest",
        )  # fmt: skip
        marked = np.argwhere(result.below_floor(point, metric))
        axis.scatter(marked[:, 1], marked[:, 0], s=3, color="0.55", linewidths=0)
        names = [name.replace("\n", "⏎").replace("$", r"\$") for name in info.column_names]
        axis.set_xticks(range(columns), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
        axis.set_yticks(range(rows), info.row_names, fontsize=7)
        axis.set_title(point, fontsize=9)
    axes[0].set_ylabel("layer", fontsize=8)
    bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.9)
    bar.set_label(metric, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    drawn = f", random subspace {result.random_control(metric):.2g}" if info.random_control else ""
    figure.suptitle(
        f"{info.direction}, {info.corruption}; noise floor {result.noise_floor(metric):.2g} (dots: within it){drawn}",
        fontsize=8,
    )
    figure.savefig(path)


_STYLE = (
    "body{font-family:sans-serif}table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 5px;font-size:12px;"
    "text-align:right}th.c{writing-mode:vertical-rl;transform:rotate(180deg);white-space:pre}td.f{color:#888}"
    "td.n{background:#ccc}"
)


def page(result: PatchingResult, metric: str) -> str:
    """Return a page with one table per point.

    Cells within the noise have grey numbers. Failed cells are grey and show the reason when pointed at.
    """
    info = result.info
    reasons = {cell[1:]: reason for cell, reason in (*result.not_run.items(), *result.errors.items())}
    centre = float(result.baseline(metric).mean())
    grids = {point: result.grid(point, metric) for point in info.points}
    reach = max((float(np.nanmax(np.abs(g - centre))) for g in grids.values() if not np.isnan(g).all()), default=1.0)
    parts = [
        "<!doctype html><meta charset=utf-8><title>Activation patching</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>Activation patching: {escape(info.model)}</h1>",
        f"<p>{escape(info.direction)}; {escape(info.corruption)}; metric {escape(metric)}; {len(info.pairs)} pairs; "
        f"noise floor {result.noise_floor(metric):.3g}; control {result.control(metric):.3g}; "
        + (f"random subspace {result.random_control(metric):.3g}; " if info.random_control else "")
        + f"prefix cache {result.cache_hit_rate:.0%}</p>",
    ]
    for number, (point, grid) in enumerate(grids.items()):
        marked = result.below_floor(point, metric)
        parts.append(f"<h2>{escape(point)}</h2><table><tr><th>layer</th>")
        parts += [f"<th class=c>{escape(name)}</th>" for name in info.column_names]
        parts.append("</tr>")
        for row in reversed(range(len(grid))):
            parts.append(f"<tr><th>{escape(info.row_names[row])}</th>")
            for column, value in enumerate(grid[row].tolist()):
                if np.isnan(value):
                    reason = reasons.get((number, row, column), "not run")
                    parts.append(f'<td class=n title="{escape(reason, quote=True)}"></td>')
                    continue
                share = (value - centre) / (reach or 1.0)
                colour = "214,96,77" if share > 0 else "67,147,195"
                kind = " class=f" if marked[row, column] else ""
                parts.append(f'<td{kind} style="background:rgba({colour},{abs(share):.2f})">{value:.2f}</td>')
            parts.append("</tr>")
        parts.append("</table>")
    return "".join(parts)
