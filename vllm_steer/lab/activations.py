# SPDX-License-Identifier: Apache-2.0
"""Captured rows of texts: one row per text at each layer, and the length of the stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import track

from vllm_steer.capture.files.reader import Captures
from vllm_steer.capture.results import RowAccess
from vllm_steer.errors import SteeringError, warn_caller
from vllm_steer.lab.examples import Text
from vllm_steer.lab.harvest import MANIFEST, read_manifest
from vllm_steer.lab.shards import RUN
from vllm_steer.lab.text_rows import TextRows, digest_of, position_lists
from vllm_steer.points import PointName
from vllm_steer.registry.directions import WITHOUT_FIRST, Array
from vllm_steer.request import CaptureSpec
from vllm_steer.request.scalars import parse_json, read_choice, shown
from vllm_steer.request.sites import read_layers, read_point

Pool = Literal["mean", "last"]
POOLS: tuple[Pool, ...] = ("mean", "last")
_OUTLIER = 10.0
"""Length of a row, in median lengths, from which it dominates the mean of a text's rows."""
_NAMED = 5
"""Most texts that a warning names."""
_BEGINNING = 3
"""Last token that the beginning of a text has, where rows are long for other reasons than the text's content."""


def describe_tokens(positions: Any, pool: Pool) -> dict[str, str]:
    """Return the entries of a file's provenance for the tokens of a text and how their rows are pooled."""
    return {"positions": positions if isinstance(positions, str) else json.dumps(positions, default=str), "pool": pool}


def described_tokens(provenance: Mapping[str, str]) -> tuple[Any, Pool]:
    """Return the positions and the pool of a file's provenance, or the defaults."""
    where: Any = provenance.get("positions") or WITHOUT_FIRST
    if isinstance(where, str) and where.startswith("["):
        where = parse_json(where, "provenance.positions")
    return where, "last" if provenance.get("pool") == "last" else "mean"


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows of texts at a hook point, by layer."""

    model: str
    point: PointName
    rows: Mapping[int, Array]
    """``[texts, hidden]`` by layer."""
    streams: Mapping[int, float]
    """Median length of the captured rows of all tokens, by layer."""
    longest: int
    """Tokens of the longest text; 0 for stored rows."""


def collect(
    llm: Any,
    texts: Sequence[Text],
    *,
    point: str = "post_block",
    layers: Any = "all",
    positions: Any = WITHOUT_FIRST,
    pool: Pool = "mean",
    answer: bool = False,
    use_tqdm: bool = False,
) -> Activations:
    """Run texts through a model and return one row per text and layer.

    ``answer`` ends conversations with the tokens that begin an answer; see `make` for the other arguments.

    Raises:
        SteeringError: The model has no such layer or hook point, or a text has no tokens at the positions.
    """
    read_choice(pool, POOLS, "pool")
    read = TextRows(llm, texts, point=point, layers=layers, positions=positions, dtype="float32", answer=answer)
    with closing(read.stream(range(len(read)))) as captured:
        progress = track(captured, "texts", len(read), console=Console(stderr=True), disable=not use_tqdm)
        return pool_rows(progress, texts, read.facts.model, read.point, read.layers, pool, max(read.sizes))


def read_stored(
    folder: str | Path,
    texts: Sequence[Text],
    wanted: Sequence[int],
    *,
    point: str,
    layers: Any,
    positions: Any,
    pool: Pool,
) -> tuple[Activations, Any]:
    """Return one row per text and layer of the files of a harvest, and the positions of the harvest.

    ``texts`` are all texts of the harvest, in its order, and ``wanted`` the numbers of those whose rows are returned.

    Raises:
        SteeringError: The folder has no complete harvest of these texts, or it has other sites or tokens.
    """
    read_choice(pool, POOLS, "pool")
    if not (Path(folder) / MANIFEST).is_file():
        raise SteeringError("rows", f"{folder} has no {MANIFEST}; give a folder that `vllm-steer harvest` wrote")
    found, captures = read_manifest(Path(folder)), Captures(Path(folder), RUN)
    name, read = read_point(point, "point"), read_layers(layers, "layers")
    if (there := found.hooks.get(name)) is None:
        raise SteeringError("point", f"{folder} has no rows of {name}; use {', '.join(found.hooks)}")
    numbers = tuple(there) if read == "all" else read
    if missing := [layer for layer in numbers if layer not in there]:
        raise SteeringError("layers", f"{folder} has no rows of layer {missing[0]}; use some of {there}")
    both = (position_lists(each) for each in (positions, found.positions))
    asked, stored = (CaptureSpec(hooks=found.hooks, positions=each).tokens for each in both)
    if positions != WITHOUT_FIRST and asked != stored:
        raise SteeringError("positions", f"{folder} has rows of {shown(found.positions)}; omit it")
    if found.answer and isinstance(texts[0][0], dict):
        raise SteeringError("rows", f"{folder} has conversations with the beginning of an answer; harvest without it")
    tags = [each.tag for each in captures]
    if len(texts) != len(tags) or digest_of(zip(texts, tags, strict=True)) != found.digest:
        if len(tags) < found.texts:
            problem = f"{folder} has the rows of {len(tags)} of {found.texts} texts; complete the harvest"
        else:
            problem = f"{folder} has the rows of {len(tags)} texts, which are not these {len(texts)} in this order"
            problem += "; give the examples that were harvested, or harvest these"
        raise SteeringError("rows", problem)
    chosen = [texts[i] for i in wanted]
    return pool_rows((captures[i] for i in wanted), chosen, found.model, name, numbers, pool), found.positions


def _warn_of_outliers(
    texts: Sequence[Text], tokens: Sequence[Array], lengths: Mapping[int, Sequence[Array]], streams: Mapping[int, float]
) -> None:
    """Warn if some texts have a row that is so long that it dominates the mean of the text's rows.

    ``tokens`` and ``lengths`` have the number of the token and the length of each row.
    """
    times = {layer: [each / streams[layer] for each in rows] for layer, rows in lengths.items() if streams[layer]}
    most = {layer: np.array([each.max() for each in rows]) for layer, rows in times.items()}
    numbers = {layer: int((each > _OUTLIER).sum()) for layer, each in most.items()}
    if not any(numbers.values()):
        return
    layer = max(numbers, key=lambda each: (numbers[each], most[each].max()))
    concerned = np.flatnonzero(most[layer] > _OUTLIER)
    named = [
        f"{_quoted(texts[i])} (token {tokens[i][times[layer][i].argmax()]}, {most[layer][i]:.0f} times)"
        for i in concerned[:_NAMED]
    ]
    if len(concerned) > _NAMED:
        named.append(f"and {len(concerned) - _NAMED} more")
    found = np.concatenate([tokens[i][times[layer][i] > _OUTLIER] for i in concerned])
    warn_caller(
        f"at layer {layer}, {len(concerned)} of {len(texts)} texts have a row that is more than {_OUTLIER:.0f} times "
        f"as long as the median row and dominates the text's mean. The longest, with the token's number from 0: "
        f"{', '.join(named)}. {_remedies(int(found.min()), int(found.max()))}"
    )


def _quoted(text: Text) -> str:
    """Return a text, the last message of a conversation or token ids, shortened."""
    last = text[-1]
    return shown(last.get("content") if isinstance(last, dict) else text)


def _remedies(first: int, last: int) -> str:
    """Return what to do about long rows, of which the first and the last have these tokens."""
    if last > _BEGINNING:
        return "Change these texts, or use pool last"
    leave = f'positions=[[{last + 1}, None]] (in a command, --positions "[[{last + 1}, null]]")'
    if first == 0:
        return f"Use {leave}, or pool last"
    return f'Begin these texts with another word, such as "Well, ", or use pool last, or {leave}'


def pool_rows(
    captured: Iterable[RowAccess],
    texts: Sequence[Text],
    model: str,
    point: PointName,
    layers: Sequence[int],
    pool: Pool,
    longest: int = 0,
) -> Activations:
    """Return the activations of texts from their captured rows."""
    pooled: dict[int, list[Array]] = {layer: [] for layer in layers}
    lengths: dict[int, list[Array]] = {layer: [] for layer in layers}
    tokens: list[Array] = []
    for each in captured:
        tokens.append(each.positions(point, layers[0]).numpy())
        for layer in layers:
            array = each.numpy(point, layer).astype(np.float32, copy=False)
            pooled[layer].append(array[-1] if pool == "last" else array.mean(0))
            lengths[layer].append(np.linalg.norm(array, axis=1))
    rows = {layer: np.stack(arrays) for layer, arrays in pooled.items()}
    streams = {layer: float(np.median(np.concatenate(arrays))) for layer, arrays in lengths.items()}
    if pool == "mean":
        _warn_of_outliers(texts, tokens, lengths, streams)
    return Activations(model, point, rows, streams, longest)
