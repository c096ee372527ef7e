# SPDX-License-Identifier: Apache-2.0
"""Rows that cells put in place of those of the patched run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vllm_steer.patching.axes import Span
from vllm_steer.patching.runner import Rows, SiteRows
from vllm_steer.points import PointName
from vllm_steer.request import Edit

Subspaces = Mapping[tuple[str, int], Rows]
"""Directions ``[k, hidden]`` by point and layer."""


class Source(Protocol):
    """Rows by site and position of the patched run."""

    def rows(self, point: str, layer: int, positions: Sequence[int]) -> Rows:
        """Return one row for each position."""
        ...


@dataclass(frozen=True, eq=False)
class PromptSource:
    """Rows of a run of a prompt."""

    captured: SiteRows
    source_of: Mapping[int, int]
    """Position in the source by position in the patched run."""

    def rows(self, point: str, layer: int, positions: Sequence[int]) -> Rows:
        """Return the rows of the source at the positions that correspond to ``positions``."""
        return self.captured[point, layer][[self.source_of[position] for position in positions]]


@dataclass(frozen=True, eq=False)
class ConstantSource:
    """One row for all positions of a site, such as zero or the mean."""

    row_of: SiteRows
    """Rows ``[1, hidden]``."""

    def rows(self, point: str, layer: int, positions: Sequence[int]) -> Rows:
        """Return the site's row for each position."""
        return np.repeat(self.row_of[point, layer], len(positions), axis=0)


def cell_edits(
    source: Source,
    point: PointName,
    layers: Span,
    positions: Sequence[int],
    strength: float,
    subspaces: Subspaces | None = None,
) -> tuple[Edit, ...]:
    """Return the edits that patch the rows of some positions at some layers of one point.

    Args:
        source: The rows.
        point: The hook point.
        layers: The layers, each of which gets its own rows.
        positions: Positions in the patched run, ascending.
        strength: 1 to put the source's rows there, less to interpolate.
        subspaces: Directions by site, if only the component in their span is patched.
    """
    edits = []
    for layer in range(*layers):
        rows = source.rows(point, layer, positions)
        more: dict[str, Any] = {} if subspaces is None else {"subspace": subspaces[point, layer]}
        edits.append(
            Edit(
                kind="replace",
                point=point,
                layers=layer,
                vector=rows[0] if len(rows) == 1 else rows,
                tokens=list(positions),
                strength=strength,
                **more,
            )
        )
    return tuple(edits)


def random_control_edits(
    source: Source,
    own: Source,
    point: PointName,
    layers: Span,
    positions: Sequence[int],
    strength: float,
    subspaces: Subspaces,
    random: Subspaces,
) -> tuple[Edit, ...]:
    """Return the edits of a cell's control: changes of the same norm in a random subspace.

    Each row changes as much as the patch in ``subspaces`` changes the row of the unpatched run.

    Args:
        source: The rows.
        own: Rows of the unpatched run.
        point: The hook point.
        layers: The layers.
        positions: Positions in the patched run, ascending.
        strength: As for `cell_edits`.
        subspaces: Directions of the patch by site.
        random: Directions of the control by site.
    """
    edits: list[Edit] = []
    for layer in range(*layers):
        here = own.rows(point, layer, positions).astype(np.float64)
        away = source.rows(point, layer, positions) - here
        bases = (np.linalg.qr(each[point, layer].astype(np.float64).T)[0] for each in (subspaces, random))
        wanted, found = (np.linalg.norm(away @ basis, axis=1, keepdims=True) for basis in bases)
        scale = np.divide(wanted, found, out=np.zeros_like(wanted), where=found > 0)
        moved = PromptSource(
            {(point, layer): (here + scale * away).astype(np.float32)},
            {position: i for i, position in enumerate(positions)},
        )
        edits += cell_edits(moved, point, (layer, layer + 1), positions, strength, random)
    return tuple(edits)


def zeros(sites: Sequence[tuple[str, int]], hidden: int) -> ConstantSource:
    """Return the source of zero ablation."""
    return ConstantSource(dict.fromkeys(sites, np.zeros((1, hidden), np.float32)))


def means(captured: Sequence[SiteRows]) -> ConstantSource:
    """Return the source of mean ablation: each site's mean over all tokens of the reference prompts."""
    sites = captured[0]
    return ConstantSource(
        {
            site: np.concatenate([rows[site] for rows in captured]).mean(axis=0, keepdims=True, dtype=np.float64)
            .astype(np.float32)
            for site in sites
        }
    )  # fmt: skip


def resampled(captured: SiteRows, length: int) -> PromptSource:
    """Return the source of resample ablation: another prompt's rows at the same positions.

    Positions after its end get its last row.
    """
    last = len(next(iter(captured.values()))) - 1
    return PromptSource(captured, {position: min(position, last) for position in range(length)})


def noised(embeddings: Rows, positions: Sequence[int], sigma: float, seed: tuple[int, ...]) -> Edit:
    """Return the edit that adds Gaussian noise to the embeddings of some positions.

    The embeddings are the stream at ``pre_attn`` of layer 0, so the edit puts rows with noise there.

    Args:
        embeddings: The stream at ``pre_attn`` of layer 0, ``[tokens, hidden]``.
        positions: Positions that get noise.
        sigma: Standard deviation of the noise.
        seed: Seed of the draw.
    """
    noise = np.random.default_rng(seed).standard_normal((len(positions), embeddings.shape[1])) * sigma
    rows = (embeddings[list(positions)] + noise).astype(np.float32)
    vector = rows[0] if len(rows) == 1 else rows
    return Edit(kind="replace", point="pre_attn", layers=0, vector=vector, tokens=list(positions))


def random_subspaces(subspaces: Subspaces, seed: int) -> dict[tuple[str, int], Rows]:
    """Return as many random directions for each site as are given, for the control."""
    random = np.random.default_rng(seed)
    return {site: random.standard_normal(given.shape).astype(np.float32) for site, given in subspaces.items()}
