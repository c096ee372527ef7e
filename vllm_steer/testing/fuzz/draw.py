# SPDX-License-Identifier: Apache-2.0
"""Random workloads and engine settings, the same for the same seed on the same model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from vllm_steer.points import POINT_NAMES, points_on
from vllm_steer.spec import KINDS
from vllm_steer.testing.fuzz.workload import TIERS, CaptureCase, EditCase, Request, Settings

MAX_MODEL_LEN = 256
STEMS, STEM = 4, 96
EDIT_TOKENS: tuple[Any, ...] = ("all", "prompt", "generated", "last_prompt", [0, -2], [[2, 7]], [[-1, None]], [[5, 40]])
POSITIONS: tuple[Any, ...] = ("last_prompt", "all_prompt", "all_generated", "all", [0, [3, 9], -2], [[-1, None]], [-1])
KNOWN = {"vector", "strength", "low", "high"}
"""What an :class:`EditCase` can say; kinds that take more are not drawn."""
Random: TypeAlias = np.random.Generator


@dataclass(frozen=True)
class Facts:
    """What a workload has to know of the model. ``scale`` is a typical length of the residual stream by
    ``len(POINT_NAMES) * layer + point``; ``served`` are the points at which this model can be edited and read."""

    hidden: int
    layers: int
    vocab: int
    scale: tuple[float, ...]
    served: tuple[str, ...] = points_on(())
    cuda: bool = False


def draw_requests(rng: Random, count: int, facts: Facts) -> list[Request]:
    """Requests of 4 to 150 prompt tokens, about a third of them plain, most on shared prefixes."""
    stems = [rng.integers(1, facts.vocab, STEM).tolist() for _ in range(STEMS)]
    programs = [_edits(rng, facts) for _ in range(max(2, count // 8))]
    for_all = [_globally(rng, facts) for _ in range(2)]
    requests: list[Request] = []
    for i in range(count):
        grows, keep = None, 0
        own = rng.integers(1, facts.vocab, int(rng.integers(4, 30))).tolist()
        fates: dict[str, Any] = {}
        if requests and rng.random() < 0.15:
            whole = [r for r in requests[-24:] if r.grows is None and r.n == 1 and r.abort_after is None]
            if whole:
                parent = whole[int(rng.integers(len(whole)))]
                grows, keep = parent.name, int(rng.integers(1, min(parent.max_tokens, 40) + 1))
                if rng.random() < 0.6:
                    fates = {"edits": parent.edits, "salt": parent.salt}
        stem = stems[int(rng.integers(STEMS))][: int(rng.choice([20, 64, STEM]))] if rng.random() < 0.6 else []
        if not fates and rng.random() < 0.55:
            # Equal programs of several requests meet in the tables and in the cache.
            fates["edits"] = programs[int(rng.integers(len(programs)))] if rng.random() < 0.5 else _edits(rng, facts)
        if rng.random() < 0.2:
            fates["globally"] = for_all[int(rng.integers(len(for_all)))]
        if rng.random() < 0.45:
            fates["capture"] = _capture(rng, facts)
        if fates.get("edits") and rng.random() < 0.25:
            fates["module"] = True
        if rng.random() < 0.15:
            fates["stream"] = True
        if not fates.get("salt") and rng.random() < 0.1:
            fates["salt"] = "ab"[int(rng.integers(2))]
        if rng.random() < 0.1:
            fates["n"] = int(rng.integers(2, 4))
        elif rng.random() < 0.12:
            fates["abort_after"] = int(rng.integers(0, 30))
        requests.append(
            Request(
                name=f"r{i}",
                prompt=own[:15] if grows else stem + own,
                max_tokens=int(rng.integers(1, 64 if rng.random() < 0.3 else 20)),
                skip_cache=bool(rng.random() < 0.05),
                gap=int(rng.choice([0, 0, 0, 1, 2, 7])),
                grows=grows,
                keep=keep,
                **fates,
            )
        )
    return requests


def draw_settings(rng: Random, facts: Facts, graphs: bool = False) -> Settings:
    """An engine under pressure of one kind or several. ``graphs``: with compilation and CUDA graphs, too."""
    block = 16 if facts.cuda else 32
    enough = MAX_MODEL_LEN // block
    sequences = int(rng.choice([2, 8, 24]))
    engine: dict[str, Any] = {
        "enable_prefix_caching": bool(rng.random() < 0.65),
        "block_size": block,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": int(max(sequences, rng.choice([sequences, 16, 64, 256, 2048]))),
        "long_prefill_token_threshold": int(rng.choice([0, 0, 1, 2, 5, 16])),
        "enforce_eager": not (graphs and rng.random() < 0.5),
    }
    if rng.random() < 0.7:
        # One sequence of the longest kind always fits; more than a few do not.
        engine["num_gpu_blocks_override"] = enough + 2 + int(rng.integers(0, 2 * enough))
    if facts.cuda:
        engine["async_scheduling"] = bool(rng.random() < 0.6)
    steering: dict[str, Any] = {}
    if rng.random() < 0.5:
        steering["max_rows"] = int(rng.choice([4, 8, 24]))
    if rng.random() < 0.3:
        steering["max_vectors"] = int(rng.choice([4, 8]))
    sites = max(3, len(facts.served)) * facts.layers
    if rng.random() < 0.5:
        steering["capture_rows"] = int(rng.choice([sites, 37 + sites, 300 + sites]))
    if rng.random() < 0.3:
        steering["capture_mib"] = 1
    if not engine["enforce_eager"]:
        steering["plain_code"] = bool(rng.random() < 0.5)
    return Settings(engine=engine, steering=steering)


def _layers(rng: Random, facts: Facts, most: int) -> list[int]:
    count = int(rng.integers(1, min(most, facts.layers) + 1))
    return sorted(int(layer) for layer in rng.choice(facts.layers, count, replace=False))


def _edits(rng: Random, facts: Facts) -> list[EditCase]:
    edits = []
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        kind, field = "add", TIERS[int(rng.integers(3))]
        given: dict[str, Any] = {}
        if rng.random() < 0.6:
            field = "steering"
            kind = str(rng.choice([kind.name for kind in KINDS.values() if set(kind.params) <= KNOWN]))
            given["tokens"] = EDIT_TOKENS[int(rng.integers(len(EDIT_TOKENS)))]
        edit = _edit(rng, facts, field, kind, **given)
        if kind == "clamp":
            bound = str(rng.choice(["low", "high"]))
            edit = msgspec.structs.replace(edit, **{bound: edit.length * float(rng.choice([-0.2, 0.2]))})
        edits.append(edit)
    return edits


def _edit(rng: Random, facts: Facts, field: str, kind: str, **given: Any) -> EditCase:
    """At one or two layers of a point, as long as a good part of the stream there."""
    point = str(rng.choice(facts.served))
    layers = _layers(rng, facts, 2)
    length = facts.scale[len(POINT_NAMES) * layers[0] + POINT_NAMES.index(point)] * float(rng.uniform(0.3, 1.2))
    return EditCase(
        field=field, kind=kind, point=point, layers=layers, seed=int(rng.integers(1 << 30)), length=length,
        strength=float(rng.uniform(0.4, 1.0)), **given,
    )  # fmt: skip


def _globally(rng: Random, facts: Facts) -> list[EditCase]:
    """One or two additions, each in a tier of its own."""
    tiers = rng.choice(TIERS, int(rng.integers(1, 3)), replace=False)
    return [_edit(rng, facts, str(tier), "add") for tier in tiers]


def _capture(rng: Random, facts: Facts) -> CaptureCase:
    if facts.layers <= 8 and rng.random() < 0.4:
        hooks: dict[str, Any] = dict.fromkeys(facts.served, "all")
    else:
        points = rng.choice(facts.served, int(rng.integers(1, len(facts.served) + 1)), replace=False)
        hooks = {str(point): _layers(rng, facts, 3) for point in points}
    return CaptureCase(
        hooks=hooks,
        positions=POSITIONS[int(rng.integers(len(POSITIONS)))],
        before=bool(rng.random() < 0.25),
        dtype="float32" if rng.random() < 0.2 else None,
        reduce=[None, None, None, "mean", "last", "directions"][int(rng.integers(6))],
    )
