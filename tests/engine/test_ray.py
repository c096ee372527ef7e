# SPDX-License-Identifier: Apache-2.0
"""Tests of tensor and pipeline parallelism over two nodes of a Ray cluster against one rank in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.answers import params, prompt, run, tokens_of
from tests.engine.captures import capture, result
from tests.engine.conftest import close, opened
from tests.engine.ray_nodes import two_nodes
from tests.engine.test_parallel import KINDS, SMALL, as_on_one_rank, workload
from tests.tiny import LAYERS, direction, make_llm
from vllm_steer import Edit
from vllm_steer.engine.ray_executor import SteeringRayExecutor
from vllm_steer.settings import REGISTRY_VARIABLE

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray; `make setup` installs it"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
SECRET = "postgresql://user:s3cr3t@host/db"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def truth(tiny_llama: Path) -> list[Any]:
    with opened(tiny_llama) as llm:
        return run(llm, *workload()) + run(llm, *watched())


@pytest.fixture(scope="module", params=list(KINDS), ids=list(KINDS))
def llm(request: pytest.FixtureRequest, nodes: list[str], truth: list[Any], tiny_llama: Path) -> Iterator[Any]:
    from ray.util import remove_placement_group

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        patch.setenv(REGISTRY_VARIABLE, SECRET)
        engine = make_llm(tiny_llama, distributed_executor_backend="ray", **SMALL, **KINDS[request.param])
        patch.delenv(REGISTRY_VARIABLE)
        group = executor_of(engine).parallel_config.placement_group
        try:
            yield engine
        finally:
            close(engine)
            remove_placement_group(group)  # vLLM leaves it to the end of the process


def watched() -> tuple[list[Any], list[Any]]:
    """Return a steered request with readouts of two layers."""
    probes = {
        f"of{layer}": {"probe": direction(layer, 0.05), "point": "post_block", "layer": layer} for layer in (0, 2)
    }
    edits = [Edit(kind="add", point="post_block", layers=1, vector=direction(4))]
    return [prompt(*range(1, 20))], [params(8, readouts=probes, steering=edits)]


def executor_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor


@pytest.mark.feature("Ray", "steer", "capture")
def test_matches_one_rank(llm: Any, truth: list[Any], nodes: list[str]) -> None:
    """Catches workers without steering, rows of one stage taken for all, and both workers on one node."""
    executor = executor_of(llm)
    assert isinstance(executor, SteeringRayExecutor)
    assert {handle.node_id for handle in executor.ray_worker_handles} == set(nodes)
    as_on_one_rank(run(llm, *workload()), truth[:-1])
    found = result(run(llm, [prompt(*range(1, 40))], [params(4, capture=capture())])[0])
    assert len(found.sites) == 3 * LAYERS


def test_modules_and_global_steering(llm: Any) -> None:
    """Catches a module or global steering that does not reach the workers of another node."""
    site = {"post_block": {layer: direction(3) for layer in range(LAYERS)}}
    (inline,) = run(llm, [prompt(1, 2, 3)], [params(6, steering_vectors=site)])
    (plain,) = run(llm, [prompt(1, 2, 3)], [params(6)])
    assert tokens_of(inline) != tokens_of(plain)
    llm.steering.register("calm", base=site)
    (named,) = run(llm, [prompt(1, 2, 3)], [params(6, steering_modules=["calm"])])
    assert tokens_of(named) == tokens_of(inline)
    llm.steering.set(modules=["calm"])
    (steered,) = run(llm, [prompt(1, 2, 3)], [params(6)])
    llm.steering.clear()
    assert tokens_of(steered) == tokens_of(inline)


def test_readouts(llm: Any, truth: list[Any]) -> None:
    """Catches readouts that every rank sends or that no rank sends, and stages that answer with a part of them."""
    parallel = llm.llm_engine.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        with pytest.raises(ValueError, match="not supported with pipeline parallelism"):
            run(llm, *watched())
        return
    (found,) = run(llm, *watched())
    assert tokens_of(found) == tokens_of(truth[-1])
    for name, expected in truth[-1].outputs[0].readouts.items():
        assert found.outputs[0].readouts[name].positions.tolist() == expected.positions.tolist()
        assert np.abs(expected.values).max() > 0.01
        np.testing.assert_allclose(found.outputs[0].readouts[name].values, expected.values, atol=1e-3)


def variable_of(worker: Any) -> str | None:
    return os.environ.get(REGISTRY_VARIABLE)


def test_workers_do_not_get_the_registrys_password(llm: Any) -> None:
    """Catches a password that vLLM copies to every worker with the environment."""
    assert llm.collective_rpc(variable_of) == [None, None]
