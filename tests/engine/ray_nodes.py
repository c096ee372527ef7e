# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, whose nodes claim to have a GPU each.

vLLM refuses Ray on its CPU platform, which names no device by which Ray can place workers. Here the platform names GPU,
and each node offers one to Ray. All else is vLLM's own: the placement, the actors, their message queues and workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.repo.tree import ROOT

OBJECT_STORE = 80 << 20
DEVICE = "GPU"


def name_device() -> None:
    """Let the CPU platform of this process name a device. Ray calls this in each worker process before it is used."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = DEVICE


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Start a cluster, connect to it, and yield the ids of its nodes."""
    import ray
    from ray.cluster_utils import Cluster
    from vllm.platforms.cpu import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setattr(CpuPlatform, "ray_device_key", DEVICE)
        node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(**{key: value for key, value in node.items() if key != "include_dashboard"})
            setup = {
                "env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                "worker_process_setup_hook": f"{__name__}.{name_device.__name__}",
            }
            ray.init(address=cluster.address, runtime_env=setup, log_to_driver=False)
            cluster.wait_for_nodes()
            yield [each["NodeID"] for each in ray.nodes() if each["Alive"]]
        finally:
            ray.shutdown()
            cluster.shutdown()
