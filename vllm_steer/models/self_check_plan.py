# SPDX-License-Identifier: Apache-2.0
"""Plan of the self-check at engine start: which requests to run on the model itself, and what they must return.

Two requests that differ in their first token are run plain, and all sites are read; call the streams of the first B
(base) and of the second D (donor). Then, for every layer and every point but the last, the first request is run again
with ``D - B`` added at that point to each of its tokens. The stream there is now D, so the next point of the layer must
read D too, whatever the layer computes between the two (activation patching). Checked are

* **reached**: every site stored a finite row. The arena is filled with NaN before a step, so a tap that did not run
  (a skipped layer, another code path) is detected.
* **joined**: ``post_block(i)`` reads what ``pre_attn(i + 1)`` reads, except at the gaps of the model. Detects taps on
  other layers than they claim.
* **cause**: within each layer, ``D - B`` added at one point makes the next read D: the branch between them was computed
  from the edited stream, and the stream is that plus the branch. Detects an edit after the norm at which the branch
  starts, one summand read instead of the sum, a tap that runs twice, and two points in the wrong order.
* **branches**, if the engine has points on them: ``x_mid - x_in`` is what ``attn_out`` reads and ``x_out - x_mid`` what
  ``mlp_out`` reads; the stream of D makes the branch that of D, and so does the MLP's input; what is added to a branch
  is added to the stream after it.

The check uses the serving path (compiled code, CUDA graphs, quantised weights, platform kernels) and goes through
programs, tables and capture as requests do. Each rank judges its own layers.

It cannot detect an error that is the same in both requests, such as a constant missing from the stream; a branch that
differs between the two by less than the noise of the dtype (the log reports how many hops were conclusive); anything
before the first ``pre_attn`` or after the last ``post_block``; disagreement of tensor-parallel ranks; or a model that
differs from HF Transformers. ``tests/conformance`` covers these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from vllm_steer.errors import SteeringError
from vllm_steer.points import POINTS, PointName
from vllm_steer.request import CaptureSpec, Edit
from vllm_steer.request.sites import LayersInput

TOKENS = 3
"""Tokens of each request. All but the first are equal in both requests, and so is whatever a model computes from the
token itself and not from the stream (per-layer embeddings, hashed routing)."""

NEEDED: Mapping[str, int] = {
    "max_rows": TOKENS,
    "max_vectors": TOKENS,
    "max_instructions": 2 * TOKENS,
    "max_segments": TOKENS + 1,
    "capture_rows": TOKENS,
}
"""Minimum of each engine limit that one request of the check needs."""

Rows = npt.NDArray[np.float64]
Site = tuple[PointName, int]
"""Point and layer."""
Streams = Mapping[Site, Rows]
"""Rows ``[TOKENS, hidden]`` by site."""


class SelfCheckError(ValueError):
    """Raised when a tap is in the wrong place; the message names point and layer."""


@dataclass(frozen=True)
class CheckRequest:
    """One request of the check: the base or the donor, optionally with edits and captures."""

    donor: bool
    edits: tuple[Edit, ...] = ()
    captures: tuple[Site, ...] = ()

    def capture_specs(self) -> list[CaptureSpec]:
        """Return the capture specs for ``captures``."""
        hooks: dict[PointName, LayersInput] = {}
        for point in POINTS:
            if layers := [layer for name, layer in self.captures if name == point]:
                hooks[point] = layers
        return [CaptureSpec(hooks=hooks, positions="all_prompt")] if hooks else []


@dataclass(frozen=True)
class Hop:
    """A step from one site of a layer to another: the donor's rows at ``source`` make ``target`` the donor's.

    ``adds``: only the branch becomes the donor's, so ``target`` is the base plus the change of the branch.
    """

    source: Site
    target: Site
    adds: bool = False

    def expected(self, base: Streams, donor: Streams) -> Rows:
        """Return what ``target`` must read."""
        return base[self.target] + donor[self.source] - base[self.source] if self.adds else donor[self.target]


@dataclass(frozen=True)
class Verdict:
    """Number of hops, and number of hops on which the two requests differed by more than noise."""

    hops: int
    conclusive: int


def prompt_of(vocab_size: int, donor: bool) -> list[int]:
    """Return the prompt of one request: ordinary tokens, away from the special ones at the ends of the vocabulary."""
    return [vocab_size * (2 if donor else 1) // 7, *(vocab_size * (3 + n) // 7 for n in range(TOKENS - 1))]


def served_sites(
    points: Sequence[PointName], layers: Iterable[int], refused: Mapping[str, Mapping[str, str]]
) -> list[Site]:
    """Return the sites of these layers that are not refused, in order of computation."""
    return [(point, n) for n in sorted(layers) for point in points if str(n) not in refused.get(point, {})]


def _by_layer(sites: Sequence[Site]) -> Iterator[tuple[int, list[PointName], list[PointName]]]:
    """Yield each layer with its points and those of them that are on the stream."""
    for layer, group in groupby(sites, lambda site: site[1]):
        points = [point for point, _ in group]
        yield layer, points, [point for point in points if not POINTS[point].optional]


def hops_of(sites: Sequence[Site], recalls: Collection[int] = (), mixed: Collection[int] = ()) -> list[Hop]:
    """Return the hops within the layers of ``sites``, which are in order of computation.

    Args:
        sites: The sites of this rank.
        recalls: Layers whose attention reads more than the stream; no hop goes through it.
        mixed: Layers that read more than one stream; no hop goes through them.
    """
    hops: list[Hop] = []
    for layer, points, stream in _by_layer(sites):
        if layer in mixed:
            continue
        pairs = [(a, b, False) for a, b in pairwise(stream)]
        if "attn_out" in points:
            pairs += [("pre_attn", "attn_out", False), ("attn_out", stream[1], True)]
        if "mlp_out" in points:
            pairs += [("mlp_out", "post_block", True)]
        # In a parallel block the MLP reads the block's input.
        mlp_source: PointName = "post_attn" if "post_attn" in points else "pre_attn"
        mlp: list[PointName] = [point for point in (mlp_source, "mlp_in", "mlp_out") if point in points]
        pairs += [(a, b, False) for a, b in pairwise(mlp)]
        through_attention = {"pre_attn"} if layer in recalls else set()
        hops += [Hop((a, layer), (b, layer), adds) for a, b, adds in pairs if a not in through_attention]
    return hops


_MAX_HOPS: Mapping[PointName, int] = {"pre_attn": 3, "post_attn": 2}
"""Most hops from one site if the engine has points on the branches; otherwise, and from other sites, there is one."""


def aligned_hops(every: Sequence[Site], hops: Sequence[Hop]) -> list[Hop | None]:
    """Pad ``hops`` to a list of the same length on every rank, whichever points the rank's layers serve.

    Args:
        every: All sites of the whole model.
        hops: The hops of this rank.

    Returns:
        The hops, with None wherever another rank may have a hop and this one has not.
    """
    limits = _MAX_HOPS if any(POINTS[point].optional for point, _ in every) else {}
    by_source: dict[Site, list[Hop | None]] = {}
    for hop in hops:
        by_source.setdefault(hop.source, []).append(hop)
    found: list[Hop | None] = []
    for site in every:
        here = by_source.get(site, [])
        found += [*here, *[None] * (limits.get(site[0], 1) - len(here))]
    return found


def plain_requests(sites: Sequence[Site], size: int) -> list[CheckRequest]:
    """Return both requests without edits, reading all ``sites``; several of each if one may read only ``size``."""
    return [
        CheckRequest(donor, captures=tuple(sites[start : start + size]))
        for start in range(0, len(sites), size)
        for donor in (False, True)
    ]


def hop_request(hop: Hop, base: Streams, donor: Streams) -> CheckRequest:
    """Return the base request with the donor's stream at ``hop.source``."""
    point, layer = hop.source
    changes = (donor[hop.source] - base[hop.source]).astype(np.float32)
    edits = tuple(
        Edit(kind="add", point=point, layers=layer, vector=change, tokens=[position])
        for position, change in enumerate(changes)
        if change.any()
    )
    return CheckRequest(donor=False, edits=edits, captures=(hop.target,))


def check_plain(
    sites: Sequence[Site], base: Streams, donor: Streams, epsilon: float, gaps: Collection[Site] = ()
) -> None:
    """Check the requests without edits: every site was reached, neighbouring layers join, branches add up.

    Args:
        sites: The sites of this rank.
        base: Rows of the first request.
        donor: Rows of the second request.
        epsilon: Relative rounding of the model's dtype.
        gaps: Sites whose stream is more than the one before plus the branches.

    Raises:
        SelfCheckError: A tap is in the wrong place.
    """
    for site in sites:
        if not all(np.isfinite(rows[site]).all() for rows in (base, donor)):
            _fail(
                site,
                "no finite row was stored: the tap did not run in a forward pass, or the model's own stream overflows; "
                "with float16, try --dtype bfloat16",
            )
    for layer in (n for point, n in sites if point == "post_block" and ("pre_attn", n + 1) in sites):
        after: Site = ("pre_attn", layer + 1)
        if after in gaps:
            continue
        for rows in (base, donor):
            distance = _length(rows["post_block", layer] - rows[after])
            if (distance > _noise(epsilon, rows[after])).any():
                _fail(
                    after,
                    f"rows must equal those of post_block of layer {layer}, but differ by up to {distance.max():.3g}",
                )
    for before, branches, stream in _sums_of(sites):
        if stream in gaps:
            continue
        for rows in (base, donor):
            distance = _length(rows[stream] - rows[before] - sum(rows[branch] for branch in branches))
            if (distance > _noise(epsilon, rows[before], rows[stream])).any():
                names = " and ".join(branch for branch, _ in branches)
                _fail(
                    branches[0],
                    f"{_name(stream)} must be {_name(before)} plus {names}, but their rows differ by up to "
                    f"{distance.max():.3g}",
                )


def _sums_of(sites: Sequence[Site]) -> Iterator[tuple[Site, list[Site], Site]]:
    """Yield the stream at one point, the branches added to it, and the stream at the next point."""
    added_before: Mapping[PointName, PointName] = {"post_attn": "attn_out", "post_block": "mlp_out"}
    for layer, points, stream in _by_layer(sites):
        for before, after in pairwise(stream):
            between = [
                branch
                for point, branch in added_before.items()
                if POINTS[before].index < POINTS[point].index <= POINTS[after].index
            ]
            if all(branch in points for branch in between):
                yield (before, layer), [(branch, layer) for branch in between], (after, layer)


def check_hops(hops: Sequence[Hop], got: Sequence[Rows], base: Streams, donor: Streams, epsilon: float) -> Verdict:
    """Check what the target of each hop read (``got``).

    Raises:
        SelfCheckError: A target did not read what is expected; the message names the first one.
    """
    conclusive = 0
    for hop, rows in zip(hops, got, strict=True):
        expected, missed = hop.expected(base, donor), base[hop.target]
        if not any(POINTS[point].optional for point, _ in (hop.source, hop.target)):
            # The stream at the target carries the change in any case; the branch between may miss it.
            missed = missed + donor[hop.source] - base[hop.source]
        change, error = _length(expected - missed), _length(rows - expected)
        noise = _noise(epsilon, base[hop.source], donor[hop.source], expected)
        telling = np.maximum(change, error) > 2 * noise
        wrong = ~(error <= noise + 0.25 * change)
        conclusive += bool((change > 2 * noise)[1:].any())
        # Fail only if all telling tokens are wrong: rounding may route single tokens to other experts. The first token
        # alone proves nothing, since a model may add something for the token itself; if it is right, the tap is.
        if telling[1:].any() and wrong[telling].all():
            _fail(
                hop.source,
                f"an edit there does not change {_name(hop.target)} as expected: expected change "
                f"{change.max():.3g}, error {error.max():.3g}",
            )
    return Verdict(len(hops), conclusive)


def check_plain_code(tapped: Sequence[Rows], plain: Sequence[Rows], epsilon: float) -> None:
    """Compare the last hidden states of both requests: from the model with its taps, and from the one without.

    Raises:
        SteeringError: They differ by more than rounding.
    """
    change = _length(tapped[0] - tapped[1])
    error = np.stack([_length(b - a) for a, b in zip(tapped, plain, strict=True)])
    noise = np.stack([_noise(epsilon, a, b) for a, b in zip(tapped, plain, strict=True)])
    wrong = ~(error <= 2 * noise + 0.25 * change)
    # Rounding may route single tokens to other experts. First tokens attend only to themselves and may well be right.
    if wrong[:, 0].all() or wrong[:, 1:].all():
        raise SteeringError(
            "steering_config.plain_code",
            f"the model without taps computes other hidden states: off by {error.max():.3g}, where two requests differ "
            f"by {change.max():.3g}; start with --no-steering-plain-code",
        )


def _noise(epsilon: float, *rows: Rows) -> Rows:
    """Return what rounding may change in rows of this length: a few roundings in the dtype, and sums in float32."""
    lengths: Rows = np.stack([_length(each) for each in rows]).sum(0)
    return max(2 * epsilon, 1e-4) * lengths


def _length(rows: Rows) -> Rows:
    length: Rows = np.linalg.norm(rows, axis=-1)
    return length


def _name(site: Site) -> str:
    return f"{site[0]} of layer {site[1]}"


def _fail(site: Site, problem: str) -> None:
    raise SelfCheckError(f"{_name(site)}: {problem}")
