# SPDX-License-Identifier: Apache-2.0
"""A KV block store for vLLM's ``OffloadingConnector`` on CPU.

vLLM's connector, scheduler side and key manager are used as they are. Its copies need a GPU and are plain copies here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

SETTINGS: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec", "spec_module_path": "tests.engine.offloading", "cpu_bytes_to_use": 1 << 26,
    },
}  # fmt: skip


class HostWorker(OffloadingWorker):
    """Blocks by slot of the manager; every copy is synchronous."""

    def __init__(self, kv_caches: Any) -> None:
        self._tensors = [each.tensor for each in kv_caches.tensors]
        self._stored: dict[int, list[torch.Tensor]] = {}
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            self._stored[place] = [tensor[block].clone() for tensor in self._tensors]
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for place, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for tensor, stored in zip(self._tensors, self._stored[place], strict=True):
                tensor[block] = stored
        return self._done(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _done(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True


class HostSpec(CPUOffloadingSpec):
    """vLLM's offloading spec with a worker that needs no GPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            self._worker = HostWorker(kv_caches)
        return self._worker
