# SPDX-License-Identifier: Apache-2.0
"""From texts to a direction whose effect, cost and range of doses are known."""

from vllm_steer.lab.dose_result import DoseResult
from vllm_steer.lab.dose_study import dose
from vllm_steer.lab.examples import Examples, read_examples
from vllm_steer.lab.harvest import Harvest, harvest
from vllm_steer.lab.methods import make
from vllm_steer.lab.probe_comparison import ProbeComparison
from vllm_steer.lab.probe_result import ProbeResult, Recall, Threshold
from vllm_steer.lab.probes import TrainedProbe, check_probe, compare_probes, train_probe
from vllm_steer.lab.ray_engines import RayEngines
from vllm_steer.lab.rollouts import Rollouts, rollouts
from vllm_steer.lab.row_stream import RowBatch, RowStream
from vllm_steer.lab.scores import Keywords, ProbeScore
from vllm_steer.registry.directions import Direction, Directions
from vllm_steer.registry.expression import Expression

__all__ = [
    "Direction",
    "Directions",
    "DoseResult",
    "Examples",
    "Expression",
    "Harvest",
    "Keywords",
    "ProbeComparison",
    "ProbeResult",
    "ProbeScore",
    "RayEngines",
    "Recall",
    "Rollouts",
    "RowBatch",
    "RowStream",
    "Threshold",
    "TrainedProbe",
    "check_probe",
    "compare_probes",
    "dose",
    "harvest",
    "make",
    "read_examples",
    "rollouts",
    "train_probe",
]
