# SPDX-License-Identifier: Apache-2.0
"""A workload as plain data: engine settings and requests, to JSON and back, so that a finding runs again anywhere.

Vectors stand as a seed and a length, prompts as tokens; :func:`sampling_params` makes of a request what a user would
have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.sampling_params import RequestOutputKind

from vllm_steer.params import SamplingParams
from vllm_steer.spec import Edit

TOP = 5
"""Log-probabilities asked of every token: enough to tell a tie from a wrong token."""
COLD = 0.01
"""The temperature of requests with several samples, which vLLM does not allow to be greedy; its smallest."""
NUM_DIRECTIONS = 2
Tokens: TypeAlias = str | list[int | list[int | None]]
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
MODULE = "drawn"
"""The name under which every request with a module registers its own, so that it means another thing each time."""
TOKENS_OF = dict(zip(TIERS, ("all", "prompt", "generated"), strict=True))
"""Which tokens each tier edits."""
IN_MODULE = dict(zip((*TIERS, "steering"), ("base", "prefill", "decode", "edits"), strict=True))
"""What a module calls the fields of a request."""


class EditCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One edit; ``field`` is the argument that it is written in, ``steering`` or one of :data:`TIERS`."""

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


class CaptureCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One capture by the consumer ``memory``; ``reduce`` ``directions`` is a projection on seeded ones."""

    hooks: dict[str, str | list[int]]
    positions: Tokens
    before: bool = False
    dtype: str | None = None
    reduce: str | None = None


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One request, and when it comes and goes.

    ``grows``: the name of a request whose prompt and first ``keep`` generated tokens this one's prompt begins with;
    once the reference has run, the prompt is whole and ``grows`` only says after which request this one arrives.
    ``globally``: additions in tiers, the global steering that is in force when it arrives.
    ``module``: the edits are registered under a name, by which the request calls them. ``stream``: its tokens, and its
    rows where they are not reduced to one, come in pieces.
    ``gap``: engine steps between the arrival before it and this one. ``abort_after``: engine steps from its arrival to
    its abort.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    edits: list[EditCase] = []
    globally: list[EditCase] = []
    capture: CaptureCase | None = None
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
        """Whether nothing of ours is done to it."""
        return not self.edits and not self.globally and self.capture is None

    @property
    def by_itself(self) -> Request:
        """The same with nothing around it and with everything said in it: edits that come from elsewhere are its own.

        Global additions stand among its own edits, which begin with additions: their order changes nothing.
        """
        ahead = [
            msgspec.structs.replace(edit, field="steering", tokens=TOKENS_OF[edit.field]) for edit in self.globally
        ]
        return msgspec.structs.replace(
            self, edits=[*ahead, *self.edits], globally=[], module=False, stream=False, gap=0, grows=None,
            abort_after=None,
        )  # fmt: skip


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Arguments of the engine under test, and the sizes of its tables."""

    engine: dict[str, Any] = {}
    steering: dict[str, Any] = {}


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All of one run."""

    settings: Settings
    requests: list[Request]

    def to_json(self) -> str:
        """The workload without what is as it is by default."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Workload:
        """Raises ``msgspec.ValidationError`` on anything that :meth:`to_json` did not write."""
        return msgspec.json.decode(text, type=cls)


def vector(seed: int, length: float, hidden: int) -> npt.NDArray[np.float32]:
    """A random float32 vector ``[hidden]`` of that length."""
    drawn = np.random.default_rng(seed).standard_normal(hidden)
    return np.asarray(drawn * (length / np.linalg.norm(drawn)), dtype=np.float32)


def sampling_params(request: Request, hidden: int) -> Any:
    """The request's parameters, through the arguments that users write."""
    fields: dict[str, Any]
    fields = {"steering_modules": [MODULE]} if request.module else _edit_fields(request.edits, hidden)
    if request.capture is not None:
        spec = {name: value for name, value in msgspec.to_builtins(request.capture).items() if value is not None}
        if request.capture.reduce == "directions":
            spec["reduce"] = {"directions": np.stack([vector(seed, 1.0, hidden) for seed in range(NUM_DIRECTIONS)])}
        if request.stream and request.capture.reduce not in ("mean", "last"):
            spec["stream"] = True
        fields["capture"] = {"memory": spec}
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=0.0 if request.n == 1 else COLD,
        n=request.n,
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
        skip_reading_prefix_cache=request.skip_cache,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.CUMULATIVE,
        **fields,
    )


def module_of(edits: Sequence[EditCase], hidden: int) -> dict[str, Any]:
    """Edits as arguments of ``LLM.steering.register`` and ``set``."""
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
            bounds = {name: getattr(edit, name) for name in ("low", "high") if getattr(edit, name) is not None}
            fields.setdefault("steering", []).append(Edit(vector=v, **general, **bounds))
    return fields


def prompt_of(request: Request) -> dict[str, Any]:
    """The request's prompt as vLLM takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt
