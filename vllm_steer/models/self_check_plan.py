# SPDX-License-Identifier: Apache-2.0
"""The check of an engine's taps on its own model, before it serves: which requests to run, and what must come of them.

Two requests that differ in their first token are run plain, and all sites are read. Call one's streams O and the
other's D. Then, for every layer and every point but the last, the first request is run again with ``D - O`` added at
that point to each of its tokens: the stream there is now D, so the next point of the layer must read D too, whatever
the layer computes between the two. Checked are

* **reached**: every site stored a finite row. The arena is filled with NaN before a step, so a tap that did not run,
  as of a layer that is skipped or that runs along another path, is seen.
* **joined**: ``post_block(i)`` reads what ``pre_attn(i + 1)`` reads. Taps on other layers than they say are seen.
* **cause**: from point to point of each layer, ``D - O`` added at one makes the next read D: the branch between them
  was computed from the edited stream, and the stream is that plus the branch. An edit behind the norm that the branch
  starts from, one summand read for two, a tap that runs twice and two points in the wrong order are seen.
* **branches**, where the engine has points on them: ``x_mid - x_in`` is what ``attn_out`` reads and ``x_out - x_mid``
  what ``mlp_out`` reads; the stream of D makes the branch that of D, and so does the MLP's input; and what is added to
  a branch, the stream behind it has more.

It runs on the path that serves (compiled code, CUDA graphs, quantised weights, adapters of the platform), through
programs, tables and capture as requests do. Each rank judges the layers that it has.

What it cannot see: what is wrong in both requests alike by the same amount, as a constant left out of the stream; a
branch that differs between the two by less than the noise of the dtype (the log says how many steps were conclusive);
anything ahead of the first ``pre_attn`` or behind the last ``post_block``; whether tensor-parallel ranks agree; and
whether the model is the one that HF Transformers has. That is what ``tests/conformance`` is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINTS, PointName
from vllm_steer.spec import CaptureSpec, Edit
from vllm_steer.spec.edit import LayersInput

TOKENS = 3
"""Tokens of each request. All but the first are equal in both requests, so that what a model computes from the token
itself and not from the stream (per-layer embeddings, hashed routing) is equal too."""

NEEDED: Mapping[str, int] = {
    "max_rows": TOKENS,
    "max_vectors": TOKENS,
    "max_instructions": 2 * TOKENS,
    "max_segments": TOKENS + 1,
    "capture_rows": TOKENS,
}
"""What one request of the check takes of an engine's limits, at least."""

Rows = npt.NDArray[np.float64]
Place = tuple[PointName, int]
Streams = Mapping[Place, Rows]
"""Rows ``[TOKENS, hidden]`` by point and layer."""


class SelfCheckError(ValueError):
    """The taps are not where they should be; the message names layer and point."""


@dataclass(frozen=True)
class Probe:
    """One request: the two are told apart by ``donor``; ``edits`` and ``reads`` may be empty."""

    donor: bool
    edits: tuple[Edit, ...] = ()
    reads: tuple[Place, ...] = ()

    def captures(self) -> list[CaptureSpec]:
        hooks: dict[PointName, LayersInput] = {}
        for point in POINTS:
            if layers := [layer for name, layer in self.reads if name == point]:
                hooks[point] = layers
        return [CaptureSpec(hooks=hooks, positions="all_prompt")] if hooks else []


@dataclass(frozen=True)
class Hop:
    """From one point of a layer to another that is served there: what is D at ``source`` makes ``target`` D.

    ``adds``: only the branch is D then, and ``target`` is O and what the branch has more.
    """

    source: Place
    target: Place
    adds: bool = False

    def wanted(self, own: Streams, donor: Streams) -> Rows:
        """What ``target`` must read."""
        return own[self.target] + donor[self.source] - own[self.source] if self.adds else donor[self.target]


@dataclass(frozen=True)
class Verdict:
    """How many hops there were, and on how many the two requests differed by more than noise."""

    hops: int
    conclusive: int


def token_ids(vocab_size: int, donor: bool) -> list[int]:
    """The prompt of one of the two requests: ordinary tokens, away from the special ones at a vocabulary's ends."""
    return [vocab_size * (2 if donor else 1) // 7, *(vocab_size * (3 + n) // 7 for n in range(TOKENS - 1))]


def hops_of(places: Sequence[Place]) -> list[Hop]:
    """The hops within the layers of ``places``, which are in order of computation."""
    hops: list[Hop] = []
    for layer, here in groupby(places, lambda place: place[1]):
        points = [point for point, _ in here]
        stream = [point for point in points if not POINTS[point].optional]
        pairs = [(a, b, False) for a, b in pairwise(stream)]
        if "attn_out" in points:
            pairs += [("pre_attn", "attn_out", False), ("attn_out", stream[1], True)]
        if "mlp_out" in points:
            pairs += [("mlp_out", "post_block", True)]
        # Beside attention, the MLP computes on the block's input.
        into = [
            point
            for point in ("post_attn" if "post_attn" in points else "pre_attn", "mlp_in", "mlp_out")
            if point in points
        ]
        pairs += [(a, b, False) for a, b in pairwise(into)]
        hops += [Hop((a, layer), (b, layer), adds) for a, b, adds in pairs]
    return hops


_HOPS_FROM: Mapping[PointName, int] = {"pre_attn": 3, "post_attn": 2}
"""Most hops from one place, where an engine has points on the branches; else and elsewhere there is one."""


def slots(every: Sequence[Place], hops: Sequence[Hop]) -> list[Hop | None]:
    """``hops`` among as many places as there are for every rank of an engine, whichever points its layers serve.

    ``every``: all sites of the whole model. None where a rank has no hop.
    """
    several = _HOPS_FROM if any(POINTS[point].optional for point, _ in every) else {}
    by_source: dict[Place, list[Hop | None]] = {}
    for hop in hops:
        by_source.setdefault(hop.source, []).append(hop)
    found: list[Hop | None] = []
    for place in every:
        here = by_source.get(place, [])
        found += [*here, *[None] * (several.get(place[0], 1) - len(here))]
    return found


def plain_probes(places: Sequence[Place], size: int) -> list[Probe]:
    """Both requests, reading everywhere: several of each where one may only read ``size`` sites."""
    return [
        Probe(donor, reads=tuple(places[start : start + size]))
        for start in range(0, len(places), size)
        for donor in (False, True)
    ]


def hop_probe(hop: Hop, own: Streams, donor: Streams) -> Probe:
    """The first request with the other's stream at ``hop.source``."""
    point, layer = hop.source
    changes = (donor[hop.source] - own[hop.source]).astype(np.float32)
    edits = tuple(
        Edit(kind="add", point=point, layers=layer, vector=change, tokens=[position])
        for position, change in enumerate(changes)
        if change.any()
    )
    return Probe(donor=False, edits=edits, reads=(hop.target,))


def check_plain(places: Sequence[Place], own: Streams, donor: Streams, epsilon: float) -> None:
    """Raise :class:`SelfCheckError` unless every site was reached and neighbouring layers join."""
    for place in places:
        if not all(np.isfinite(rows[place]).all() for rows in (own, donor)):
            _fail(place, "stored no finite row: its tap did not run in a forward pass, or the stream itself overflows")
    present = set(places)
    for point, layer in places:
        after: Place = ("pre_attn", layer + 1)
        if point == "post_block" and after in present:
            for rows in (own, donor):
                far = _length(rows[(point, layer)] - rows[after])
                if (far > _noise(epsilon, rows[after])).any():
                    _fail(after, f"does not read the stream that post_block of layer {layer} reads, which it must be")
    for before, branches, stream in _sums_of(places):
        for rows in (own, donor):
            far = _length(rows[stream] - rows[before] - sum(rows[branch] for branch in branches))
            if (far > _noise(epsilon, rows[before], rows[stream])).any():
                names = " and ".join(branch for branch, _ in branches)
                _fail(
                    branches[0],
                    f"{_name(stream)} is not {_name(before)} and what {names} reads: off by {far.max():.3g}",
                )


def _sums_of(places: Sequence[Place]) -> Iterator[tuple[Place, list[Place], Place]]:
    """The stream at one point, what is added to it, and the stream at the next."""
    for layer, here in groupby(places, lambda place: place[1]):
        points = [point for point, _ in here]
        stream = [point for point in points if not POINTS[point].optional]
        for before, after in pairwise(stream):
            added: dict[PointName, PointName] = {"post_attn": "attn_out", "post_block": "mlp_out"}
            between = [added[p] for p in added if POINTS[before].index < POINTS[p].index <= POINTS[after].index]
            if all(point in points for point in between):
                yield (before, layer), [(point, layer) for point in between], (after, layer)


def check_hops(hops: Sequence[Hop], got: Sequence[Rows], own: Streams, donor: Streams, epsilon: float) -> Verdict:
    """``got``: what each hop's target read. Raises :class:`SelfCheckError` for the first that is not D."""
    conclusive = 0
    for hop, rows in zip(hops, got, strict=True):
        wanted, missed = hop.wanted(own, donor), own[hop.target]
        if not any(POINTS[point].optional for point, _ in (hop.source, hop.target)):
            # The stream at the target has the change in any case; what may miss it is the branch between.
            missed = missed + donor[hop.source] - own[hop.source]
        change, error = _length(wanted - missed), _length(rows - wanted)
        noise = _noise(epsilon, own[hop.source], donor[hop.source], wanted)
        telling = np.maximum(change, error) > 2 * noise
        wrong = ~(error <= noise + 0.25 * change)
        conclusive += bool((change > 2 * noise)[1:].any())
        # All of them: rounding may send single tokens to other experts. The first token alone accuses nobody, since a
        # model may add something for the token itself; but where it is right, the tap is.
        if telling[1:].any() and wrong[telling].all():
            _fail(
                hop.source,
                f"an edit there that makes it another request's does not make {_name(hop.target)} "
                + ("more by as much" if hop.adds else "that request's")
                + f": off by {error.max():.3g}, where it makes a difference of {change.max():.3g}",
            )
    return Verdict(len(hops), conclusive)


def check_codes(tapped: Sequence[Rows], plain: Sequence[Rows], epsilon: float) -> None:
    """``tapped``: last hidden states of both requests from the model with its taps, and ``plain`` from that without.
    Raises :class:`SteeringError` unless one code computes what the other does, but for rounding."""
    change = _length(tapped[0] - tapped[1])
    error = np.stack([_length(b - a) for a, b in zip(tapped, plain, strict=True)])
    noise = np.stack([_noise(epsilon, a, b) for a, b in zip(tapped, plain, strict=True)])
    wrong = ~(error <= 2 * noise + 0.25 * change)
    # Rounding may send single tokens to other experts. First tokens attend to themselves alone, and may well be right.
    if wrong[:, 0].all() or wrong[:, 1:].all():
        raise SteeringError(
            "steering_config.plain_code",
            f"the model without taps computes other hidden states: off by {error.max():.3g}, where two requests differ "
            f"by {change.max():.3g}; start without --steering-plain-code",
        )


def _noise(epsilon: float, *rows: Rows) -> Rows:
    """What rounding may do to rows of this length: a few roundings in the dtype, and sums in float32."""
    lengths: Rows = np.stack([_length(each) for each in rows]).sum(0)
    return max(2 * epsilon, 1e-4) * lengths


def _length(rows: Rows) -> Rows:
    length: Rows = np.linalg.norm(rows, axis=-1)
    return length


def _name(place: Place) -> str:
    return f"{place[0]} of layer {place[1]}"


def _fail(place: Place, problem: str) -> None:
    raise SelfCheckError(f"{_name(place)}: {problem}")


def places_of(
    points: Sequence[PointName], layers: Iterable[int], refused: Mapping[str, Mapping[str, str]]
) -> list[Place]:
    """The served sites of these layers in order of computation."""
    every = ((point, layer) for layer in sorted(layers) for point in points)
    return [place for place in every if not _is_refused(place, refused)]


def _is_refused(place: Place, refused: Mapping[str, Mapping[str, str]]) -> bool:
    return str(place[1]) in refused.get(place[0], {})
