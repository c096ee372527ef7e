# SPDX-License-Identifier: Apache-2.0
"""Compare the formulas of ``mixes.py`` with HF Transformers' own layers, on the same random weights.

``identities.py`` compares vLLM's layers with these formulas, so it cannot find a formula that misunderstands a family.
Here HF's model runs twice: as it is, with hooks on its modules, and with the formulas in place of its layers' forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal
from unittest.mock import patch

import numpy as np
import torch

from tests.conformance import mixes
from tests.conformance.edits import Formula
from tests.conformance.hf_families import FAMILIES, TOKENS, Family
from tests.conformance.model import HIDDEN, build

POINTS: Final = ("pre_attn", "post_attn", "mlp_in", "post_block")
Site = tuple[str, int]
"""A point and a layer."""
Sites = dict[Site, torch.Tensor]
Change = Callable[[str, int, torch.Tensor], torch.Tensor]
"""Given a point, a layer and what is there, ``[tokens, streams, hidden]`` or ``[tokens, hidden]``, return the next."""
Fault = Literal["late", "one stream", "transposed", "unconvolved"]


@dataclass(frozen=True)
class Difference:
    """Largest relative distance of a tensor, and what the edit did to the final hidden state."""

    name: str
    error: float
    effect: float | None = None


def compare(name: str, fault: Fault | None = None) -> list[Difference]:
    """Compare rows, edits and the final mix of one family; ``fault`` spoils the formulas."""
    family = FAMILIES[name]
    model = _built(name)
    plain, final = _run(family, model, None, _unchanged)
    rows, formula_final = _run(family, model, fault, _unchanged, formulas=True)
    found = [Difference(f"{point} of layer {n}", _far(rows[point, n], plain[point, n])) for point, n in plain]
    found.append(Difference("final hidden state", _far(formula_final, final)))
    if family.head is not None:
        found.append(_final_mix(family, model))
    for kind in ("add", "ablate"):
        for site in [(point, number) for point in POINTS for number in (1, 2)]:
            formula = _formula(kind, plain[site])
            theirs, theirs_final = _run(family, model, None, _edit_of(formula, site))
            ours, ours_final = _run(
                family, model, fault, _edit_of(formula, site, one=fault == "one stream"), formulas=True
            )
            effect = _far(theirs_final, final)
            error = max(_far(ours_final, theirs_final), *(_far(ours[at], theirs[at]) for at in theirs))
            found.append(Difference(f"{kind} at {site[0]} of layer {site[1]}", error, effect))
    return found


@cache
def _built(name: str) -> Any:
    return build(FAMILIES[name].tiny)


def _formula(kind: Literal["add", "ablate"], there: torch.Tensor) -> Formula:
    """Return an edit as large as the stream that it changes."""
    vector = np.random.default_rng(7).standard_normal(HIDDEN).astype(np.float32)
    mean = _mean(there)
    if kind == "add":
        return Formula("add", vector * float(mean.norm(dim=-1).mean()) / float(np.linalg.norm(vector)), 0.5)
    return Formula("ablate", mean.mean(0).numpy() + 0.1 * vector)


def _mean(there: torch.Tensor) -> torch.Tensor:
    return there.mean(-2) if there.dim() == 3 else there


def _unchanged(point: str, number: int, there: torch.Tensor) -> torch.Tensor:
    return there


def _edit_of(formula: Formula, site: Site, one: bool = False) -> Change:
    def change(point: str, number: int, there: torch.Tensor) -> torch.Tensor:
        if (point, number) != site:
            return there
        mean = _mean(there)
        if there.dim() == 2:
            return formula(mean)
        by = (formula(mean) - mean).unsqueeze(-2)
        return torch.cat([there[:, :1] + by, there[:, 1:]], 1) if one else there + by

    return change


@torch.no_grad()
def _run(
    family: Family, model: Any, fault: Fault | None, change: Change, formulas: bool = False
) -> tuple[Sites, torch.Tensor]:
    """Run HF's model or the formulas in its layers; return what is at the points and the final hidden state."""
    sites: Sites = {}

    def at(point: str, number: int, there: torch.Tensor) -> torch.Tensor:
        sites[point, number] = change(point, number, there).clone()
        return sites[point, number]

    with _replaced(family, model, at, fault) if formulas else _hooked(family, model, at):
        final: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).last_hidden_state[0]
    return dict(sorted(sites.items())), final


@contextmanager
def _hooked(family: Family, model: Any, at: Change) -> Iterator[None]:
    """Call ``at`` at the points of HF's own layers."""

    def unpacked(given: torch.Tensor) -> torch.Tensor:
        return given[0].unflatten(-1, (family.streams, -1)) if family.flat else given[0]

    def packed(there: torch.Tensor) -> torch.Tensor:
        return (there.flatten(-2) if family.flat else there)[None]

    with ExitStack() as stack:
        for number, layer in enumerate(model.layers):

            def enter(_: Any, args: Any, number: int = number) -> Any:
                return packed(at("pre_attn", number, unpacked(args[0]))), *args[1:]

            def mid(_: Any, args: Any, number: int = number) -> None:
                # In place: the layer adds the MLP's output to this very tensor.
                args[0].copy_(packed(at("post_attn", number, unpacked(args[0]))))

            def enter_mlp(_: Any, args: Any, number: int = number) -> Any:
                return at("mlp_in", number, args[0][0])[None], *args[1:]

            def leave(_: Any, args: Any, out: Any, number: int = number) -> Any:
                streams = packed(at("post_block", number, unpacked(out[0] if family.pair else out)))
                return (streams, *out[1:]) if family.pair else streams

            for handle in (
                layer.register_forward_pre_hook(enter),
                layer.get_submodule(family.mid).register_forward_pre_hook(mid),
                layer.mlp.register_forward_pre_hook(enter_mlp),
                layer.register_forward_hook(leave),
            ):
                stack.callback(handle.remove)
        yield


@contextmanager
def _replaced(family: Family, model: Any, at: Change, fault: Fault | None) -> Iterator[None]:
    """Run the formulas in place of the forward of HF's layers."""
    right = mixes.complete
    with ExitStack() as stack:
        if fault == "transposed":
            stack.enter_context(patch.object(mixes, "complete", lambda x, s, w, c: right(x, s, w, c.mT)))
        for number, layer in enumerate(model.layers):
            forward = _formula_forward(family, model, layer, number, at, fault)
            stack.enter_context(patch.object(layer, "forward", forward))
        yield


def _formula_forward(
    family: Family, model: Any, layer: Any, number: int, at: Change, fault: Fault | None
) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, **given: Any) -> Any:
        left: list[torch.Tensor] = []

        def attend(x: torch.Tensor) -> torch.Tensor:
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            others = {name: value for name, value in given.items() if name != "input_ids"}
            if "Linear" in type(mixer).__name__ or "Delta" in type(mixer).__name__:
                mask = others.pop("attention_mask", None)
                others |= {"cache_params": None, "attention_mask": given.get("conv_mask", mask)}
            out = mixer(hidden_states=x[None], **others)
            return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]

        late: list[torch.Tensor] = []

        def point(name: str, there: torch.Tensor) -> torch.Tensor:
            there = sum(late, start=there) if name != "mlp_in" else there
            edited = at(name, number, there)
            if name == "post_block":
                left.append(edited)
            elif fault == "late" and name != "mlp_in":
                # The sublayer reads the stream as it was; the edit joins behind it.
                late[:] = [edited - there]
                return there
            return edited

        parts = family.adapt(layer, attend)
        if fault == "unconvolved":
            parts.attn_sconv = lambda x, positions: x
        streams = hidden_states[0].unflatten(-1, (family.streams, -1)) if family.flat else hidden_states[0]
        # The streams of the first layer are made of the embedding here, so HF's are compared with them.
        begin = family.streams and not number
        family.enter(family.formula(parts, point), model.embed_tokens(torch.tensor(TOKENS)) if begin else streams)
        out = (left[0].flatten(-2) if family.flat else left[0])[None]
        return (out, None) if family.pair else out

    return forward


@torch.no_grad()
def _final_mix(family: Family, model: Any) -> Difference:
    """Compare the mix in front of the final norm on random streams."""
    head = model.hyper_connection_mixer if family.flat else model.hc_head
    streams = torch.randn(len(TOKENS), family.streams, HIDDEN, generator=torch.Generator().manual_seed(3))
    theirs = head((streams.flatten(-2) if family.flat else streams)[None])[0]
    assert family.head is not None
    return Difference("final mix", _far(family.head(head, streams), theirs))


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest distance of a row, in lengths of the other's."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())
