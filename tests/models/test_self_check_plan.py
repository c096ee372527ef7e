# SPDX-License-Identifier: Apache-2.0
"""Conclusions of the self-check, on a model of a few lines with right or wrong taps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_steer.errors import SteeringError
from vllm_steer.models.self_check_plan import (
    TOKENS,
    CheckRequest,
    Hop,
    Rows,
    SelfCheckError,
    Site,
    Streams,
    Verdict,
    aligned_hops,
    check_hops,
    check_plain,
    check_plain_code,
    hop_request,
    hops_of,
    plain_requests,
    prompt_of,
    served_sites,
)
from vllm_steer.points import POINT_NAMES, PointName, points_on

HIDDEN, LAYERS, EPSILON = 16, 3, 1e-7
ON_STREAM = points_on(())
Noise = Callable[[Rows], Rows]


@dataclass
class Model:
    """A model whose layers mix tokens and then apply an MLP; ``noise`` is applied to all reads and edits."""

    noise: Noise = lambda rows: rows
    own_embedding: float = 0.0
    """Scale of what the MLP adds for the token itself, independent of the stream."""
    late: Site | None = None
    """Site whose edits miss the branch that starts there."""
    swapped: Site | None = None
    """Site on a branch whose tap is on the other summand."""
    flips: bool = False
    """Whether the MLP routes the second token differently in every run."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def __post_init__(self) -> None:
        self.weights = np.random.default_rng(0).standard_normal((LAYERS, 2, HIDDEN, HIDDEN)) / HIDDEN**0.5

    def run(self, request: CheckRequest) -> dict[Site, Rows]:
        ids = prompt_of(70, request.donor)
        x = np.random.default_rng(5).standard_normal((70, HIDDEN))[ids]
        seen: dict[Site, Rows] = {}

        def tap(site: Site, x: Rows) -> Rows:
            for edit in request.edits:
                if (edit.point, edit.layers[0]) == site:
                    rows = [position for position, _ in edit.tokens.intervals(TOKENS)]
                    x = x.copy()
                    x[rows] = self.noise(x[rows] + edit.vector)
            seen[site] = self.noise(x)
            return x

        for layer in range(LAYERS):
            for which, (point, mixes) in enumerate((("pre_attn", True), ("post_attn", False))):
                site: Site = (point, layer)  # type: ignore[assignment]
                before, x = x, tap(site, x)
                source = before if site == self.late else x
                context = np.cumsum(source, axis=0) if mixes else source
                branch = self.branch(layer, which, context, tap)
                if not mixes:
                    branch += self.own_embedding * np.array(ids)[:, None]
                    if self.flips:
                        branch[1] += self.random.standard_normal(HIDDEN)
                out: Site = ("attn_out" if mixes else "mlp_out", layer)
                if out == self.swapped:
                    tap(out, x)
                else:
                    branch = tap(out, branch)
                x = self.noise(x + branch)
            x = tap(("post_block", layer), x)
        return seen

    def branch(self, layer: int, which: int, context: Rows, tap: Callable[[Site, Rows], Rows]) -> Rows:
        """Return the output of a sublayer; the second one reads a norm through ``mlp_in``."""
        if which:
            normed = context / np.linalg.norm(context, axis=-1, keepdims=True) * HIDDEN**0.5
            edited = tap(("mlp_in", layer), normed)
            context = normed if ("mlp_in", layer) == self.late else edited
        return np.tanh(context @ self.weights[layer, which])


def check(model: Model, sites: list[Site] | None = None, epsilon: float = EPSILON) -> Verdict:
    sites = served_sites(ON_STREAM, range(LAYERS), {}) if sites is None else sites
    base, donor = (model.run(CheckRequest(donor=d)) for d in (False, True))
    check_plain(sites, base, donor, epsilon)
    hops = hops_of(sites)
    got = [model.run(hop_request(hop, base, donor))[hop.target] for hop in hops]
    return check_hops(hops, got, base, donor, epsilon)


def test_accepts_right_taps() -> None:
    """Catches a check that refuses right taps, or that compares nothing."""
    assert check(Model()) == Verdict(hops=2 * LAYERS, conclusive=2 * LAYERS)


@pytest.mark.parametrize("late", [("pre_attn", 0), ("pre_attn", 2), ("post_attn", 1)])
def test_names_an_edit_that_misses_its_branch(late: Site) -> None:
    """Catches a tolerance that hides a missed branch."""
    with pytest.raises(SelfCheckError, match=rf"^{late[0]} of layer {late[1]}: an edit there does not"):
        check(Model(late=late))


def test_tolerates_rounding_only() -> None:
    """Catches a float32 tolerance on bfloat16, and a tolerance that accepts everything."""

    def rounded(rows: Rows) -> Rows:
        kept = rows.astype(np.float32).view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
        return kept.view(np.float32).astype(np.float64)

    bfloat16 = 2.0**-7
    assert check(Model(noise=rounded), epsilon=bfloat16).conclusive == 2 * LAYERS
    with pytest.raises(SelfCheckError, match="post_attn of layer 1: an edit there"):
        check(Model(noise=rounded, late=("post_attn", 1)), epsilon=bfloat16)


def test_accepts_values_added_for_the_token_itself() -> None:
    """Catches a check that refuses per-layer embeddings: the donor's first token differs."""
    for size in (0.02, 0.5):  # small beside the stream, and large
        assert check(Model(own_embedding=size)).hops == 2 * LAYERS
    with pytest.raises(SelfCheckError, match="post_attn of layer 1: an edit there"):
        check(Model(own_embedding=0.02, late=("post_attn", 1)))


def test_accepts_one_token_with_other_experts() -> None:
    """Catches an engine that does not start because rounding routed a token to another expert."""
    assert check(Model(flips=True)).hops == 2 * LAYERS


def test_names_a_site_without_rows() -> None:
    """Catches a tap that never ran."""
    model, sites = Model(), served_sites(ON_STREAM, range(LAYERS), {})
    base, donor = (dict(model.run(CheckRequest(donor=d))) for d in (False, True))
    donor[("post_attn", 2)] = np.full((TOKENS, HIDDEN), np.nan)
    with pytest.raises(SelfCheckError, match=r"^post_attn of layer 2: no finite row was stored.* try --dtype bfloat16"):
        check_plain(sites, base, donor, EPSILON)


def test_names_layers_that_do_not_join() -> None:
    """Catches taps on other layers than they claim."""
    model, sites = Model(), served_sites(ON_STREAM, range(LAYERS), {})
    base, donor = (dict(model.run(CheckRequest(donor=d))) for d in (False, True))
    base["pre_attn", 1], base["pre_attn", 2] = base["pre_attn", 2], base["pre_attn", 1]
    with pytest.raises(
        SelfCheckError, match=r"^pre_attn of layer 1: rows must equal those of post_block of layer 0, but differ"
    ):
        check_plain(sites, base, donor, EPSILON)


def test_skips_refused_points_and_other_stages() -> None:
    """Catches a hop across layers, to a refused point, or on another stage's layers."""
    sites = served_sites(ON_STREAM, [1, 2], {"post_attn": {"2": "parallel"}})
    assert hops_of(sites) == [
        Hop(("pre_attn", 1), ("post_attn", 1)),
        Hop(("post_attn", 1), ("post_block", 1)),
        Hop(("pre_attn", 2), ("post_block", 2)),
    ]
    assert check(Model(), sites).hops == 3


def test_zero_branch_is_inconclusive() -> None:
    """Catches a refusal of a model with a layer that adds nothing."""
    model = Model()
    model.weights[1, 0] = 0.0
    assert check(model) == Verdict(hops=2 * LAYERS, conclusive=2 * LAYERS - 1)


EVERYWHERE = served_sites(POINT_NAMES, range(LAYERS), {})


def test_checks_points_on_the_branches() -> None:
    """Catches a check without them: there are seven hops per layer, all conclusive."""
    assert check(Model(), EVERYWHERE) == Verdict(hops=7 * LAYERS, conclusive=7 * LAYERS)


@pytest.mark.parametrize("point", ["attn_out", "mlp_out"])
def test_names_a_branch_on_the_other_summand(point: PointName) -> None:
    """Catches a point that reads and edits the stream instead of the branch."""
    with pytest.raises(SelfCheckError, match=rf"^{point} of layer 1: .* must be .* plus {point}, but"):
        check(Model(swapped=(point, 1)), EVERYWHERE)


@pytest.mark.parametrize("point", ["mlp_in"])
def test_names_an_edit_that_misses_the_mlp(point: PointName) -> None:
    """Catches an edit of the MLP's input after the MLP has run; its reads are right."""
    with pytest.raises(SelfCheckError, match=rf"^{point} of layer 2: .* mlp_out .*: expected change \S+, error"):
        check(Model(late=(point, 2)), EVERYWHERE)


def test_names_an_edit_after_the_sum() -> None:
    """Catches an edit of a branch that is missing from the stream after attention."""

    class Behind(Model):
        def run(self, request: CheckRequest) -> dict[Site, Rows]:
            seen = super().run(request)
            for edit in request.edits:
                if (edit.point, edit.layers[0]) == ("attn_out", 1):
                    seen["post_attn", 1] = super().run(CheckRequest(donor=False))["post_attn", 1]
            return seen

    with pytest.raises(
        SelfCheckError, match=r"^attn_out of layer 1: an edit there does not change post_attn of layer 1 as expected"
    ):
        check(Behind(), EVERYWHERE)


def test_all_ranks_run_the_same_number_of_requests() -> None:
    """Catches ranks whose batches differ, so that a collective operation hangs."""
    refused = {"post_attn": {"1": "parallel"}, "mlp_in": {"1": "parallel"}}
    kinds = [
        hops_of(served_sites(POINT_NAMES, layers, why)) for layers, why in (([0, 1], {}), ([2], {}), ([0, 1], refused))
    ]
    assert len({len(aligned_hops(EVERYWHERE, hops)) for hops in kinds}) == 1
    for hops in kinds:
        assert sorted(map(str, hops)) == sorted(str(hop) for hop in aligned_hops(EVERYWHERE, hops) if hop is not None)
    on_stream = served_sites(ON_STREAM, range(LAYERS), {})
    assert len(aligned_hops(on_stream, hops_of(on_stream))) == len(on_stream)


def test_hops_of_a_parallel_block() -> None:
    """Catches a parallel block that is checked as a sequential one, or not at all."""
    sites = served_sites(POINT_NAMES, [0], {point: {"0": "parallel"} for point in ("post_attn", "mlp_in")})
    assert set(hops_of(sites)) == {
        Hop(("pre_attn", 0), ("post_block", 0)),
        Hop(("pre_attn", 0), ("attn_out", 0)),
        Hop(("pre_attn", 0), ("mlp_out", 0)),
        Hop(("attn_out", 0), ("post_block", 0), adds=True),
        Hop(("mlp_out", 0), ("post_block", 0), adds=True),
    }


def test_plain_probes_read_every_site() -> None:
    """Catches a site that falls between two requests."""
    sites = served_sites(ON_STREAM, range(LAYERS), {})
    requests = plain_requests(sites, 4)
    assert [len(request.captures) for request in requests] == [4, 4, 4, 4, 1, 1]
    streams: Streams = {site: np.zeros(1) for request in requests if request.donor for site in request.captures}
    assert list(streams) == sites


def finals(seed: int, scale: float = 1.0) -> list[Rows]:
    """Return the last hidden states of both requests."""
    random = np.random.default_rng(seed)
    return [scale * random.standard_normal((TOKENS, HIDDEN)) for _ in range(2)]


def test_plain_code_may_differ_by_rounding() -> None:
    """Catches an engine that does not start because kernels sum in another order or one token changes experts."""
    tapped = finals(1)
    check_plain_code(tapped, tapped, EPSILON)
    rounded = [rows + change for rows, change in zip(tapped, finals(2, 1e-3), strict=True)]
    check_plain_code(tapped, rounded, 2**-8)
    # Equal requests: only rounding is tolerated.
    check_plain_code([tapped[0], tapped[0]], [rounded[0], rounded[0]], 2**-8)
    for request, token in np.ndindex(2, TOKENS):
        elsewhere = [rows.copy() for rows in tapped]
        elsewhere[request][token] = 1.0
        check_plain_code(tapped, elsewhere, EPSILON)


@pytest.mark.parametrize("tokens", [slice(0, 1), slice(1, None), slice(None)])
@pytest.mark.parametrize("value", [0.0, np.nan])
def test_refuses_plain_code_that_computes_something_else(tokens: slice, value: float) -> None:
    """Catches plain code with other weights, or whose attention reads another cache (first tokens are right then)."""
    tapped = finals(1)
    plain = [rows.copy() for rows in tapped]
    for rows in plain:
        rows[tokens] = value
    with pytest.raises(SteeringError, match="plain_code: the model without taps computes other hidden states"):
        check_plain_code(tapped, plain, EPSILON)
