# SPDX-License-Identifier: Apache-2.0
"""Workloads as plain data: engine settings and requests, with a JSON form so that a finding can be replayed anywhere.

A vector is a seed and a length, a prompt is a list of tokens. :func:`sampling_params` builds the arguments that a user
would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.compat.internals import RequestOutputKind
from vllm_steer.params import SamplingParams
from vllm_steer.request import Edit
from vllm_steer.request.hidden_layer import ACTIVATIONS

NUM_LOGPROBS = 5
"""Number of log-probabilities per token, enough to distinguish a tie from a wrong token."""
LOWEST_TEMPERATURE = 0.01
"""Temperature of requests with ``n > 1``, for which vLLM refuses greedy sampling; the smallest value it accepts."""
NUM_DIRECTIONS = 2
SAE, NUM_FEATURES = "fuzz", 48
"""Name and size of the sparse autoencoder of every engine."""
Tokens: TypeAlias = str | list[int | list[int | None]] | dict[str, Any]
"""A selector; a part of the output is a dict with ``between`` or ``outside`` of two token ids."""
NUM_UNITS = 6
"""Hidden units of a probe with a hidden layer."""
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
MODULE = "drawn"
"""Name under which each request with ``module`` registers its edits, so that every request replaces the module."""
TOKENS_OF = dict(zip(TIERS, ("all", "prompt", "generated"), strict=True))
"""Token selector of each tier."""
IN_MODULE = dict(zip((*TIERS, "steering"), ("base", "prefill", "decode", "edits"), strict=True))
"""Name in a module of each steering field of a request."""


class GateCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A condition on the probe ``readout``, as in ``when`` of an edit; a stop has ``tokens`` only."""

    readout: str
    bound: float
    above: bool = True
    window: str | None = None
    over: str | None = None
    alpha: float | None = None
    tokens: int | None = None
    positions: Tokens | None = None
    sharpness: float | None = None
    release: float | None = None
    """Bound of the opposite direction that switches a latch off."""

    def to_field(self) -> dict[str, Any]:
        """Return the argument that a user would write."""
        direction, other = ("above", "below") if self.above else ("below", "above")
        given = {name: getattr(self, name) for name in ("window", "over", "alpha", "tokens", "positions", "sharpness")}
        field: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.release is not None:
            field["release"] = {other: self.release}
        return {"readout": self.readout, direction: self.bound, **field}


class EditCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One edit. ``field`` is the argument that holds it: ``steering`` or one of :data:`TIERS`."""

    field: str
    kind: str
    point: str
    layers: list[int]
    seed: int
    length: float
    strength: float = 1.0
    tokens: Tokens = "all"
    low: float | None = None
    high: float | None = None
    directions: int = 0
    """``replace`` only: number of seeded directions of the subspace; 0 for the whole row."""
    matrix: bool = False
    """``replace`` only: another row at each position in ``tokens``, which are single positions."""
    feature: int = 0
    """``feature`` only: number of the feature of :data:`SAE`."""
    set: float | None = None
    add: float | None = None
    when: list[GateCase] = []
    live: float | None = None
    """Live strength that is set when the request arrives."""

    @property
    def in_module(self) -> bool:
        """Whether a module can have the edit."""
        if self.directions or self.matrix or self.when or self.kind == "feature" or self.live is not None:
            return False
        return not isinstance(self.tokens, dict)


class CaptureCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One capture by the ``memory`` consumer; ``reduce="directions"`` projects on seeded directions."""

    hooks: dict[str, str | list[int]]
    positions: Tokens
    before: bool = False
    dtype: str | None = None
    reduce: str | None = None


class ReadoutCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One readout. Weights and directions are seeded and have norm 1; with ``top_k`` alone it is a lens."""

    layers: list[int]
    positions: Tokens
    seed: int = 0
    top_k: int = 0
    name: str = ""
    """Name that conditions use."""
    form: str = ""
    """``sigmoid`` or ``cosine`` for a probe, an activation for one with a hidden layer, ``projections`` or ``sae``;
    empty for a plain probe or a lens."""

    @property
    def is_lens(self) -> bool:
        return bool(self.top_k) and not self.form


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One request and its arrival.

    Attributes:
        globally: Global steering in force when the request arrives; additions in tiers.
        module: Register the edits as a module and use them by its name.
        stream: Receive tokens, and rows that are not reduced to one, incrementally.
        gap: Engine steps between the previous arrival and this one.
        grows: Name of a request that this one continues: the prompt starts with that request's prompt and its first
            ``keep`` generated tokens. The reference run resolves the prompt; then only the order of arrival remains.
        abort_after: Engine steps between arrival and abort.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    edits: list[EditCase] = []
    globally: list[EditCase] = []
    capture: CaptureCase | None = None
    readouts: list[ReadoutCase] = []
    stops: list[GateCase] = []
    n: int = 1
    salt: str | None = None
    skip_cache: bool = False
    module: bool = False
    stream: bool = False
    gap: int = 0
    grows: str | None = None
    keep: int = 0
    abort_after: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the request is neither steered nor read."""
        return not self.edits and not self.globally and self.capture is None and not self.readouts

    @property
    def conditions(self) -> list[GateCase]:
        """Conditions of all edits, and stops."""
        return [*(each for edit in self.edits for each in edit.when), *self.stops]

    @property
    def strengths(self) -> dict[str, float]:
        """Live strengths by name."""
        return {live_name(edit): edit.live for edit in self.edits if edit.live is not None}

    @property
    def standalone(self) -> Request:
        """The equivalent request without neighbours: edits from modules and global steering become its own edits.

        Global additions come first. Tiers only add, so the order of additions does not change the result.
        """
        global_edits = [
            msgspec.structs.replace(edit, field="steering", tokens=TOKENS_OF[edit.field]) for edit in self.globally
        ]
        return msgspec.structs.replace(
            self, edits=[*global_edits, *self.edits], globally=[], module=False, stream=False, gap=0, grows=None,
            abort_after=None,
        )  # fmt: skip


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Arguments of the engine under test and its steering configuration."""

    engine: dict[str, Any] = {}
    steering: dict[str, Any] = {}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Settings and requests of one run."""

    settings: Settings
    requests: list[Request]

    def to_json(self) -> str:
        """Return the workload as JSON, without default values."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Workload:
        """Parse the output of :meth:`to_json`.

        Raises:
            msgspec.ValidationError: ``text`` is not a workload.
        """
        return msgspec.json.decode(text, type=cls)


def vector(seed: int, length: float, hidden: int) -> npt.NDArray[np.float32]:
    """Return a random float32 vector ``[hidden]`` of norm ``length``."""
    drawn = np.random.default_rng(seed).standard_normal(hidden)
    return np.asarray(drawn * (length / np.linalg.norm(drawn)), dtype=np.float32)


def sampling_params(request: Request, hidden: int) -> Any:
    """Return the request's ``SamplingParams``, built from the arguments that users write."""
    fields: dict[str, Any]
    fields = {"steering_modules": [MODULE]} if request.module else _edit_fields(request.edits, hidden)
    if request.capture is not None:
        spec = {name: value for name, value in msgspec.to_builtins(request.capture).items() if value is not None}
        if request.capture.reduce == "directions":
            spec["reduce"] = {"directions": np.stack([vector(seed, 1.0, hidden) for seed in range(NUM_DIRECTIONS)])}
        if request.stream and request.capture.reduce not in ("mean", "last"):
            spec["stream"] = True
        fields["capture"] = {"memory": spec}
    if request.readouts:
        fields["readouts"] = {each.name or f"r{i}": _readout(each, hidden) for i, each in enumerate(request.readouts)}
    if request.stops:
        fields["stop_on"] = [each.to_field() for each in request.stops]
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=0.0 if request.n == 1 else LOWEST_TEMPERATURE,
        n=request.n,
        ignore_eos=True,
        detokenize=False,
        logprobs=NUM_LOGPROBS,
        skip_reading_prefix_cache=request.skip_cache,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.CUMULATIVE,
        **fields,
    )


def _readout(case: ReadoutCase, hidden: int) -> dict[str, Any]:
    site: dict[str, Any] = {"point": "post_block", "positions": case.positions}
    if case.form == "sae":
        return {"sae": SAE, "top_k": case.top_k, "layer": case.layers[0], **site}
    if case.top_k:
        return {"lens": {"top_k": case.top_k}, "layers": case.layers, **site}
    site["layer"] = case.layers[0]
    if case.form == "projections":
        return {"projections": [vector(case.seed + i, 1.0, hidden) for i in range(NUM_DIRECTIONS)], **site}
    if case.form in ACTIVATIONS:
        units = [vector(case.seed + i, 1.0, hidden) for i in range(NUM_UNITS)]
        outputs = vector(case.seed, NUM_UNITS**0.5, NUM_UNITS)
        probe = {"weights": units, "outputs": outputs, "biases": outputs[::-1] * 0.1, "activation": case.form}
        return {"probe": probe, **site}
    switch = {case.form: True} if case.form else {}
    return {"probe": vector(case.seed, 1.0, hidden), **switch, **site}


def live_name(edit: EditCase) -> str:
    """Return the name of the live strength of an edit."""
    return f"live{edit.seed}"


def module_of(edits: Sequence[EditCase], hidden: int) -> dict[str, Any]:
    """Return the edits as arguments of ``LLM.steering.register`` and ``set``."""
    return {IN_MODULE[field]: value for field, value in _edit_fields(edits, hidden).items()}


def _edit_fields(edits: Sequence[EditCase], hidden: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for edit in edits:
        v = vector(edit.seed, edit.length, hidden)
        if edit.field in TIERS:
            layers = fields.setdefault(edit.field, {}).setdefault(edit.point, {})
            layers.update({layer: {"vector": v, "scale": edit.strength} for layer in edit.layers})
        else:
            names = ("kind", "point", "layers", "strength", "tokens")
            general: dict[str, Any] = {name: getattr(edit, name) for name in names}
            bounds: dict[str, Any] = {
                name: getattr(edit, name) for name in ("low", "high") if getattr(edit, name) is not None
            }
            if edit.when:
                bounds["when"] = [each.to_field() for each in edit.when]
            if edit.live is not None:
                bounds["live"] = live_name(edit)
            if edit.kind == "feature":
                change = {"set": edit.set} if edit.add is None else {"add": edit.add}
                fields.setdefault("steering", []).append(
                    Edit(sae=SAE, feature=edit.feature, **change, **general, **bounds)
                )
                continue
            rows = v
            if edit.matrix:
                rows = np.stack([vector(edit.seed + i, edit.length, hidden) for i in range(len(edit.tokens))])
            if edit.directions:
                bounds["subspace"] = np.stack([vector(edit.seed + 99 + i, 1.0, hidden) for i in range(edit.directions)])
            fields.setdefault("steering", []).append(Edit(vector=rows, **general, **bounds))
    return fields


def prompt_of(request: Request) -> dict[str, Any]:
    """Return the request's prompt in vLLM's form."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt
