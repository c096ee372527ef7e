# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts use existing metrics and labels, and show every metric."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.repo.tree import read
from vllm_steer.metrics.definitions import METRICS, PREFIX, Metric

DASHBOARD = json.loads(read("observability/grafana.json"))
ALERTS = yaml.safe_load(read("observability/alerts.yml"))["groups"]
GUIDE = read("docs/guides/operating.md")
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def series_of(metric: Metric) -> dict[str, frozenset[str]]:
    """Return the label names by the name of each scraped time series."""
    labels, bucket = frozenset(metric.labels), {"_bucket": {"le"}}
    return {f"{metric.name}{ending}": labels | bucket.get(ending, set()) for ending in ENDINGS[metric.type]}


SERIES = {name: labels for metric in METRICS for name, labels in series_of(metric).items()}
VALUES = {(n, label): values for m in METRICS for n in series_of(m) for label, values in m.labels.items() if values}

_SERIES = re.compile(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
_BY = re.compile(r"\bby \(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from (rule["expr"] for group in ALERTS for rule in group["rules"])


def unknown_names(expression: str) -> list[str]:
    """Return the metrics and labels in ``expression`` that are not defined."""
    found = []
    known: set[str] = set()
    for name, matchers in _SERIES.findall(expression):
        if name not in SERIES:
            found.append(name)
            continue
        known |= SERIES[name]
        for label, value in _MATCHER.findall(matchers):
            if label not in SERIES[name]:
                found.append(f"{name}: {label}")
            elif not value.startswith("$") and value not in VALUES.get((name, label), (value,)):
                found.append(f"{name}: {label}={value}")
    by = [label.strip() for group in _BY.findall(expression) for label in group.split(",")]
    found += [f"by {label}" for label in by if label not in known]
    return found


@pytest.mark.parametrize("expression", [*expressions()])
def test_expressions_use_defined_names(expression: str) -> None:
    """Catches a panel or alert that stays empty because a metric or label has another name."""
    assert _SERIES.search(expression)
    assert unknown_names(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "rate(vllm_steer:requests[5m])",
        'vllm_steer:store_bytes{model_name="m"}',
        'vllm_steer:requests_waiting{reason="colour"}',
        "sum by (kind) (vllm_steer:table_used)",
        "sum by (le, part) (vllm_steer:step_seconds_sum)",
    ],
)
def test_unknown_names_are_found(expression: str) -> None:
    """Negative control: expressions with one unknown name each."""
    assert len(unknown_names(expression)) == 1


def test_dashboard_shows_every_metric() -> None:
    """Catches a metric that is collected but not shown."""
    shown = {name for panel in panels() for t in panel["targets"] for name, _ in _SERIES.findall(t["expr"])}
    assert [metric.name for metric in METRICS if not shown & set(series_of(metric))] == []


def test_panels_have_distinct_ids_and_positions() -> None:
    """Catches panels with the same id or position, of which Grafana shows only one."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(ids)) == len(set(places)) == len(ids)


def test_guide_documents_every_alert() -> None:
    """Catches an alert without documentation."""
    alerts = [rule["alert"] for group in ALERTS for rule in group["rules"]]
    assert alerts and [name for name in alerts if f"`{name}`" not in GUIDE] == []
