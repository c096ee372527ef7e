# SPDX-License-Identifier: Apache-2.0
"""Proof of a recipe inside vLLM, for architectures that HF Transformers does not have or that run only on a GPU.

Two kinds of evidence, neither of which uses the package's recipes:

* **values**: captured rows against the tensors that forward hooks on vLLM's modules see. A block's input is the sum of
  its input tensors; ``x_out(i)`` is ``x_in(i + 1)``; ``x_mid - x_in`` is the output of the attention module;
  ``x_out - x_mid`` is ``mlp_out``, and ``mlp_in`` is the input of the MLP.
* **causes**: a steered request against a plain one in an engine whose modules are changed by such hooks: a block's
  arguments, its attention's output, its MLP's input, its return value. Also an edit at ``post_block(i)`` against one at
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

from tests.conformance.branches import supported_branches
from tests.conformance.cases import PROMPTS, STREAM_FIELDS, TRACE_FIELDS, Case, EditMaker
from tests.conformance.edits import KINDS, EditAt, Rows
from tests.conformance.engine import Answer, generate
from tests.conformance.hf_reference import Array, Trace
from tests.conformance.model import LAYERS, TinyModel

BRANCHES = "self_attn|attn|attention|self_attention|mixer|mamba|linear_attn|short_conv"
"""Usual names of the attention branch in vLLM's layers, for rows that do not name it."""
MLPS = (
    "mlp", "feed_forward", "feedforward", "ffn", "fc1", "block_sparse_moe", "moe", "share_expert", "shared_mlp",
    "third_sub_layer",
)  # fmt: skip
"""Names of the submodules that compute the MLP branch in vLLM's layers; a layer may have several."""
SHARED = "meta_mlp"
"""Name of the list of MLPs, one per layer here, that are not part of the layers."""
BRANCH_KINDS = ("add_normed", "ablate")
"""Kinds of edit to try at the points on the branches, whose taps are the same as those on the stream."""

MIXED = ("HYPER-CONNECTIONS", "ATTENTION-RESIDUALS", "CONVOLVED")
"""Families with several streams or convolved branches, which formulas replace (``mixed_identities.py``)."""


@dataclass(frozen=True)
class Check:
    """One comparison. ``effect`` is the change that the edit makes by itself, None for a comparison of values.

    ``medians`` are the error and the effect at the median token. A wrong tap is off at most tokens, while rounding
    sends only some of them to other experts.
    """

    name: str
    error: float
    effect: float | None = None
    medians: tuple[float, float] | None = None


class HookedModel:
    """The decoder layers of a running engine, observed and changed by forward hooks."""

    def __init__(self, tiny: TinyModel, model: nn.Module) -> None:
        self.tiny = tiny
        self.layers: list[Any] = [module for module in model.modules() if hasattr(module, "steering_taps")]
        self.runs: list[Any] = [None] * len(self.layers)
        self.current: Any = None
        if tiny.pass_argument is None and len(self.layers) != LAYERS:
            raise RuntimeError(f"{tiny}: {len(self.layers)} layers carry taps")
        # Blocks of Intern-S2 share lists of experts, which read the MLP's input beside each block's own MLP.
        self.shared_mlps: Any = next((found for each in model.modules() if (found := getattr(each, SHARED, None))), ())
        self.pair = tiny.recipe.startswith("FUSED")
        scale = tiny.multiplier if tiny.multiplier is not None else 1.0
        self.scale = float(tiny.settings[scale] if isinstance(scale, str) else scale)

    def observe_runs(self, llm: Any) -> None:
        """Find the runs of the layers by running the model, if it runs its layers several times per token."""
        if self.tiny.pass_argument is None:
            return
        seen: list[tuple[Any, Any]] = []

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            self.current = {**dict(zip(names, args, strict=False)), **kwargs}[self.tiny.pass_argument]
            seen.append((module, self.current))

        for layer in self.layers:
            layer.register_forward_pre_hook(enter, with_kwargs=True)
        generate(llm, [Case("runs", PROMPTS[0])], new_tokens=1)
        if len(seen) != LAYERS:
            raise RuntimeError(f"{self.tiny}: {len(seen)} runs of layers")
        self.layers, self.runs = [module for module, _ in seen], [run for _, run in seen]

    def in_run(self, number: int, hook: Any) -> Any:
        """Return a hook that acts only in one run of its layer."""

        def in_its_run(*given: Any) -> Any:
            return hook(*given) if self.current == self.runs[number] else None

        return in_its_run

    def stream_in(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """Return the input stream of a call in float32, and the name of the argument that becomes the residual."""
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        name = next(name for name in ("hidden_states", "decoder_hidden_states") if name in given)
        hidden, residual = given[name], given.get("residual") if self.pair else None
        if residual is None:
            return hidden.float(), name
        return hidden.float() + residual.float(), "residual"

    def branch_of(self, number: int) -> nn.Module | None:
        """Return the module whose output is the attention branch, or None if the block has only an MLP."""
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
        """Return the modules that read the MLP's input."""
        layer = self.layers[number]
        own = [getattr(layer, name) for name in MLPS if getattr(layer, name, None) is not None]
        return [*own, *self.shared_mlps[number : number + 1]]

    @contextmanager
    def watching(self) -> Iterator[list[dict[str, Any]]]:
        """Record the tensors of the last forward pass of each layer."""
        seen: list[dict[str, Any]] = [{} for _ in self.layers]
        handles = []
        for number, layer in enumerate(self.layers):

            def enter(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                seen[number]["x_in"] = self.stream_in(module, args, kwargs)[0].clone().cpu()

            handles.append(layer.register_forward_pre_hook(self.in_run(number, enter), with_kwargs=True))
            branch = self.branch_of(number)
            for mlp in self.mlps_of(number):

                def given(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
                    seen[number]["mlp_in"] = (args[0] if args else kwargs["hidden_states"]).float().clone().cpu()

                handles.append(mlp.register_forward_pre_hook(self.in_run(number, given), with_kwargs=True))
            if branch is not None:

                def leave(module: Any, args: Any, kwargs: Any, out: Any, number: int = number) -> None:
                    seen[number]["branch"] = _branch_output(args, kwargs, out).float().clone().cpu()

                handles.append(branch.register_forward_hook(self.in_run(number, leave), with_kwargs=True))
            if self.tiny.cross is not None:

                def cross(module: Any, args: Any, out: Any, number: int = number) -> None:
                    seen[number]["cross"] = out.float().clone().cpu()

                handles.append(layer.get_submodule(self.tiny.cross).register_forward_hook(cross))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def changed(self, point: str, number: int, rows: Rows) -> Iterator[None]:
        """Edit all tokens of all requests by hooks on vLLM's modules."""
        layer, streams = self.layers[number], {}
        branch = self.branch_of(number)
        at_entry = point == "pre_attn" or (point == "post_attn" and branch is None)

        def enter(module: Any, args: Any, kwargs: Any) -> Any:
            stream, carrier = self.stream_in(module, args, kwargs)
            # Copied, since some layers add to their input in place.
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
                # Kimi's layers return another stream between the two summands, which Kimi-Linear does not have.
                at = 1 if out[1] is not None else 2
                change = _change(rows, out[0].float() + out[at].float() - before)
                return (*out[:at], _plus(out[at], change), *out[at + 1 :])
            if isinstance(out, tuple):
                return (_plus(out[0], _change(rows, out[0].float() - before)), *out[1:])
            return _plus(out, _change(rows, out.float() - before))

        def leave_cross(module: Any, args: Any, out: Any) -> None:
            streams["x_mid"] = streams["x_mid"] + out.float()

        handles = [layer.register_forward_pre_hook(self.in_run(number, enter), with_kwargs=True)]
        if self.tiny.cross is not None and point == "mlp_out":
            handles.append(layer.get_submodule(self.tiny.cross).register_forward_hook(leave_cross))
        if point in ("post_block", "mlp_out"):
            handles.append(layer.register_forward_hook(self.in_run(number, leave)))
        if point == "mlp_in":
            gated = self.in_run(number, enter_mlp)
            handles += [mlp.register_forward_pre_hook(gated, with_kwargs=True) for mlp in self.mlps_of(number)]
        if point in ("attn_out", "post_attn", "mlp_out") and not at_entry:
            gated = self.in_run(number, leave_branch)
            handles.append(branch.register_forward_hook(gated, with_kwargs=True))  # type: ignore[union-attr]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _plus(tensor: Any, change: Any) -> Any:
    return (tensor.float() + change).to(tensor.dtype)


def _change(rows: Rows, stream: torch.Tensor) -> torch.Tensor:
    """Return the change that a formula makes to ``[..., tokens, hidden]``."""
    flat = stream.reshape(-1, stream.shape[-1]).cpu()
    return (rows(flat) - flat).to(stream.device).reshape(stream.shape)


def _branch_output(args: Any, kwargs: Any, out: Any) -> Any:
    """Return the branch of a mixer; some return nothing and write into their last argument."""
    if out is None:
        return kwargs.get("output", args[-1] if args else None)
    return out[0] if isinstance(out, tuple) else out


def _replace_branch(kwargs: Any, args: Any, out: Any, new: Any) -> Any:
    if out is None:
        _branch_output(args, kwargs, out).copy_(new)
        return None
    return (new, *out[1:]) if isinstance(out, tuple) else new


def check_identities(tiny: TinyModel, llm: Any) -> list[Check]:
    """Run all comparisons in one engine; ``tiny`` names its attention branch."""
    from tests.conformance.mixed_identities import MixedModel

    kind = MixedModel if tiny.recipe in MIXED else HookedModel
    hooks: list[HookedModel] = []
    llm.apply_model(lambda model: hooks.append(kind(tiny, model)))
    hooks[0].observe_runs(llm)
    stream_points = [point for point in STREAM_FIELDS if point not in tiny.refused]
    branches = supported_branches(tiny)
    # Parallel blocks refuse edits at post_attn and serve reads.
    read = [point for point in STREAM_FIELDS if point not in tiny.unread]
    return [*_values(hooks[0], llm, read, branches), *_causes(hooks[0], llm, stream_points, branches)]


def _values(hooks: HookedModel, llm: Any, stream_points: Sequence[str], branches: Sequence[str]) -> list[Check]:
    checks: list[Check] = []

    def compare(name: str, ours: Array, theirs: Array, whole: Array | None = None) -> None:
        far = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs if whole is None else whole, axis=-1)
        checks.append(Check(name, float(far.max())))

    with hooks.watching() as seen:
        streams = generate(llm, [Case("values", PROMPTS[0])], [*stream_points, *branches], new_tokens=1)[0].streams
    # vLLM begins the prompt of an encoder-decoder with a token of its own.
    rows = streams["pre_attn"].shape[1]
    for number in range(LAYERS):
        at = {point: stream[number] for point, stream in streams.items()}
        x_in = _rows(seen[number]["x_in"], rows)
        compare(f"x_in({number}) is the input of the block", at["pre_attn"], x_in)
        if number and number not in hooks.tiny.gaps:
            compare(f"x_out({number - 1}) is x_in({number})", streams["post_block"][number - 1], at["pre_attn"])
        if "post_attn" in stream_points:
            branch = hooks.scale * _rows(seen[number]["branch"], rows) if "branch" in seen[number] else 0 * x_in
            compare(f"x_mid({number}) - x_in is the branch", at["post_attn"], x_in + branch)
            if "attn_out" in branches:
                added = _rows(seen[number]["attn_out"], rows) if "attn_out" in seen[number] else branch
                compare(f"attn_out({number})", at["attn_out"], added)
            if "mlp_out" in branches:
                between = _rows(seen[number]["cross"], rows) if "cross" in seen[number] else 0.0
                mlp = at["post_block"] - x_in - branch - between
                # A difference of rounded streams is as far off as these are.
                whole = at["post_block"] if hooks.tiny.dtype == "bfloat16" else None
                compare(f"mlp_out({number}) is x_out - x_mid", at["mlp_out"], mlp, whole)
        if "x_out" in seen[number]:
            compare(f"x_out({number})", at["post_block"], _rows(seen[number]["x_out"], rows))
        if "mlp_in" in branches:
            compare(f"mlp_in({number}) is the input of the MLP", at["mlp_in"], _rows(seen[number]["mlp_in"], rows))
    return checks


def _causes(hooks: HookedModel, llm: Any, stream_points: Sequence[str], branches: Sequence[str]) -> list[Check]:
    plain_cases = [Case(f"plain {index}", prompt) for index, prompt in enumerate(PROMPTS)]
    plain = generate(llm, plain_cases)
    streams = generate(llm, [Case("plain", PROMPTS[0])], [*stream_points, *branches], new_tokens=1)[0].streams
    trace = Trace(plain[0].logprobs, *(streams.get(point, streams["pre_attn"]) for point in TRACE_FIELDS))
    make = EditMaker(trace)
    checks = []
    places = [(point, number) for point in stream_points for number in (1, 2) if point != "post_block"]
    # The ends of the other layers are compared with the layer that reads them.
    ends = [number - 1 for number in sorted({*hooks.tiny.gaps, LAYERS})]
    for point, number in [*places, *(("post_block", end) for end in ends), *((point, 1) for point in branches)]:
        for kind in BRANCH_KINDS if point in branches else KINDS:
            edit = make.edit(kind, point, number)
            ours = _steered(llm, edit)
            with hooks.changed(point, number, edit.formula):
                theirs = generate(llm, plain_cases)
            checks.append(_compare(f"{kind} at {point} of layer {number}, by hooks", ours, theirs, plain))
    joined = set(range(1, LAYERS)) - {*hooks.tiny.gaps, *hooks.tiny.forks}
    for number in (after - 1 for after in sorted(joined)):
        for kind in KINDS:
            edit = make.edit(kind, "post_block", number)
            ours, theirs = _steered(llm, edit), _steered(llm, EditAt(edit.formula, "pre_attn", number + 1))
            checks.append(_compare(f"{kind} at post_block({number}) and pre_attn({number + 1})", ours, theirs, plain))
    return checks


def _steered(llm: Any, edit: EditAt) -> list[Answer]:
    return generate(llm, [Case(str(index), prompt, (edit,)) for index, prompt in enumerate(PROMPTS)])


def _compare(name: str, ours: Sequence[Answer], theirs: Sequence[Answer], plain: Sequence[Answer]) -> Check:
    """Compare log-probabilities up to the first token that differs; after a near-tie the texts differ."""
    pairs = list(zip(ours, theirs, plain, strict=True))
    error = np.concatenate([_logprob_distances(one, other) for one, other, _ in pairs])
    effect = np.concatenate([_logprob_distances(other, without) for _, other, without in pairs])
    return Check(name, float(error.max()), float(effect.max()), (float(np.median(error)), float(np.median(effect))))


def _logprob_distances(one: Answer, other: Answer) -> Array:
    """Return the largest difference of a log-probability at each token."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), len(one.token_ids)
    )
    # Row t predicts token t + 1, so the last row with a common past is the one before the first difference.
    ours, theirs = one.logprobs[:same], other.logprobs[:same]
    # Some models rule tokens out by a log-probability of minus infinity, whose difference from itself is not a number.
    far: Array = np.abs(np.where(ours == theirs, 0.0, ours - theirs)).max(-1)
    return far


def _rows(tensor: torch.Tensor, count: int) -> Array:
    array: Array = tensor.reshape(-1, tensor.shape[-1])[:count].numpy()
    return array
