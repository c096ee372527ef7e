# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with workers on two nodes of a Ray cluster. It starts two servers: only ``make test-all`` runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.shard import EVERYTHING
from tests.engine.conftest import opened
from tests.engine.ray_nodes import DEVICE, two_nodes
from tests.engine.test_parallel import KINDS
from tests.repo.tree import ROOT
from tests.server import server
from tests.server.requests import V
from vllm_steer import Client, SamplingParams, ServerError

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray; `make setup` installs it"),
    pytest.mark.skipif(not EVERYTHING, reason="starts two servers; `make test-all` runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
PROMPT = "Hello there"
SITE = {"post_block": {1: V}}
ROWS = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
PROBE = {"deep": {"probe": V, "point": "post_block", "layer": 2}}
# The server, its engine and Ray's workers start in processes of their own: see ray_nodes.py for the device.
NAMES_DEVICE = f"""\
import wrapt

@wrapt.when_imported("vllm.platforms.cpu")
def name_device(module):
    module.CpuPlatform.ray_device_key = {DEVICE!r}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return server.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: Path) -> list[Any]:
    """Return the text and rows of a plain and of a steered request on one rank."""
    with opened(model, skip_tokenizer_init=False, max_model_len=256) as llm:
        wanted = [
            SamplingParams(max_tokens=8, temperature=0, capture=ROWS, **fields)
            for fields in ({}, {"steering_vectors": SITE})
        ]
        return list(llm.generate([PROMPT] * 2, wanted, use_tqdm=False))


@pytest.fixture(scope="module", params=list(KINDS), ids=list(KINDS))
def client(
    request: pytest.FixtureRequest, truth: list[Any], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    import ray

    folder = tmp_path_factory.mktemp(request.param)
    (folder / "sitecustomize.py").write_text(NAMES_DEVICE)
    flags = [
        "--enable-steering",
        "--distributed-executor-backend",
        "ray",
        "--steering-registry",
        str(folder / "modules"),
    ]
    flags += [
        word for name, size in KINDS[request.param].items() for word in (f"--{name.replace('_', '-')}", str(size))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        patch.setattr(server, "START_TIMEOUT", 600.0)
        with two_nodes():
            patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
            for url in server.run_server(model, flags, folder / "log", worker_process=True):
                with Client(url) as made:
                    yield made


@pytest.mark.parametrize("fields", [{}, {"steering_vectors": SITE}], ids=["plain", "steered"])
def test_matches_one_rank(client: Client, truth: list[Any], fields: dict[str, Any]) -> None:
    """Catches workers without steering, and rows of one stage taken for all."""
    expected = truth[bool(fields)]
    found = client.complete(PROMPT, max_tokens=8, temperature=0, capture=ROWS, **fields)
    assert found.text == expected.outputs[0].text
    capture = found.choices[0].captures["memory"]
    assert len(capture.sites) == server.LAYERS
    for layer in range(server.LAYERS):
        rows = expected.outputs[0].capture_results["memory"].tensor("post_block", layer).numpy()
        np.testing.assert_allclose(capture.sites["post_block", layer].rows.numpy(), rows, atol=2e-3)
    assert truth[0].outputs[0].text != truth[1].outputs[0].text


def test_modules_and_global_steering(client: Client, truth: list[Any]) -> None:
    """Catches a module or global steering that does not reach the workers."""
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    plain, steered = (each.outputs[0].text for each in truth)
    client.register("calm", base=SITE)
    assert client.complete(PROMPT, steering_modules=["calm"], **fields).text == steered
    client.set(modules=["calm"])
    assert client.complete(PROMPT, **fields).text == steered
    client.clear()
    assert client.complete(PROMPT, **fields).text == plain


def test_readouts(client: Client, request: pytest.FixtureRequest) -> None:
    """Catches readouts that are lost, and a server that accepts those that no stage can answer."""
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "readouts": PROBE}
    if "pipeline" in request.node.callspec.id:
        with pytest.raises(ServerError, match="pipeline parallelism"):
            client.complete(PROMPT, **fields)
        return
    values = client.complete(PROMPT, **fields).choices[0].readouts["deep"].values
    assert np.abs(np.asarray(values)).max() > 0.01
