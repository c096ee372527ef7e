# SPDX-License-Identifier: Apache-2.0
"""Send captured rows from the scheduler's process to the front ends, step by step as they came from the worker.

The rows of a step precede the outputs of the same update, in outputs with a reserved request id
(:mod:`vllm_steer.capture.row_payload`). vLLM encodes arrays in ``routed_experts`` as separate frames, so rows are not
copied here. The front end splits steps by request (:mod:`vllm_steer.capture.row_receiver`); with one front end, no work
is done per request here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer.capture.row_payload import ROWS_REQUEST_ID, encode_missing_reason, encode_step
from vllm_steer.capture.step_rows import RowIndex
from vllm_steer.compat.internals import EngineCoreOutput, EngineCoreOutputs
from vllm_steer.engine.model_output import rows_of

_MAX_CACHED_CLIENTS = 64


class RowSender:
    """Collects captured rows by client and adds them to the outputs of the running update."""

    def __init__(self) -> None:
        self._pending: dict[int, list[EngineCoreOutput]] = {}
        # The last row index of each projection and its entries by client: a steady batch uses one index in every step.
        self._clients: dict[bytes, tuple[RowIndex, Mapping[int, Sequence[int]]]] = {}

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the rows that wait for :meth:`attach_to`."""
        arrays = (output.routed_experts for outputs in self._pending.values() for output in outputs)
        return sum(array.nbytes for array in arrays if array is not None)

    def collect(self, model_output: Any, requests: Mapping[str, Any]) -> None:
        """Take the rows of one step from a model runner output.

        Rows of finished requests, which the surplus step of async scheduling produces, are dropped or sent along with
        the rows of other requests; the front end ignores them.

        Args:
            model_output: vLLM's model runner output.
            requests: The scheduler's requests by id.
        """
        for step in rows_of(model_output):
            clients = self._entries_by_client(step.index, requests)
            for client, entries in clients.items():
                rows = step if len(clients) == 1 else step.select(entries)
                self._append(client, encode_step(rows), rows.rows)

    def report_missing(self, request: Any, reason: str) -> None:
        """Send the reason why rows of ``request`` will be missing."""
        self._append(request.client_index, encode_missing_reason(request.request_id, reason), None)

    def attach_to(self, outputs: dict[int, Any]) -> None:
        """Insert everything collected ahead of each client's ``EngineCoreOutputs`` and forget it."""
        for client, pending in self._pending.items():
            client_outputs = outputs.setdefault(client, EngineCoreOutputs())
            client_outputs.outputs = [*pending, *client_outputs.outputs]
        self._pending.clear()

    def _entries_by_client(self, index: RowIndex, requests: Mapping[str, Any]) -> Mapping[int, Sequence[int]]:
        """Return the entries of each client that waits for rows; a range of all of them for a single client."""
        known = self._clients.get(index.projection)
        if known is not None and known[0] is index:
            return known[1]
        found = list(map(requests.get, index.request_ids))
        clients: Mapping[int, Sequence[int]]
        clients = dict.fromkeys(map(attrgetter("client_index"), filter(None, found)), range(len(found)))
        if len(clients) > 1:
            clients = {
                client: [i for i, request in enumerate(found) if request and request.client_index == client]
                for client in clients
            }
        if len(self._clients) > _MAX_CACHED_CLIENTS:
            self._clients.clear()
        self._clients[index.projection] = (index, clients)
        return clients

    def _append(self, client: int, params: dict[str, Any], rows: npt.NDArray[np.uint8] | None) -> None:
        output = EngineCoreOutput(ROWS_REQUEST_ID, [], kv_transfer_params=params, routed_experts=rows)
        self._pending.setdefault(client, []).append(output)
