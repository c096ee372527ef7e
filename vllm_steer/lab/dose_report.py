# SPDX-License-Identifier: Apache-2.0
"""Picture and page of a dose study."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from vllm_steer.errors import install_hint

if TYPE_CHECKING:
    from vllm_steer.lab.dose_result import DoseResult

_STYLE = (
    "body{font-family:sans-serif;max-width:72em;margin:1em auto}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:2px 8px;font-size:13px;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}"
    "img{max-width:100%}"
)
_COLUMNS = ("kind", "layer", "dose", "effect", "low", "high", "wrong_way", "perplexity", "repetition", "length")
_SHOWN = 6
"""Prompts whose texts are on the page."""


def picture(result: DoseResult, form: str) -> bytes:
    """Return the picture in a format of matplotlib.

    Left: effect against dose at the chosen layer on the held-out prompts, with the band of the controls. Right: effect
    against perplexity of all layers and doses on the prompts that choose.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib; {install_hint('lab')}") from error
    figure = Figure(figsize=(11, 4.4), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _effects(left, result)
    _costs(right, result)
    figure.suptitle(f"{result.study.model}: {result.outcome}".replace("$", r"\$"), fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format=form)
    return out.getvalue()


def _effects(axes: Any, result: DoseResult) -> None:
    doses, (layer, dose) = result.study.doses, result.chosen
    line, others = [result.at(each) for each in doses], [result.controls(each) for each in doses]
    low, high = ([bound(c.effect for c in each) for each in others] for bound in (min, max))
    axes.fill_between(doses, low, high, color="0.85", label=f"{len(others[0])} controls of the same length")
    bars = [[c.effect - c.low for c in line], [c.high - c.effect for c in line]]
    label = "the vector, with 95 % intervals"
    axes.errorbar(doses, [c.effect for c in line], bars, marker="o", capsize=3, color="tab:blue", label=label)
    axes.plot(doses, [result.at(-each).effect for each in doses], "--", color="tab:red", label="the opposite sign")
    axes.axvline(dose, color="0.5", linewidth=0.8)
    if result.range is not None:
        axes.axvspan(*result.range, color="tab:green", alpha=0.12, label="holds, and text is coherent")
    wrong = axes.twinx()
    wrong.bar(doses, [c.wrong_way for c in line], width=0.02 * max(doses), color="tab:orange", alpha=0.5)
    wrong.set_ylim(0, 2)
    wrong.set_ylabel("share moved the wrong way (bars)", fontsize=8)
    axes.set_xlabel(f"dose at layer {layer}")
    axes.set_ylabel(f"change of the score on {line[0].prompts} held-out prompts")
    axes.legend(fontsize=7)


def _costs(axes: Any, result: DoseResult) -> None:
    from vllm_steer.lab.dose_result import MAX_PERPLEXITY

    for layer in result.study.layers:
        line = sorted((c for c in result.choice if c.layer == layer), key=lambda cell: cell.dose)
        axes.plot([c.perplexity for c in line], [c.effect for c in line], marker="o", label=f"layer {layer}")
        for cell in line:
            where = (cell.perplexity, cell.effect)
            axes.annotate(f"{cell.dose:g}", where, fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.axvline(MAX_PERPLEXITY, color="0.5", linewidth=0.8)
    axes.plot(1, 0, "k*", markersize=12)
    axes.set_xlabel("perplexity without steering, in that of plain text")
    axes.set_ylabel("change of the score on the prompts that choose")
    if len(result.study.layers) <= 12:
        axes.legend(fontsize=7)


def page(result: DoseResult) -> str:
    """Return a page without scripts and without other files."""
    image = base64.b64encode(picture(result, "png")).decode()
    study = [[name, str(getattr(result.study, name))] for name in result.study.__struct_fields__]
    return "".join(
        (
            "<!doctype html><meta charset=utf-8><title>Dose</title>",
            f"<style>{_STYLE}</style><h1>{escape(result.study.model)}</h1><p><b>{escape(result.verdict)}</b></p>",
            f'<img alt="effect against dose and against perplexity" src="data:image/png;base64,{image}">',
            "<h2>The chosen layer on the held-out prompts</h2>" + _cells(result.held_out),
            "<h2>All layers on the prompts that choose</h2>" + _cells(result.choice),
            "<h2>Texts</h2>" + _texts(result),
            "<h2>Study</h2>" + _table(("field", "value"), study),
        )
    )


def _cells(cells: Iterable[Any]) -> str:
    rows = ([getattr(cell, name) for name in _COLUMNS] for cell in cells)
    return _table(_COLUMNS, ([f"{v:.3g}" if isinstance(v, float) else str(v) for v in row] for row in rows))


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    body = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>" + "".join(body) + "</table>"


def _texts(result: DoseResult) -> str:
    layer, dose = result.chosen
    text = {sample.key: sample.text for sample in result.samples}
    rows = [
        [text["plain", 0, -1, 0.0, n], text["vector", 0, layer, dose, n], text["vector", 0, layer, -dose, n]]
        for n in result.study.held_out[:_SHOWN]
    ]
    return _table(("plain", f"dose {dose:g}", f"dose {-dose:g}"), rows)
