# SPDX-License-Identifier: Apache-2.0
"""Variants that are measured on a GPU, with the fields of their requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

POINTS = ("pre_attn", "post_attn", "post_block")
NAMES = [f"bench/p{i}" for i in range(16)]
SAE_NAME, SAE_VARIANT, SAE_FEATURES = "bench", "SAE features at one layer", 16_384


def variants(layers: int, hidden: int) -> dict[str, dict[str, Any]]:
    """Return each variant by name. Its ``fields(i)`` returns the steering fields of the i-th request of a batch."""
    rng = np.random.default_rng(0)
    middle = layers // 2
    # Rounding removes nearly all of these vectors, so that the tokens, and with them the routed experts, stay the same.
    own = (rng.standard_normal((256, hidden)) * 1e-9).astype("f4")
    several = (rng.standard_normal((3 * layers, hidden)) * 1e-9).astype("f4")
    probes = rng.standard_normal((16, hidden)).astype("f4")
    every = {p: {i: several[3 * i + k] for i in range(layers)} for k, p in enumerate(POINTS)}
    four = [layers * k // 4 for k in range(4)]

    probe = {"probe": probes[0], "point": "post_block", "layer": middle}
    when = {"readout": "p", "above": 0.0, "window": "previous"}
    edit = {"kind": "add", "point": "post_block", "layers": middle, "vector": own[0]}
    lens = {"lens": {"top_k": 5}, "point": "post_block", "layers": [middle]}
    sae = {"sae": SAE_NAME, "top_k": 8, "point": "post_block", "layer": middle}

    def capture(hooks: Any, positions: str, **more: Any) -> dict[str, Any]:
        return {"capture": {"memory": {"hooks": {"post_block": hooks}, "positions": positions, **more}}}

    return {
        "idle": {"fields": lambda i: {}},
        "one site": {"fields": lambda i: {"steering_vectors": {"post_block": {middle: own[0]}}}},
        "all sites": {"fields": lambda i: {"steering_vectors": every}},
        "own program each": {"fields": lambda i: {"steering_vectors": {"post_block": {middle: own[i % 256]}}}},
        "capture one layer, all tokens": {"fields": lambda i: capture([middle], "all")},
        "capture all layers, last prompt token": {"fields": lambda i: capture("all", "last_prompt")},
        "capture all layers, all tokens": {"fields": lambda i: capture("all", "all")},
        "16 probes by name at 4 layers, all tokens": {
            "fields": lambda i: capture(four, "all", reduce={"probes": NAMES})
        },
        "readout of one probe": {"fields": lambda i: {"readouts": {"p": probe}}},
        "gate of one probe": {"fields": lambda i: {"readouts": {"p": probe}, "steering": [{**edit, "when": when}]}},
        "live strength": {"fields": lambda i: {"steering": [{**edit, "tokens": "generated", "live": "s"}]}},
        "lens at one layer": {"fields": lambda i: {"readouts": {"lens": lens}}},
        SAE_VARIANT: {"fields": lambda i: {"readouts": {"sae": sae}}},
    }


def register(steering: Any, hidden: int) -> None:
    """Register the module whose probes the variants use by name."""
    rng = np.random.default_rng(1)
    steering.register("bench", probes={name.partition("/")[2]: rng.standard_normal(hidden, "f4") for name in NAMES})


def save_sae(folder: Path, hidden: int) -> Path:
    """Write a random autoencoder in SAELens' format, whose features are active at about half of the tokens."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(2)
    encoder = rng.standard_normal((hidden, SAE_FEATURES), "f4") / np.float32(hidden**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "W_enc": encoder, "W_dec": np.ascontiguousarray(encoder.T), "b_enc": np.zeros(SAE_FEATURES, "f4"),
            "b_dec": np.zeros(hidden, "f4"),
        },
        folder / "sae_weights.safetensors",
    )  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard"}))
    return folder
