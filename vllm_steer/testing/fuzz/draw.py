# SPDX-License-Identifier: Apache-2.0
"""Draw random workloads and engine settings. The draw depends only on the generator and the model."""

from __future__ import annotations

from typing import Any

from vllm_steer.request import KINDS
from vllm_steer.request.probe import ACTIVATIONS
from vllm_steer.testing.fuzz.draw_reactive import draw_part, draw_reactive, probe_form
from vllm_steer.testing.fuzz.workload import (
    SAE,
    TIERS,
    Form,
    ModelFacts,
    Random,
    Request,
    Settings,
    draw_edit,
    draw_layers,
    pick,
)

MAX_MODEL_LEN = 256
NUM_PREFIXES, PREFIX_LENGTH = 4, 96
EDIT_TOKENS: tuple[Any, ...] = ("all", "prompt", "generated", "last_prompt", [0, -2], [[2, 7]], [[-1, None]], [[3, 40]])
MATRIX_TOKENS: tuple[Any, ...] = ([0, 2], [1, 2, 3], [0, -1], [-3, -1])
"""Positions of edits with a matrix. Prompts have at least 4 tokens."""
POSITIONS: tuple[Any, ...] = ("last_prompt", "all_prompt", "all_generated", "all", [0, [3, 9], -2], [[-1, None]], [-1])
DRAWN_PARAMETERS = {"vector", "strength", "dose", "low", "high", "subspace"}
"""Parameters that are drawn, and ``dose``, which is a strength in another unit; kinds with others are not drawn."""
NUM_DIRECTIONS = 2


def draw_requests(rng: Random, count: int, facts: ModelFacts) -> list[Request]:
    """Return requests of 4 to 150 prompt tokens; about a third are plain, most share prefixes."""
    prefixes = [rng.integers(1, facts.vocab, PREFIX_LENGTH).tolist() for _ in range(NUM_PREFIXES)]
    programs = [_draw_edits(rng, facts) for _ in range(max(2, count // 8))]
    global_sets = [_draw_global_edits(rng, facts) for _ in range(2)]
    requests: list[Request] = []
    for i in range(count):
        grows, keep = None, 0
        suffix = rng.integers(1, facts.vocab, int(rng.integers(4, 30))).tolist()
        options: dict[str, Any] = {}
        if requests and rng.random() < 0.15:
            resolved = [r for r in requests[-24:] if r.grows is None and r.n == 1 and r.abort_after is None]
            if resolved:
                parent = pick(rng, resolved)
                grows, keep = parent.name, int(rng.integers(1, min(parent.max_tokens, 40) + 1))
                if rng.random() < 0.6:
                    options = {"edits": parent.edits, "salt": parent.salt}
                    if any("when" in edit for edit in parent.edits):
                        options["readouts"] = _named(parent.readouts)
        prefix = pick(rng, prefixes)[: int(rng.choice([20, 64, PREFIX_LENGTH]))] if rng.random() < 0.6 else []
        if not options and rng.random() < 0.55:
            # Requests with equal programs share table rows and cache blocks.
            options["edits"] = pick(rng, programs) if rng.random() < 0.5 else _draw_edits(rng, facts)
        if rng.random() < 0.2:
            options["globally"] = pick(rng, global_sets)
        if rng.random() < 0.45:
            options["capture"] = _draw_capture(rng, facts)
        if options.get("edits") and rng.random() < 0.25 and all(map(_fits_module, options["edits"])):
            options["module"] = True
        if rng.random() < 0.15:
            options["stream"] = True
        if not options.get("salt") and rng.random() < 0.1:
            options["salt"] = pick(rng, "ab")
        given: dict[str, Form] = options.get("readouts", {})
        drawn = _draw_readouts(rng.spawn(1)[0], facts)
        options["readouts"] = given | {f"r{number}": each for number, each in enumerate(drawn, len(given))}
        if not options.get("module") and not any("when" in edit for edit in options.get("edits", ())):
            reactive = draw_reactive(rng.spawn(1)[0], facts)
            options["readouts"] |= reactive.pop("readouts")
            options.update({name: [*options.get(name, []), *each] for name, each in reactive.items() if each})
        if rng.random() < 0.1:
            options["n"] = int(rng.integers(2, 4))
        elif rng.random() < 0.12:
            options["abort_after"] = int(rng.integers(0, 30))
        requests.append(
            Request(
                name=f"r{i}",
                prompt=suffix[:15] if grows else prefix + suffix,
                max_tokens=int(rng.integers(1, 64 if rng.random() < 0.3 else 20)),
                skip_cache=bool(rng.random() < 0.05),
                gap=int(rng.choice([0, 0, 0, 1, 2, 7])),
                grows=grows,
                keep=keep,
                **options,
            )
        )
    return requests


def draw_settings(rng: Random, facts: ModelFacts, graphs: bool = False) -> Settings:
    """Return settings that put the engine under pressure (little cache, small steps, small tables).

    Args:
        rng: Source of the random choices.
        facts: Properties of the model and its device.
        graphs: Draw engines with compilation and CUDA graphs too.
    """
    block = 16 if facts.cuda else 32
    blocks_per_sequence = MAX_MODEL_LEN // block
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
        # The longest sequence always fits; more than a few do not.
        engine["num_gpu_blocks_override"] = blocks_per_sequence + 2 + int(rng.integers(0, 2 * blocks_per_sequence))
    if facts.cuda:
        engine["async_scheduling"] = bool(rng.random() < 0.6)
    steering: dict[str, Any] = {}
    if rng.random() < 0.5:
        steering["max_rows"] = int(rng.choice([4, 8, 24]))
    if rng.random() < 0.3:
        steering["max_vectors"] = int(rng.choice([4, 8]))
    sites = max(3, len(facts.points)) * facts.layers
    if rng.random() < 0.5:
        steering["capture_rows"] = int(rng.choice([sites, 37 + sites, 300 + sites]))
    if rng.random() < 0.3:
        steering["capture_mib"] = 1
    if not engine["enforce_eager"]:
        steering["plain_code"] = bool(rng.random() < 0.5)
    return Settings(engine=engine, steering=steering)


def _named(readouts: dict[str, Form]) -> dict[str, Form]:
    """Return the readouts that conditions use."""
    return {name: each for name, each in readouts.items() if name.startswith("p")}


def _fits_module(edit: Form) -> bool:
    """Return whether a module can have the edit."""
    other = {"subspace", "when", "live", "feature"} & edit.keys() or "rows" in edit["vector"]
    return not other and not isinstance(edit.get("tokens"), dict)


def _draw_edits(rng: Random, facts: ModelFacts) -> list[Form]:
    edits = []
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        kind, field = "add", pick(rng, TIERS)
        given: dict[str, Any] = {}
        if rng.random() < 0.6:
            field = "steering"
            kind = str(rng.choice([kind.name for kind in KINDS.values() if set(kind.params) <= DRAWN_PARAMETERS]))
            given["tokens"] = pick(rng, EDIT_TOKENS)
        edit = draw_edit(rng, facts, field, kind, **given)
        if kind == "clamp":
            bound = str(rng.choice(["low", "high"]))
            edit[bound] = edit["vector"]["length"] * float(rng.choice([-0.2, 0.2]))
        if kind == "replace":
            drawn = rng.spawn(1)[0]
            seed = edit["vector"]["seed"]
            if drawn.random() < 0.5:
                edit["tokens"] = pick(drawn, MATRIX_TOKENS)
                edit["vector"]["rows"] = len(edit["tokens"])
            if directions := int(drawn.choice([0, 0, 1, 3])):
                edit["subspace"] = {"seed": seed + 99, "rows": directions, "length": 1.0}
        edits.append(edit)
    return edits


def _draw_global_edits(rng: Random, facts: ModelFacts) -> list[Form]:
    """Draw one or two additions, each in its own tier."""
    tiers = rng.choice(TIERS, int(rng.integers(1, 3)), replace=False)
    return [draw_edit(rng, facts, str(tier), "add") for tier in tiers]


def _draw_readouts(rng: Random, facts: ModelFacts) -> list[Form]:
    """Draw a probe, a lens, both or, mostly, nothing; in place of the probe also projections or features."""
    drawn = [
        (draw_layers(rng, facts, 2), pick(rng, POSITIONS), int(rng.integers(1 << 30)), is_lens)
        for is_lens in (False, True)
        if rng.random() < 0.2
    ]
    form = str(rng.choice(["", "sigmoid", "cosine", "projections", "sae", *ACTIVATIONS]))
    part = draw_part(rng, facts) if rng.random() < 0.15 else None
    return [
        {
            "point": "post_block",
            "positions": positions if part is None else part,
            **({"lens": {"top_k": 3}, "layers": layers} if is_lens else {"layer": layers[0], **_single(form, seed)}),
        }
        for layers, positions, seed, is_lens in drawn
    ]


def _single(form: str, seed: int) -> Form:
    """Return the fields of a readout of one layer."""
    if form == "sae":
        return {"sae": SAE, "top_k": 4}
    if form == "projections":
        return {"projections": {"seed": seed, "rows": NUM_DIRECTIONS, "length": 1.0}}
    return probe_form(form, seed)


def _draw_capture(rng: Random, facts: ModelFacts) -> Form:
    if facts.layers <= 8 and rng.random() < 0.4:
        hooks: dict[str, Any] = dict.fromkeys(facts.points, "all")
    else:
        points = rng.choice(facts.points, int(rng.integers(1, len(facts.points) + 1)), replace=False)
        hooks = {str(point): draw_layers(rng, facts, 3) for point in points}
    spec: Form = {"hooks": hooks, "positions": pick(rng, POSITIONS)}
    if rng.random() < 0.25:
        spec["before"] = True
    if rng.random() < 0.2:
        spec["dtype"] = "float32"
    directions = {"directions": {"seed": 0, "rows": NUM_DIRECTIONS, "length": 1.0}}
    reduce = pick(rng, [None, None, None, "mean", "last", directions])
    return spec if reduce is None else {**spec, "reduce": reduce}
