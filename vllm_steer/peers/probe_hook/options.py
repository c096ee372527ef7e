# SPDX-License-Identifier: Apache-2.0
"""Options of the engines, and their translation to a capture and to attributes of outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_steer import CaptureSpec, SamplingParams, add_steering, capture_specs, has_steering
from vllm_steer.adapters import shown
from vllm_steer.errors import SteeringError
from vllm_steer.peers.engines import rows_of

POINT = "post_block"
Rows = dict[int, torch.Tensor]


@dataclass(frozen=True)
class ProbeOptions:
    """Layers and tokens whose hidden states outputs have."""

    spec: CaptureSpec
    include_prefill: bool
    include_decode: bool
    last_prefill_token: bool
    last_decode_token: bool
    include_last: bool

    @classmethod
    def read(cls, layers: Any, **flags: Any) -> ProbeOptions:
        """Check the options.

        Raises:
            SteeringError: An option is invalid, or no tokens are chosen.
        """
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise SteeringError(name, f"must be True or False, not {shown(value)}")
        for last, whole in (("last_prefill_token", "include_prefill"), ("last_decode_token", "include_decode")):
            if flags[last] and not flags[whole]:
                flags[whole] = True
        if flags["include_last"] and not flags["include_decode"]:
            raise SteeringError("include_last", "is the last generated token; it needs include_decode=True")
        positions: Any
        if flags["include_prefill"] and flags["include_decode"]:
            positions = "all"
        elif flags["include_prefill"]:
            positions = "last_prompt" if flags["last_prefill_token"] else "all_prompt"
        elif flags["include_decode"]:
            positions = "all_generated"
        else:
            raise SteeringError(
                "include_decode", "and include_prefill are both False, so outputs would have no rows; set one of them"
            )
        if layers in ("all", ["all"], ("all",)):
            layers = "all"
        elif not isinstance(layers, (list, tuple, range)) or not layers:
            raise SteeringError("layers", f'must be a list of layer numbers or ["all"], not {shown(layers)}')
        try:
            spec = CaptureSpec(hooks={POINT: layers if layers == "all" else list(layers)}, positions=positions)
        except SteeringError as error:
            raise SteeringError("layers", error.problem) from None
        return cls(spec=spec, **flags)

    def params(self, params: Any, *, streamed: bool = False) -> Any:
        """Return a copy of sampling parameters that captures.

        Raises:
            SteeringError: ``params`` have edits or captures without this capture.
        """
        if has_steering(params):
            given = dict(capture_specs(params)).get("memory")
            if given is None:
                raise SteeringError(
                    "sampling_params", "have steering but no capture; add SamplingParams(..., capture=llm.capture)"
                )
            if (given.hooks, given.tokens, given.reduce) != (self.spec.hooks, self.spec.tokens, None):
                raise SteeringError(
                    "sampling_params", "capture other rows than this engine returns; use capture=llm.capture"
                )
            if self.include_last:
                raise SteeringError(
                    "include_last",
                    "runs the last token in a request of its own, without the steering of sampling_params; omit it",
                )
            return params
        return add_steering(params, capture=self.capture(streamed=streamed))

    def unsteered(self, params: Any, *, streamed: bool = False) -> Any:
        """Return a copy of sampling parameters that captures.

        Raises:
            SteeringError: ``params`` have edits or captures.
        """
        if has_steering(params):
            raise SteeringError("sampling_params", "have steering or captures; use vllm_steer.AsyncLLM for both")
        return self.params(params, streamed=streamed)

    def capture(self, *, streamed: bool = False) -> dict[str, Any]:
        """Return the field ``capture`` of ``SamplingParams``."""
        wire = {"hooks": dict(self.spec.hooks), "positions": self.spec.positions.to_wire()}
        named = {"prompt": "all_prompt", "generated": "all_generated"}
        if isinstance(wire["positions"], str):
            wire["positions"] = named.get(wire["positions"], wire["positions"])
        return {"memory": {**wire, **({"stream": True} if streamed else {})}}

    def attach(self, output: Any, sites: Mapping[Any, Any], prompt: int, last: Rows | None = None) -> None:
        """Set the attributes of an output or of one of its samples.

        Args:
            output: The object that receives the attributes.
            sites: Rows by site, with their positions.
            prompt: Length of the prompt.
            last: Row of the last generated token by layer.
        """
        prefill: Rows = {}
        decode: Rows = {}
        for (_, layer), site in sorted(sites.items(), key=lambda item: item[0][1]):
            count = int(np.searchsorted(site.positions, prompt))
            prefill[layer], decode[layer] = site.rows[:count], site.rows[count:]
            if last is not None:
                decode[layer] = torch.cat([decode[layer], last[layer]])
        if self.last_prefill_token:
            prefill = {layer: rows[-1:] for layer, rows in prefill.items()}
        if self.last_decode_token:
            decode = {layer: rows[-1:] for layer, rows in decode.items()}
        output.hidden_states = output.hidden = decode if self.include_decode else {}
        output.prefill_hidden_states = output.prefill_hidden = prefill if self.include_prefill else {}


def complete_rows(completion: Any) -> Mapping[Any, Any]:
    """Return the rows of a finished sample by site; raise RuntimeError if some are missing."""
    sites: Mapping[Any, Any] = rows_of(completion, "hidden states are not complete").sites
    return sites


def last_prompt(output: Any, token_ids: Sequence[int], max_model_len: int) -> dict[str, list[int]]:
    """Return the prompt whose last token is the last of a sample's generated tokens, ``token_ids``.

    Raises:
        SteeringError: The prompt had images or other data that token ids do not include, or the sample is as long as
            the engine allows.
    """
    if getattr(output, "multi_modal_placeholders", None):
        raise SteeringError("include_last", "serves text prompts only; omit it")
    tokens = [*output.prompt_token_ids, *token_ids]
    if len(tokens) >= max_model_len:
        raise SteeringError(
            "include_last",
            f"runs the last token as part of a prompt, which must be shorter than max_model_len, {max_model_len}; "
            f"request {output.request_id} has {len(tokens)} tokens: lower max_tokens, or omit include_last",
        )
    return {"prompt_token_ids": tokens}


def check_global_steering(snapshot: Any) -> str | None:
    """Return the digest of global steering, which must cover the same tokens whether they are generated or a prompt.

    Args:
        snapshot: A snapshot of the engine's registry.

    Raises:
        SteeringError: An edit counts from the prompt's end, where the request of the last token has another prompt.
    """
    program = snapshot.steering_program
    if program is None:
        return None
    for number, edit in enumerate(program.edits):
        if not edit.selector.is_absolute:
            raise SteeringError(
                "include_last",
                f"runs the last token as part of a prompt, where {program.edit_source(number)} of global steering, for "
                f"tokens {shown(edit.tokens)}, covers other tokens; omit it, or clear global steering",
            )
    digest: str | None = snapshot.steering_digest
    return digest


def require_global_steering(outputs: Iterable[Any], digest: str | None) -> None:
    """Raise RuntimeError unless the requests of all outputs had the global steering with that digest."""
    for output in outputs:
        applied = output.steering_applied
        if (None if applied is None else applied.global_steering) != digest:
            raise RuntimeError("global steering changed before the last token was read; run the request again")


def last_rows(output: Any) -> Rows:
    """Return the row of the last prompt token by layer."""
    return {layer: site.rows for (_, layer), site in complete_rows(output).items()}


def last_params(options: ProbeOptions) -> Any:
    """Return the sampling parameters of a request that reads the last token of its prompt."""
    spec = {"hooks": dict(options.spec.hooks), "positions": "last_prompt"}
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, capture={"memory": spec})
    params.output_kind = type(params.output_kind).FINAL_ONLY
    return params
