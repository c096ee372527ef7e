# SPDX-License-Identifier: Apache-2.0
"""Scorer with a linear probe on the mean over the answer's tokens, and the area under the ROC curve over a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_ai.scorer import Metric, SampleScore, Score, Scorer, Target, mean, metric, scorer
from inspect_ai.solver import TaskState

from vllm_steer.errors import SteeringError

if TYPE_CHECKING:
    import torch
    from inspect_ai.model import ModelOutput

POSITIVE = ("1", "true", "yes", "positive")


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A direction and a bias: the score of a row is ``row @ weight + bias``."""

    weight: torch.Tensor
    """Float ``[hidden]``."""
    bias: float = 0.0

    @staticmethod
    def read(probe: LinearProbe | torch.Tensor | str | Path) -> LinearProbe:
        """Return a probe, given as such, as a weight, or as a safetensors file with ``weight`` and perhaps ``bias``.

        Raises:
            SteeringError: The weight is missing or not a vector.
        """
        if isinstance(probe, LinearProbe):
            weight, bias = probe.weight, probe.bias
        elif isinstance(probe, (str, Path)):
            from safetensors.torch import load_file

            tensors = load_file(probe)
            if "weight" not in tensors:
                raise SteeringError("probe", f"{probe} has no tensor named weight")
            weight, bias = tensors["weight"], float(tensors["bias"]) if "bias" in tensors else 0.0
        else:
            weight, bias = probe, 0.0
        weight = weight.detach().float().squeeze()
        if weight.ndim != 1:
            raise SteeringError("probe", f"weight must be a vector, not of shape {list(weight.shape)}")
        return LinearProbe(weight, bias)

    def __call__(self, row: torch.Tensor) -> float:
        """Return the score of one row."""
        if row.shape != self.weight.shape:
            raise SteeringError("probe", f"has {len(self.weight)} weights; a row has {row.shape[-1]} numbers")
        return float(row.float() @ self.weight + self.bias)


def answer_rows(output: ModelOutput, layer: int | None = None, log: str | None = None) -> torch.Tensor:
    """Return the rows of one layer at the answer's tokens, float32 ``[tokens, hidden]``.

    The last generated token has no row: the model never computes it.

    Args:
        output: An output with ``output_residual_stream``.
        layer: Layer; None if one layer was captured.
        log: Path of the log that the output was read from, as for ``read_activations``.

    Raises:
        SteeringError: The output has no rows of the layer or of the answer.
    """
    from vllm_steer.peers.inspect.rows import read_activations

    activations = read_activations(output, log)
    if "residual_stream" not in activations:
        raise SteeringError("output_residual_stream", "is required; the output has other activations")
    stream = activations["residual_stream"]
    layers = stream.reference["layers"]
    if layer is None and len(layers) > 1:
        raise SteeringError("layer", f"is required; layers {layers} were captured")
    if layer is not None and layer not in layers:
        raise SteeringError("layer", f"{layer} was not captured; layers {layers} were")
    rows = stream[0 if layer is None else layers.index(layer), len((output.metadata or {})["prompt_token_ids"]) :]
    if not len(rows):
        raise SteeringError(
            "output_residual_stream", "has no rows of the answer, which has one token; raise max_tokens"
        )
    return rows.float()


def probe_score(
    output: ModelOutput,
    probe: LinearProbe | torch.Tensor | str | Path,
    layer: int | None = None,
    log: str | None = None,
) -> float:
    """Return the probe's score of the mean over the answer's tokens; arguments as for :func:`answer_rows`."""
    return LinearProbe.read(probe)(answer_rows(output, layer, log).mean(0))


@metric
def auroc() -> Metric:
    """Return the area under the ROC curve of scores against ``label`` in their metadata; NaN without both labels."""

    def area(scores: list[SampleScore]) -> float:
        pairs = [(each.score.as_float(), bool((each.score.metadata or {})["label"])) for each in scores]
        positive = [value for value, label in pairs if label]
        negative = [value for value, label in pairs if not label]
        if not positive or not negative:
            return float("nan")
        wins = sum((high > low) + 0.5 * (high == low) for high in positive for low in negative)
        return wins / (len(positive) * len(negative))

    return area


@scorer(metrics=[auroc(), mean()])
def probe_scorer(
    probe: Any = None, layer: int | None = None, readout: str | None = None, log: str | None = None
) -> Scorer:
    """Score an answer by a linear probe. The sample's target is its label: 1, true, yes and positive are positive.

    Args:
        probe: A :class:`LinearProbe`, its weight, or the path of a safetensors file. Logs contain paths only.
        layer: Layer of the probe; None if one layer was captured.
        readout: Instead of ``probe``: name of a readout with a probe, whose values the engine computed.
        log: Path of the log that is scored, if the evaluation has ended (``inspect score``).

    Raises:
        SteeringError: Neither or both of ``probe`` and ``readout`` are given.
    """
    if (probe is None) == (readout is None):
        raise SteeringError("probe", "give either probe or readout")
    read = None if probe is None else LinearProbe.read(probe)

    async def score(state: TaskState, target: Target) -> Score:
        if read is None:
            value = _readout_mean(state.output, str(readout), log)
        else:
            value = probe_score(state.output, read, layer, log)
        label = target.text.strip().lower() in POSITIVE
        return Score(value=value, answer=state.output.completion, metadata={"label": label})

    return score


def _readout_mean(output: ModelOutput, name: str, log: str | None) -> float:
    from vllm_steer.peers.inspect.rows import read_tensors

    metadata = output.metadata or {}
    readout = metadata.get("readouts", {}).get(name)
    if readout is None:
        raise SteeringError("readout", f"the output has no readout {name!r}")
    parts = read_tensors({part: readout[part] for part in ("values", "positions")}, log)
    values = parts["values"][parts["positions"] >= len(metadata["prompt_token_ids"])]
    if values.ndim != 1 or not len(values):
        raise SteeringError("readout", f"{name!r} has no values of a probe at the answer's tokens")
    return float(values.mean())
