# SPDX-License-Identifier: Apache-2.0
"""``make studio``: serve the chat model with the studio, register a direction of mood, and print the address.

python scripts/studio.py              on port 8000
python scripts/studio.py --port 9000  on another port; further arguments go to `vllm serve`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from demo.texts import MOOD  # noqa: E402
from vllm_steer import Client  # noqa: E402

MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
NAME = MODEL.name
LAYER = 14
DOSE = 0.1
"""What strength 1 of the module adds, in lengths of the stream at the layer."""
SETTINGS = [
    *("--enable-steering", "--steering-studio", "--steering-record-columns", "400", "--capture-inline-kib", "256"),
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
]
"""A lens over all 30 layers with 5 tokens each records 300 numbers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    chosen, rest = parser.parse_known_args()
    host = chosen.host
    url = f"http://{host}:{chosen.port}"
    command = [Path(sys.executable).with_name("vllm"), "serve", MODEL, *SETTINGS]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    server = subprocess.Popen([*command, "--host", host, "--port", str(chosen.port), *rest], env=environment)
    try:
        print(f"starting {NAME}; this takes about a minute", flush=True)
        wait_until_healthy(server, url)
        register_mood(url)
        print(f"\nthe studio is at {url}/studio (Ctrl+C ends it)", flush=True)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:  # interrupted during its start
            server.kill()
            server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    """Return when the server answers; exit if it has ended."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    sys.exit(f"the server ended with status {server.returncode}")


def register_mood(url: str, api_key: str | None = None) -> None:
    """Register ``mood``, the direction from sad to happy sentences with a probe of it, and ``sunny`` for expressions.

    The direction is the difference of the means of the stream over the sentences, as in ``vllm_steer.lab``.
    """
    plus, minus = ([pair[n] for pair in MOOD.pairs] for n in (0, 1))
    spec = {"hooks": {"post_block": [LAYER]}, "positions": [[1, None]], "dtype": "float32"}
    with Client(url, api_key=api_key, timeout=600) as client:
        answer = client.complete([*plus, *minus], max_tokens=1, capture={"memory": spec})
        rows = [np.asarray(choice.captures["memory"].tensor("post_block", LAYER)) for choice in answer.choices]
        means = np.stack([each.mean(0) for each in rows])
        difference = means[: len(plus)].mean(0) - means[len(plus) :].mean(0)
        size = float(np.linalg.norm(difference))
        length = float(np.median(np.linalg.norm(np.concatenate(rows), axis=1)))
        weights = difference / size / (size / 2)
        bias = -float(means.mean(0) @ weights)
        client.register(
            "mood",
            description=f"happy (positive) or sad (negative); 1 adds {DOSE} of the stream's length",
            decode={"post_block": {LAYER: difference / size * length * DOSE}},
            probes={"happy": {"weights": weights, "bias": bias, "point": "post_block", "layer": LAYER}},
        )
        client.register(
            "sunny",
            description="the direction of mood, for all tokens, with the stream's length: for expressions",
            base={"post_block": {LAYER: difference}},
            provenance={"stream": json.dumps({LAYER: length})},
        )


if __name__ == "__main__":
    main()
