# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/steering/capabilities``, on a small application and on vLLM's server."""

from __future__ import annotations

import httpx
from fastapi import FastAPI

from tests.server.fakes import REPORT, FakeEngine
from tests.server.server import HIDDEN, LAYERS
from vllm_steer.config import SteeringConfig
from vllm_steer.engine.report import CapabilityReport, make_report, merge_facts
from vllm_steer.frontend.context import ensure_engine_context
from vllm_steer.limits import ENGINE_LIMITS
from vllm_steer.points import OPTIONAL_POINTS, POINT_NAMES, points_on
from vllm_steer.server.routes.capabilities import ROUTE, add_capabilities_route


async def ask(engine: FakeEngine) -> httpx.Response:
    app = FastAPI()
    context = await ensure_engine_context(engine)
    assert context is not None
    add_capabilities_route(app, context)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get(ROUTE)


async def test_reports_refused_layers_with_reasons() -> None:
    """Catches a report that promises what requests are then refused."""
    report = (await ask(FakeEngine())).json()
    points = {point["name"]: point for point in report["points"]}
    assert list(points) == list(POINT_NAMES)
    assert points["post_attn"]["refused"] == {"2": "this block is parallel"}
    assert [points[name]["edits"] for name in points_on(())] == [True, False, True]
    for name in OPTIONAL_POINTS:
        off = points[name]
        assert (off["on"], off["edits"], off["reads"]) == (False, False, False)
        assert off["switched_on_by"] == f"--steering-points {name}"
    assert all(points["pre_attn"]["names_elsewhere"].values())
    assert set(report["limits"]) == set(ENGINE_LIMITS)


async def test_reports_missing_capture_support() -> None:
    """Catches points reported as readable under pipeline parallelism, where every capture is refused."""
    engine = FakeEngine()
    engine.vllm_config.parallel_config.pipeline_parallel_size = 2
    report = CapabilityReport.model_validate((await ask(engine)).json())
    assert report.no_capture is not None
    assert [point.reads for point in report.points] == [False] * len(POINT_NAMES)
    assert report.points[0].edits


def test_merges_the_facts_of_all_ranks() -> None:
    """Catches layers of later pipeline stages that are lost, and a failed self-check hidden by another rank's."""
    recipe = {"layer": "a.Layer", "stream": "pair", "mid": "norm", "layers": [0, 1]}
    ranks = [
        {**REPORT, "recipes": [recipe], "self_check": {"ran": True}, "altered": {"attn_out": [1], "mlp_out": []},
         "mixed_head": None},
        {**REPORT, "recipes": [{**recipe, "layers": [2, 3]}], "self_check": {"ran": False}, "unproven": ["why"],
         "altered": {"attn_out": [2], "mlp_out": [3]}, "mixed_head": "mixed"},
    ]  # fmt: skip
    facts = merge_facts(ranks)
    assert facts["recipes"] == [{**recipe, "layers": [0, 1, 2, 3]}]
    assert facts["unproven"] == ["why"]
    assert facts["altered"] == {"attn_out": [1, 2], "mlp_out": [3]}
    assert facts["mixed_head"] == "mixed"
    assert facts["self_checks"] == [{"ran": True}, {"ran": False}]
    assert facts["no_plain_code"] is None


def test_reports_why_a_rank_runs_taps_in_idle_steps() -> None:
    """Catches a reason that is lost if only one rank has it, and plain code reported although it is not in use."""
    ranks = [{**REPORT, "self_check": {"ran": True}, "no_plain_code": reason} for reason in (None, "why")]
    for facts, reason in ((merge_facts(ranks), "why"), (merge_facts(ranks[:1]), None)):
        report = make_report({**facts, "vllm": "0"}, SteeringConfig())
        assert (report.plain_code, report.no_plain_code) == (reason is None, reason)
    assert make_report({"vllm": "0"}, SteeringConfig()).plain_code is None


def test_reports_the_capabilities_of_a_real_server(client: httpx.Client) -> None:
    """Catches a route that a real server lacks, and facts lost on the way to it."""
    response = client.get(ROUTE)
    assert response.status_code == 200
    report = CapabilityReport.model_validate(response.json())
    assert (report.architecture, report.num_layers, report.hidden_size) == ("LlamaForCausalLM", LAYERS, HIDDEN)
    assert report.logprobs_mode == "raw_logprobs"
    (recipe,) = report.recipes
    assert (recipe.layer_class.rpartition(".")[2], recipe.layers) == ("LlamaDecoderLayer", list(range(LAYERS)))
    assert [point.name for point in report.points if point.edits and point.reads] == list(points_on(()))
    (check,) = report.self_checks
    assert check["ran"] and check["conclusive"] == 2 * LAYERS
    assert sum(report.table_bytes.values()) > 0
    assert report.problem is None and report.unproven == []
    assert report.plain_code is False and report.no_plain_code == "vLLM does not compile the model"
