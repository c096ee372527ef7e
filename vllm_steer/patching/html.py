# SPDX-License-Identifier: Apache-2.0
"""Grids of a sweep as an HTML page without scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm_steer.patching.result import PatchingResult

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
    reasons = {cell[1:]: reason for cell, reason in result.errors.items()}
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
