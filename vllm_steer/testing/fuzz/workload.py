# SPDX-License-Identifier: Apache-2.0
"""Workloads as plain data: engine settings and requests, with a JSON form so that a finding can be replayed anywhere.

Edits, captures, readouts and conditions have the form that a user would write, with ``{"seed": ..., "length": ...}`` in
the place of a vector, and a prompt is a list of tokens. :func:`sampling_params` fills in the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_steer.compat.internals import RequestOutputKind
from vllm_steer.params import SamplingParams
from vllm_steer.points import POINT_NAMES, points_on
from vllm_steer.request import Edit

NUM_LOGPROBS = 5
"""Number of log-probabilities per token, enough to distinguish a tie from a wrong token."""
LOWEST_TEMPERATURE = 0.01
"""Temperature of requests with ``n > 1``, for which vLLM refuses greedy sampling; the smallest value it accepts."""
SAE, NUM_FEATURES = "fuzz", 48
"""Name and size of the sparse autoencoder of every engine."""
Form: TypeAlias = dict[str, Any]
"""JSON form of an edit, a capture, a readout or a condition. An edit also has ``field``, the argument that holds it:
``steering`` or one of :data:`TIERS`, and as ``live`` the strength that is set when the request arrives."""
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
MODULE = "drawn"
"""Name under which each request with ``module`` registers its edits, so that every request replaces the module."""
TOKENS_OF = dict(zip(TIERS, ("all", "prompt", "generated"), strict=True))
"""Token selector of each tier."""
IN_MODULE = dict(zip((*TIERS, "steering"), ("base", "prefill", "decode", "edits"), strict=True))
"""Name in a module of each steering field of a request."""


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
    edits: list[Form] = []
    globally: list[Form] = []
    capture: Form | None = None
    readouts: dict[str, Form] = {}
    stops: list[Form] = []
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
    def conditions(self) -> list[Form]:
        """Conditions of all edits, and stops."""
        return [*(each for edit in self.edits for each in edit.get("when", ())), *self.stops]

    @property
    def strengths(self) -> dict[str, float]:
        """Live strengths by name."""
        return {live_name(edit): edit["live"] for edit in self.edits if "live" in edit}

    @property
    def standalone(self) -> Request:
        """The equivalent request without neighbours: edits from modules and global steering become its own edits.

        Global additions come first. Tiers only add, so the order of additions does not change the result.
        """
        global_edits = [{**edit, "field": "steering", "tokens": TOKENS_OF[edit["field"]]} for edit in self.globally]
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


def fill(form: Any, hidden: int) -> Any:
    """Return a form with a vector for each seed; ``rows`` of them form a matrix, and ``width`` replaces ``hidden``."""
    if isinstance(form, list):
        return [fill(each, hidden) for each in form]
    if not isinstance(form, dict):
        return form
    if "seed" not in form:
        return {name: fill(each, hidden) for name, each in form.items()}
    seed, length, width = form["seed"], form["length"], form.get("width", hidden)
    if "rows" not in form:
        return vector(seed, length, width)
    return np.stack([vector(seed + i, length, width) for i in range(form["rows"])])


def sampling_params(request: Request, hidden: int) -> Any:
    """Return the request's ``SamplingParams``, built from the arguments that users write."""
    fields: dict[str, Any]
    fields = {"steering_modules": [MODULE]} if request.module else _edit_fields(request.edits, hidden)
    if request.capture is not None:
        spec = fill(request.capture, hidden)
        if request.stream and spec.get("reduce") not in ("mean", "last"):
            spec["stream"] = True
        fields["capture"] = {"memory": spec}
    if request.readouts:
        fields["readouts"] = fill(request.readouts, hidden)
    if request.stops:
        fields["stop_on"] = request.stops
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


def live_name(edit: Form) -> str:
    """Return the name of the live strength of an edit."""
    return f"live{edit['vector']['seed']}"


def module_of(edits: Sequence[Form], hidden: int) -> dict[str, Any]:
    """Return the edits as arguments of ``LLM.steering.register`` and ``set``."""
    return {IN_MODULE[field]: value for field, value in _edit_fields(edits, hidden).items()}


def _edit_fields(edits: Sequence[Form], hidden: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for edit in edits:
        form = fill(edit, hidden)
        field = form.pop("field")
        if field in TIERS:
            layers = fields.setdefault(field, {}).setdefault(form["point"], {})
            layers.update(
                {layer: {"vector": form["vector"], "scale": form.get("strength", 1.0)} for layer in form["layers"]}
            )
        else:
            live = {"live": live_name(edit)} if "live" in edit else {}
            fields.setdefault("steering", []).append(Edit(**{**form, **live}))
    return fields


def prompt_of(request: Request) -> dict[str, Any]:
    """Return the request's prompt in vLLM's form."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt


Random: TypeAlias = np.random.Generator


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model that a workload depends on.

    Attributes:
        scale: Typical norm of the rows at ``len(POINT_NAMES) * layer + point``.
        points: Hook points that can be edited and captured.
        cuda: Whether the engine runs on a GPU.
    """

    hidden: int
    layers: int
    vocab: int
    scale: tuple[float, ...]
    points: tuple[str, ...] = points_on(())
    cuda: bool = False


def pick(rng: Random, choices: Sequence[Any]) -> Any:
    """Return one of several choices."""
    return choices[int(rng.integers(len(choices)))]


def draw_layers(rng: Random, facts: ModelFacts, most: int) -> list[int]:
    count = int(rng.integers(1, min(most, facts.layers) + 1))
    return sorted(int(layer) for layer in rng.choice(facts.layers, count, replace=False))


def draw_edit(rng: Random, facts: ModelFacts, field: str, kind: str, **given: Any) -> Form:
    """Draw an edit at one or two layers of a point, with a norm comparable to the rows there."""
    point = str(rng.choice(facts.points))
    layers = draw_layers(rng, facts, 2)
    length = facts.scale[len(POINT_NAMES) * layers[0] + POINT_NAMES.index(point)] * float(rng.uniform(0.3, 1.2))
    drawn = {"seed": int(rng.integers(1 << 30)), "length": length}
    strength = float(rng.uniform(0.4, 1.0))
    return {
        "field": field, "kind": kind, "point": point, "layers": layers, "vector": drawn, "strength": strength, **given,
    }  # fmt: skip
