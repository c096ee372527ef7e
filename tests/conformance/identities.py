# SPDX-License-Identifier: Apache-2.0
"""Proof of a recipe inside vLLM, for architectures that HF Transformers does not have or that run on a GPU only.

Two kinds of evidence, none of which uses the package's own idea of where a point is:

* **values**: captured rows against what forward hooks on vLLM's modules see. A block's input is the sum of the
  tensors that it is given; ``x_out(i)`` is ``x_in(i + 1)``; ``x_mid - x_in`` is what the attention module returns;
  ``x_out - x_mid`` is ``mlp_out``, and ``mlp_in`` what the MLP is given.
* **causes**: a steered request against a plain one in an engine whose modules are changed by such hooks: a block's
  arguments, its attention's output, its MLP's input, its return value. And an edit at ``post_block(i)`` against one at
  ``pre_attn(i + 1)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.conformance.branches import served_branches
from tests.conformance.cases import PROMPTS, STREAM_AT, TRACED_AT, Case, Vectors
from tests.conformance.edits import KINDS, EditAt, Rows
from tests.conformance.engine import Answer, ask
from tests.conformance.hf_reference import Array, Trace
from tests.conformance.model import LAYERS, TinyModel

BRANCHES = "self_attn|attn|attention|self_attention|mixer|mamba|linear_attn|short_conv"
"""Where the attention branch is in vLLM's layers, where it is not named as in HF and the row does not say."""
MLPS = ("mlp", "feed_forward", "ffn", "fc1", "block_sparse_moe", "moe", "share_expert", "shared_mlp")
"""What computes the MLP branch in vLLM's layers: all of these that a layer has."""
BRANCH_KINDS = ("add_normed", "ablate")
"""What is asked at the points on the branches, which have the taps that the others have."""


@dataclass(frozen=True)
class Check:
    """One comparison. ``effect`` is the change that the edit itself makes, None for a comparison of values."""

    name: str
    error: float
    effect: float | None = None


@dataclass(frozen=True)
class Seen:
    """What hooks saw of one forward pass, each ``[layers, tokens, hidden]`` float32."""

    x_in: Array
    branch: Array


class Inside:
    """The decoder layers of a running engine, with hooks."""

    def __init__(self, tiny: TinyModel, model: nn.Module) -> None:
        self.tiny = tiny
        self.layers: list[Any] = [module for module in model.modules() if hasattr(module, "steering_taps")]
        if len(self.layers) != LAYERS:
            raise RuntimeError(f"{tiny}: {len(self.layers)} layers carry taps")
        self.pair = tiny.recipe.startswith("FUSED")
        scale = tiny.multiplier if tiny.multiplier is not None else 1.0
        self.scale = float(tiny.settings[scale] if isinstance(scale, str) else scale)

    def stream_in(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The stream that a call of the layer is given, float32, and the name of the argument that carries it on."""
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, residual = given["hidden_states"], given.get("residual") if self.pair else None
        if residual is None:
            return hidden.float(), "hidden_states"
        return hidden.float() + residual.float(), "residual"

    def branch_of(self, number: int) -> nn.Module | None:
        """The module whose output is the attention branch, None where the block has an MLP alone."""
        layer = self.layers[number]
        if number in self.tiny.mlp_blocks:
            return None
        names = (self.tiny.branch_in_vllm or f"{self.tiny.branch}|{BRANCHES}").split("|")
        for name in names:
            try:
                found: nn.Module = layer.get_submodule(name)
            except AttributeError:
                continue
            return found
        raise AttributeError(f"{self.tiny}: none of {names} in {type(layer).__name__}")

    def mlps_of(self, number: int) -> list[nn.Module]:
        """The modules that are given the input of the MLP."""
        layer = self.layers[number]
        return [getattr(layer, name) for name in MLPS if getattr(layer, name, None) is not None]

    @contextmanager
    def watching(self) -> Iterator[list[dict[str, Any]]]:
        """The last forward pass of each layer, as hooks see it."""
        seen: list[dict[str, Any]] = [{} for _ in self.layers]
        handles = []
        for number, layer in enumerate(self.layers):

            def enter(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                seen[number]["x_in"] = self.stream_in(module, args, kwargs)[0].clone().cpu()

            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            branch = self.branch_of(number)
            for mlp in self.mlps_of(number):

                def given(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                    seen[number]["mlp_in"] = (args[0] if args else kwargs["hidden_states"]).float().clone().cpu()

                handles.append(mlp.register_forward_pre_hook(given, with_kwargs=True))
            if branch is not None:

                def leave(module: Any, args: Any, kwargs: Any, out: Any, number: int = number) -> None:
                    seen[number]["branch"] = _branch_output(args, kwargs, out).float().clone().cpu()

                handles.append(branch.register_forward_hook(leave, with_kwargs=True))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def changed(self, point: str, number: int, rows: Rows) -> Iterator[None]:
        """All tokens of all requests edited by hooks on vLLM's modules."""
        layer, streams = self.layers[number], {}
        branch = self.branch_of(number)
        at_entry = point == "pre_attn" or (point == "post_attn" and branch is None)

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            stream, carrier = self.stream_in(module, args, kwargs)
            # A copy: some layers add to their input in place.
            streams["x_in"] = stream.clone()
            if not at_entry:
                return None
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            given[carrier] = _plus(given[carrier], _change(rows, stream))
            return (), given

        def leave_branch(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
            added = _branch_output(args, kwargs, out)
            whole = self.scale * added.float()
            streams["x_mid"] = streams["x_in"] + whole
            if point not in ("post_attn", "attn_out"):
                return None
            change = _change(rows, whole if point == "attn_out" else streams["x_mid"]) / self.scale
            return _replace_branch(kwargs, args, out, _plus(added, change))

        def enter_mlp(module: Any, args: Any, kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            new = _plus(given, _change(rows, given.float()))
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        def leave(module: Any, args: Any, out: Any) -> Any:
            before = streams["x_mid"] if point == "mlp_out" else 0.0
            if self.pair:
                change = _change(rows, out[0].float() + out[1].float() - before)
                return (out[0], _plus(out[1], change), *out[2:])
            if isinstance(out, tuple):
                return (_plus(out[0], _change(rows, out[0].float() - before)), *out[1:])
            return _plus(out, _change(rows, out.float() - before))

        handles = [layer.register_forward_pre_hook(enter, with_kwargs=True)]
        if point in ("post_block", "mlp_out"):
            handles.append(layer.register_forward_hook(leave))
        if point == "mlp_in":
            handles += [mlp.register_forward_pre_hook(enter_mlp, with_kwargs=True) for mlp in self.mlps_of(number)]
        if point in ("attn_out", "post_attn", "mlp_out") and not at_entry:
            handles.append(branch.register_forward_hook(leave_branch, with_kwargs=True))  # type: ignore[union-attr]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _plus(tensor: Any, change: Any) -> Any:
    return (tensor.float() + change).to(tensor.dtype)


def _change(rows: Rows, stream: torch.Tensor) -> torch.Tensor:
    """The change that a formula makes to ``[..., tokens, hidden]``."""
    flat = stream.reshape(-1, stream.shape[-1]).cpu()
    return (rows(flat) - flat).to(stream.device).reshape(stream.shape)


def _branch_output(args: Any, kwargs: Any, out: Any) -> Any:
    """Some mixers return nothing and write into a tensor that they are given last."""
    if out is None:
        return kwargs.get("output", args[-1] if args else None)
    return out[0] if isinstance(out, tuple) else out


def _replace_branch(kwargs: Any, args: Any, out: Any, new: Any) -> Any:
    if out is None:
        _branch_output(args, kwargs, out).copy_(new)
        return None
    return (new, *out[1:]) if isinstance(out, tuple) else new


def check_identities(tiny: TinyModel, llm: Any) -> list[Check]:
    """All comparisons for one running engine; ``tiny`` says where its attention branch is."""
    inside: list[Inside] = []
    llm.apply_model(lambda model: inside.append(Inside(tiny, model)))
    served = [point for point in STREAM_AT if point not in tiny.refused]
    branches = served_branches(tiny)
    return [*_values(inside[0], llm, served, branches), *_causes(inside[0], llm, served, branches)]


def _values(inside: Inside, llm: Any, served: Sequence[str], branches: Sequence[str]) -> list[Check]:
    checks = []
    with inside.watching() as seen:
        streams = ask(llm, [Case("values", PROMPTS[0])], [*served, *branches], new_tokens=1)[0].streams
    rows = len(PROMPTS[0])
    for number in range(LAYERS):
        x_in = streams["pre_attn"][number]
        hooked = _rows(seen[number]["x_in"], rows)
        checks.append(Check(f"x_in({number}) is what the block is given", _far(x_in, hooked)))
        if number:
            before = streams["post_block"][number - 1]
            checks.append(Check(f"x_out({number - 1}) is x_in({number})", _far(before, x_in)))
        if "post_attn" in served:
            branch = _rows(seen[number]["branch"], rows) if "branch" in seen[number] else np.zeros_like(x_in)
            mid = hooked + inside.scale * branch
            checks.append(Check(f"x_mid({number}) - x_in is the branch", _far(streams["post_attn"][number], mid)))
            if "attn_out" in branches:
                checks.append(Check(f"attn_out({number})", _far(streams["attn_out"][number], inside.scale * branch)))
            if "mlp_out" in branches:
                grown = streams["post_block"][number] - mid
                checks.append(Check(f"mlp_out({number}) is x_out - x_mid", _far(streams["mlp_out"][number], grown)))
        if "mlp_in" in branches:
            given = _rows(seen[number]["mlp_in"], rows)
            checks.append(Check(f"mlp_in({number}) is what the MLP is given", _far(streams["mlp_in"][number], given)))
    return checks


def _causes(inside: Inside, llm: Any, served: Sequence[str], branches: Sequence[str]) -> list[Check]:
    plain_cases = [Case(f"plain {index}", prompt) for index, prompt in enumerate(PROMPTS)]
    plain = ask(llm, plain_cases)
    streams = ask(llm, [Case("plain", PROMPTS[0])], [*served, *branches], new_tokens=1)[0].streams
    trace = Trace(plain[0].logprobs, *(streams.get(point, streams["pre_attn"]) for point in TRACED_AT))
    make = Vectors(trace)
    checks = []
    places = [(point, number) for point in served for number in (1, 2) if point != "post_block"]
    for point, number in [*places, ("post_block", LAYERS - 1), *((point, 1) for point in branches)]:
        for kind in BRANCH_KINDS if point in branches else KINDS:
            edit = make.edit(kind, point, number)
            ours = _steered(llm, edit)
            with inside.changed(point, number, edit.formula):
                theirs = ask(llm, plain_cases)
            checks.append(_compare(f"{kind} at {point} of layer {number}, by hooks", ours, theirs, plain))
    for number in range(LAYERS - 1):
        for kind in KINDS:
            edit = make.edit(kind, "post_block", number)
            ours, theirs = _steered(llm, edit), _steered(llm, EditAt(edit.formula, "pre_attn", number + 1))
            checks.append(_compare(f"{kind} at post_block({number}) and pre_attn({number + 1})", ours, theirs, plain))
    return checks


def _steered(llm: Any, edit: EditAt) -> list[Answer]:
    return ask(llm, [Case(str(index), prompt, (edit,)) for index, prompt in enumerate(PROMPTS)])


def _compare(name: str, ours: Sequence[Answer], theirs: Sequence[Answer], plain: Sequence[Answer]) -> Check:
    """Log-probabilities as far as the tokens are the same: after a near-tie, the answers are about different texts."""
    error = effect = 0.0
    for one, other, without in zip(ours, theirs, plain, strict=True):
        error = max(error, _far_logprobs(one, other))
        effect = max(effect, _far_logprobs(other, without))
    return Check(name, error, effect)


def _far_logprobs(one: Answer, other: Answer) -> float:
    same = next(
        (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), len(one.token_ids)
    )
    # Row t predicts token t + 1: the last one of which both have the same past is the row before the fork.
    return float(np.abs(one.logprobs[:same] - other.logprobs[:same]).max())


def _rows(tensor: torch.Tensor, count: int) -> Array:
    array: Array = tensor.reshape(-1, tensor.shape[-1])[:count].numpy()
    return array


def _far(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max())
