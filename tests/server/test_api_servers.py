# SPDX-License-Identifier: Apache-2.0
"""Two API server processes on one port: clients can use either of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load

from tests.server.hostile.disconnects import ROUND_BYTES, DisconnectingClients, resident_bytes
from tests.server.server import HIDDEN, MODEL, run_server
from vllm_steer import audit
from vllm_steer.fs.shared_tempdir import LOCK_FILES
from vllm_steer.metrics.definitions import METRICS_BY_KEY, PREFIX
from vllm_steer.request import pack_vector

PROMPT = "Hello there"
ROWS, CAPTURE_MIB = 32, 8
"""Size of the engine's tables. If a few clients in a hundred leaked their rows, the tables would fill up."""
ROUNDS = 1000
LARGE = {"memory": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log file of the server's processes."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def server(model: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield the server's URL and its folder of temporary files, which must be empty afterwards."""
    temporary = tmp_path_factory.mktemp("temporary")
    flags = ["--enable-steering", "--api-server-count", "2", "--capture-inline-kib", "0", "--capture-expiry-s", "600"]
    limits = {"max-rows": ROWS, "max-vectors": ROWS, "max-segments": 2 * ROWS, "capture-mib": CAPTURE_MIB}
    for name, limit in {**limits, "queue-timeout": 60}.items():
        flags += [f"--steering-{name}", str(limit)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        # Else each thread of a pool may keep a heap of its own, and what is resident says little of what is held.
        patch.setenv("MALLOC_ARENA_MAX", "2")
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        running = run_server(model, flags, log)
        url = next(running)
    wait_for_both_servers(url)
    yield url, temporary
    running.close()  # type: ignore[attr-defined]
    assert not list(temporary.glob("vllm-steer-*"))


def request_on_new_connection(method: str, url: str, **fields: Any) -> tuple[int, httpx.Response]:
    """Send a request on a new connection and return the process that served it, with its response."""
    # Without verification, which would load all certificates for each connection.
    with httpx.Client(timeout=60, verify=False) as client, client.stream(method, url, **fields) as response:
        client_port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        (process,) = (
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.raddr and connection.raddr.port == client_port and connection.laddr.port == response.url.port
        )
        response.read()
    return process, response


def wait_for_both_servers(url: str) -> None:
    """Wait for the second process; on a busy machine it starts much later than the first."""
    processes: set[int] = set()
    for _ in range(600):
        processes.add(request_on_new_connection("GET", f"{url}/health")[0])
        if len(processes) == 2:
            return
        time.sleep(0.2)
    raise AssertionError(f"only one server has answered: {processes}")


def test_captures_are_available_at_every_api_server(server: tuple[str, Path]) -> None:
    """Catches stored captures that only the process that wrote them can return, expire or delete."""
    url, temporary = server
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "capture": LARGE}
    kept_by: dict[str, int] = {}
    while len(set(kept_by.values())) < 2:
        process, response = request_on_new_connection("POST", f"{url}/v1/completions", json=body)
        result = response.json()["choices"][0]["capture_results"]["memory"]
        assert result["status"] == "ok", result
        kept_by[result["id"]] = process
        assert len(kept_by) < 400, "the kernel gives every connection to one process"
    for handle, writer in kept_by.items():
        readers: set[int] = set()
        while readers <= {writer}:
            reader, response = request_on_new_connection("GET", f"{url}/v1/captures/{handle}")
            assert response.status_code == 200
            assert load(response.content)["post_block.2"].shape[0] == len(PROMPT)
            readers.add(reader)
    (folder,) = (path for path in temporary.glob("vllm-steer-*") if "registry" not in path.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    for handle in kept_by:
        assert request_on_new_connection("DELETE", f"{url}/v1/captures/{handle}")[1].status_code == 204
        assert {request_on_new_connection("GET", f"{url}/v1/captures/{handle}")[1].status_code for _ in range(6)} == {
            404
        }


SHOWN = (PREFIX, "vllm:request_success")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: str) -> Samples:
    """Return values by name and labels, without labels that are the same for all samples."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def scrape_both(url: str) -> Samples:
    """Return the metrics once both processes agree. The metrics of a step arrive shortly after its response."""
    for _ in range(50):
        found: dict[int, Samples] = {}
        while len(found) < 2:
            process, response = request_on_new_connection("GET", f"{url}/metrics")
            found[process] = {k: v for k, v in samples_of(response.text).items() if k[0].startswith(SHOWN)}
        one, other = found.values()
        if one == other:
            return one
    raise AssertionError({key: (one.get(key), other.get(key)) for key in one | other if one.get(key) != other.get(key)})


def counted(samples: Samples, short: str, suffix: str = "", **labels: str) -> float:
    return samples.get((METRICS_BY_KEY[short].name + suffix, tuple(sorted(labels.items()))), 0.0)


def test_metrics_cover_both_api_servers(server: tuple[str, Path]) -> None:
    """Catches metrics of one process only, wrong gauges, and engine metrics lost or counted twice.

    The engine sends the metrics of each step to one of the two processes. Gauges must not be summed over processes.
    """
    url, _ = server
    before = scrape_both(url)
    steering = {"steering_vectors": {"post_block": {"1": [1.0] * HIDDEN}}}
    capture = {"capture": {"memory": {"hooks": {"post_block": [2]}, "positions": "all_prompt"}}}
    sent = {"plain": {}, "steered": steering, "captured": capture, "steered_captured": {**steering, **capture}}
    number: dict[str, int] = dict.fromkeys(sent, 0)
    for kind, fields in sent.items():
        processes: set[int] = set()
        while len(processes) < 2:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
            process, response = request_on_new_connection("POST", f"{url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            processes.add(process)
            number[kind] += 1
    wrong = {"model": MODEL, "prompt": PROMPT, "steering_vectors": {"post_block": {"99": [1.0] * HIDDEN}}}
    refusals = [request_on_new_connection("POST", f"{url}/v1/completions", json=wrong)[1].status_code for _ in range(3)]
    assert refusals == [400] * 3
    body = {"base": {"post_block": {"1": [0.5] * HIDDEN}}}
    epoch = request_on_new_connection("POST", f"{url}/v1/steering/set", json=body)[1].json()["epoch"]
    one = scrape_both(url)
    epoch_cleared = request_on_new_connection("POST", f"{url}/v1/steering/clear")[1].json()["epoch"]

    assert one["vllm:request_success_total", (("finished_reason", "length"),)] > 0

    def grown(short: str, suffix: str = "", **labels: str) -> float:
        return counted(one, short, suffix, **labels) - counted(before, short, suffix, **labels)

    assert {kind: grown("requests", "_total", kind=kind) for kind in sent} == number
    assert grown("edits", "_total", kind="add") == number["steered"] + number["steered_captured"]
    assert grown("refused_requests", "_total", status="400", field="steering_vectors") == 3
    rows = len(PROMPT) * (number["captured"] + number["steered_captured"])
    assert grown("captured_rows", "_total") == rows
    assert grown("captured_bytes", "_total") == rows * 4 * HIDDEN
    results = {s: grown("consumer_results", "_total", consumer="memory", status=s) for s in ("ok", "partial", "error")}
    assert results == {"ok": number["captured"] + number["steered_captured"], "partial": 0, "error": 0}
    assert counted(one, "consumer_queue", consumer="memory") == 0
    assert counted(one, "store_bytes") > rows * 4 * HIDDEN
    assert (counted(one, "registry_epoch"), counted(one, "global_steering")) == (epoch, 1)
    assert (epoch_cleared, counted(scrape_both(url), "global_steering")) == (epoch + 1, 0)
    for part in ("scheduler", "worker"):
        assert grown("step_seconds", "_count", part=part) >= 2 * (sum(number.values()) - number["plain"])
    assert counted(one, "table_used", table="vectors") == counted(one, "requests_admitted") == 0
    assert counted(one, "table_size", table="rows") == ROWS


def audited(log: Path, name: str) -> list[dict[str, Any]]:
    """Return the audit records about ``name`` in the log of the server's processes."""
    lines = [line[line.index('{"time"') :] for line in log.read_text().splitlines() if '{"time"' in line]
    return [record for record in map(json.loads, lines) if record["name"] == name]


def test_logs_each_change_once(server: tuple[str, Path], log: Path) -> None:
    """Catches a change logged by both processes or by none, and a record with a wrong client address."""
    url, _ = server
    content = {"name": "logged", "base": {"post_block": {"1": [1.0] * HIDDEN}}}
    digest = request_on_new_connection("POST", f"{url}/v1/steering/modules", json=content)[1].json()["digest"]
    behind = {"x-forwarded-for": "192.0.2.9"}  # a proxy on the same host is believed
    assert (
        request_on_new_connection("DELETE", f"{url}/v1/steering/modules/logged", headers=behind)[1].status_code == 200
    )
    deadline = time.monotonic() + 10
    while len(records := audited(log, "logged")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [(r["event"], r["who"], r["address"], r["digests"]) for r in records] == [
        ("register", audit.ANONYMOUS, "127.0.0.1", [digest]),
        ("delete", audit.ANONYMOUS, "192.0.2.9", [digest]),
    ]
    assert records[1]["epoch_after"] == records[0]["epoch_after"] + 1 == records[0]["epoch_before"] + 2


def stored_files(temporary: Path) -> list[str]:
    """Return the names of the files in the capture store."""
    names = [path.name for path in temporary.glob("vllm-steer-*/*") if "registry" not in path.parent.name]
    return [name for name in names if name not in LOCK_FILES]


def whole_table(seed: int) -> dict[str, Any]:
    """Return a request that needs every row and vector of the engine's tables: another vector at each token."""
    vectors = np.random.default_rng(seed).standard_normal((ROWS, HIDDEN)).astype("f4")
    edits = [
        {"kind": "add", "point": "post_block", "layers": 1, "vector": pack_vector(vector), "tokens": [token]}
        for token, vector in enumerate(vectors)
    ]
    return {"model": MODEL, "prompt": "x" * ROWS, "max_tokens": 1, "steering": edits}


@pytest.mark.failure(20)
@pytest.mark.timeout(900)
async def test_disconnects_leave_nothing_behind(server: tuple[str, Path]) -> None:
    """Catches rows, vectors, memory or files not released after clients disconnect during a capture.

    Later rounds have more clients at a time, so that some disconnect while they wait for room.
    """
    url, temporary = server
    port = httpx.URL(url).port
    assert port is not None
    leavers = DisconnectingClients(url)
    for first, last, concurrency in ((0, 100, 2), (100, 300, 8), (300, ROUNDS // 2, 24)):
        await leavers.rounds(first, last, concurrency)
    half_way = resident_bytes(port)
    await leavers.rounds(ROUNDS // 2, ROUNDS, 24)
    with httpx.Client(base_url=url, timeout=120) as client:
        # All rows and vectors are free: else these wait until they are refused.
        for seed in range(2):
            response = client.post("/v1/completions", json=whole_table(seed))
            assert response.status_code == 200, response.text
        # So is the memory for captured rows, of which the rounds used hundreds of times the budget.
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "capture": LARGE}
        result = client.post("/v1/completions", json=body).json()["choices"][0]["capture_results"]["memory"]
        assert result["status"] == "ok"
        assert len(stored_files(temporary)) > 0, "this looks in the wrong folder"
        assert client.delete(f"/v1/captures/{result['id']}").status_code == 204
    # A response may be sent between a client's disconnect and the turn of the event loop that detects it. Their number
    # depends on the machine: up to 17 of a thousand clients were observed.
    assert len(stored_files(temporary)) <= ROUNDS // 10, (leavers.answered, leavers.crossed)
    assert leavers.answered < ROUNDS // 2, "most clients disconnected too late"
    # Less than the rows of every fourth round, over all processes. Allocators alone grow by up to half of that.
    assert resident_bytes(port) - half_way < ROUNDS // 2 * ROUND_BYTES // 2
