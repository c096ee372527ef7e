# SPDX-License-Identifier: Apache-2.0
"""The fields and routes of RhizoNymph/vllm on a server that also serves vllm-lens, compared with HF Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.peers.conftest import forwarded, hidden_states, steered_states
from tests.peers.test_rhizonymph import inline, packed
from tests.server.server import MODEL
from vllm_steer import open_captures
from vllm_steer.client.responses import parse_completion

pytestmark = pytest.mark.slow
PROMPT = "gates open at generated tokens of a prompt in two chunks"
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
ROWS = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
APPLY = {"kind": "add", "steer": {"hook": "post_block", "layer": 1, "vector": ROWS[1].tolist()}}
CAPTURE = {"memory": {"hooks": {"post_block": {"layers": [2]}}, "positions": "all"}}


def post(url: str, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_gates_patches_and_vectors_act_as_in_hf(url: str, hf: Any) -> None:
    """Catches a gate that lags or is always open, a patch at another token, and results that are not at the top."""
    probe, vector, row = ROWS
    gate = {
        "when": {"kind": "probe", "probe": inline(post_block=packed(1, probe)), "threshold": 0.0},
        "scope": "this_token",
        "apply": {"kind": "add", "steer": inline(post_block=packed(2, vector)), "strength": 2.0},
    }
    site = {"layer": 2, "hook": "post_block", "dest_position": 40, "source_inline": 0}
    table = {name: value for name, value in packed(2, row).items() if name != "layer_indices"}
    document = post(url, steering=[gate], patch=[site], patch_vectors=table, capture=CAPTURE)
    assert document["capture_results"] == document["choices"][0]["capture_results"]
    rows = parse_completion(document).choices[0].captures["memory"].tensor("post_block", 2)
    (choice,) = document["choices"]
    count, tokens = len(choice["prompt_token_ids"]), forwarded(choice)
    states = hidden_states(hf, tokens)
    # The last layer's input is the output of layer 2, where both edits are, so layers 0 to 2 see plain rows.
    fires = torch.sigmoid(states[2] @ probe)
    fires[:count] = 0.0
    assert 0.01 < float(fires[count:].mean()) < 0.99
    expected = states[3] + 2.0 * fires[:, None] * vector
    expected[40] = row
    torch.testing.assert_close(rows, expected, **TOLERANCE)


def test_modules_and_files(url: str, hf: Any, consumer_root: Path) -> None:
    """Catches a route of the fork that the server lacks, a module without effect, and files without path or tag."""
    vectors = {"post_block": {"1": ROWS[1].tolist()}}
    made = httpx.post(f"{url}/v1/steering/modules/register", json={"name": "fork", "vectors": vectors})
    assert made.status_code in (200, 201), made.text
    assert "post_block" in httpx.get(f"{url}/v1/steering/layers").text
    assert httpx.get(f"{url}/v1/steering").status_code == 200
    spec = {**CAPTURE["memory"], "request_id": "mine", "layout": "per_request"}
    document = post(url, steering_name="fork", capture_wait=True, capture={**CAPTURE, "filesystem": spec})
    rows = parse_completion(document).choices[0].captures["memory"].tensor("post_block", 2)
    tokens = forwarded(document["choices"][0])
    states = steered_states(hf, tokens, 1, dict.fromkeys(range(len(tokens)), ROWS[1]), norm_match=False)
    torch.testing.assert_close(rows, states[3], **TOLERANCE)
    (path,) = document["capture_results"]["filesystem"]["payload"]
    assert Path(path).is_relative_to(consumer_root)
    (stored,) = [each for each in open_captures(consumer_root) if each.tag == "mine"]
    torch.testing.assert_close(stored.tensor("post_block", 2), rows, **TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"conversation_id": "a"}, "conversation_id"),
        ({"steering": [{"scope": "rest_of_conversation", "apply": APPLY}]}, "steering[0].scope"),
        ({"patch": [{"layer": 1, "source_run": "a"}]}, "patch[0].source_run"),
        (
            {"patch": [{"layer": 1, "hook": "post_block", "dest_position": 0, "source_inline": 0}]},
            "patch[0].source_inline",
        ),
        ({"steering": 5, "patch": []}, "steering"),
        ({"steering_clamps": {}}, "steering_clamps"),
    ],
)
def test_refusals_name_the_field(url: str, fields: dict[str, Any], field: str) -> None:
    """Catches fields that are accepted and ignored."""
    answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
