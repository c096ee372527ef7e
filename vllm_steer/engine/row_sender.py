# SPDX-License-Identifier: Apache-2.0
"""Captured rows on their way out of the scheduler's process: whole steps, as they came from the worker.

A step's rows go to the front end with the outputs of the same update and ahead of them, on outputs of their own: no
request has their id, and vLLM itself passes over outputs of requests that it does not know. vLLM encodes an array that
stands in a field of arrays as a frame of its own, so rows are not copied here. Which request takes what is settled
where they arrive (:mod:`vllm_steer.capture.row_receiver`): nothing is looked at per request here while one
front end has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from vllm_steer.capture.row_payload import ROWS_REQUEST_ID, encode_missing_reason, encode_step
from vllm_steer.capture.step_rows import RowIndex, StepRows
from vllm_steer.engine.device_to_host import ATTRIBUTE


class RowSender:
    """What is to go out with the outputs of the running update, by client."""

    def __init__(self) -> None:
        self._due: dict[int, list[EngineCoreOutput]] = {}
        # Of each form of rows, the last entries and whose they were: a steady batch has the same ones in every step.
        self._owners: dict[bytes, tuple[RowIndex, dict[int, list[int]]]] = {}

    def take_in(self, model_output: Any, requests: Mapping[str, Any]) -> None:
        """Rows of one step, of each pipeline stage. Of requests that have ended (the surplus step of async scheduling)
        they go nowhere, or with those of others."""
        for step in getattr(model_output, ATTRIBUTE, ()):
            owners = self._owners_of(step.index, requests)
            for client, entries in owners.items():
                self._send(client, step if len(owners) == 1 else step.select(entries))

    def say(self, request: Any, reason: str) -> None:
        """Why rows of a request will be missing."""
        self._put(request.client_index, encode_missing_reason(request.request_id, reason), None)

    def hand_out(self, outputs: dict[int, Any]) -> None:
        """Put all that is due in front of the clients' outputs."""
        for client, carriers in self._due.items():
            theirs = outputs.setdefault(client, EngineCoreOutputs())
            theirs.outputs = [*carriers, *theirs.outputs]
        self._due.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of rows held."""
        return sum(carrier.routed_experts.nbytes for due in self._due.values() for carrier in due
                   if carrier.routed_experts is not None)  # fmt: skip

    def _owners_of(self, index: RowIndex, requests: Mapping[str, Any]) -> dict[int, list[int]]:
        """The entries of each client's requests."""
        known = self._owners.get(index.projection)
        if known is not None and known[0] is index:
            return known[1]
        owners: dict[int, list[int]] = {}
        for entry, request_id in enumerate(index.request_ids):
            request = requests.get(request_id)
            if request is not None:
                owners.setdefault(request.client_index, []).append(entry)
        if len(self._owners) > 64:
            self._owners.clear()
        self._owners[index.projection] = (index, owners)
        return owners

    def _send(self, client: int, step: StepRows) -> None:
        self._put(client, encode_step(step), step.rows)

    def _put(self, client: int, about: dict[str, Any], rows: Any) -> None:
        carrier = EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=about, routed_experts=rows)
        self._due.setdefault(client, []).append(carrier)
