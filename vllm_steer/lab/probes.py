# SPDX-License-Identifier: Apache-2.0
"""Training a linear probe on labelled texts, and checking a probe on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer._version import __version__
from vllm_steer.capture.hidden_states import none_left_running
from vllm_steer.errors import SteeringError
from vllm_steer.lab.activations import (
    Pool,
    collect,
    describe_tokens,
    described_tokens,
    read_site_layers,
)
from vllm_steer.lab.examples import Examples, Source, Text
from vllm_steer.lab.methods import Floats, Labels, logistic, logistic_regression
from vllm_steer.lab.probe_result import ProbeResult
from vllm_steer.lab.probe_texts import read_unseen, split_texts
from vllm_steer.lab.statistics import auroc, folds
from vllm_steer.models.sae_site import models_of, plain_name
from vllm_steer.params import SamplingParams
from vllm_steer.points import PointName
from vllm_steer.registry.directions import WITHOUT_FIRST, Array, save_module
from vllm_steer.registry.metadata import ModuleMetadata, encode_numbers
from vllm_steer.registry.vector_files import read_vector_file
from vllm_steer.request.hidden_layer import HiddenLayer
from vllm_steer.request.probe import Probe
from vllm_steer.request.scalars import read_integer, shown

PROBE = "probe"
"""Name of the probe in the file of a `TrainedProbe`, and of its readout."""
CONTROLS = 20
_FOLDS = 5


@dataclass(frozen=True, eq=False)
class TrainedProbe:
    """A linear probe. Its score is ``x.weights + bias``, the logarithm of the odds that a text is positive."""

    model: str
    point: PointName
    layer: int
    weights: Array
    """``[hidden]``."""
    bias: float
    result: ProbeResult
    """Scores of the texts that were held out."""
    aurocs: Mapping[int, float]
    """AUROC on unseen training texts by layer, which chose the layer."""
    provenance: Mapping[str, str]

    def readout(self, **fields: Any) -> dict[str, Any]:
        """Return the readout of `SamplingParams`; ``fields`` are further keys, such as ``positions``."""
        return {"probe": self.weights, "bias": self.bias, "point": self.point, "layer": self.layer, **fields}

    def save(self, path: str | Path) -> None:
        """Write a module with the probe ``probe`` as ``.safetensors``. An existing file is replaced as a whole.

        Raises:
            SteeringError: The file cannot be written.
        """
        reading = {"bias": self.bias, "point": self.point, "layer": self.layer}
        content = {"probes": {PROBE: {"weights": self.weights, **reading}}}
        save_module(path, content, self.model, {**self.provenance, "result": self.result.verdict})


def train_probe(
    llm: Any,
    examples: Source | Examples,
    *,
    layers: Any = "all",
    point: str = "post_block",
    positions: Any = WITHOUT_FIRST,
    pool: Pool = "mean",
    controls: int = CONTROLS,
    seed: int = 0,
    use_tqdm: bool = False,
) -> TrainedProbe:
    """Train a logistic regression on two thirds of the texts, and score the others with it.

    A text and its pair are on one side. The training texts alone choose the layer.

    Args:
        llm: An `LLM` with steering.
        examples: A file of JSON lines, or a list of their objects; see `read_examples`. Repeated texts count once.
        layers: Layers to try, or ``"all"``.
        point: Hook point.
        positions: Tokens of each text, as in a capture spec: all but the first by default.
        pool: Mean of these tokens' rows, or the last row.
        controls: Number of probes of permuted labels.
        seed: Seed of the split, the bootstrap and the permutations.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: An argument or an example is invalid, there are too few texts, or scikit-learn is missing.
    """
    logistic_regression()
    read_integer(controls, 2, 1000, "controls")
    given, held_out = split_texts(examples, seed)
    labels = given.labels
    found = collect(llm, given.texts, point=point, layers=layers, positions=positions, pool=pool, use_tqdm=use_tqdm)
    inner = folds(given.groups[~held_out], given.kinds[~held_out], _FOLDS, seed)
    rows = {layer: array.astype(np.float64) for layer, array in found.rows.items()}
    aurocs = {layer: _unseen_auroc(array[~held_out], labels[~held_out], inner) for layer, array in rows.items()}
    equal = [layer for layer in aurocs if aurocs[layer] == max(aurocs.values())]
    layer = equal[len(equal) // 2]

    def fit(wanted: Labels) -> tuple[Array, float, Floats]:
        """Return weights as a file has them, bias and scores of the texts that are held out."""
        exact, bias = logistic(rows[layer][~held_out], wanted[~held_out])
        weights = exact.astype(np.float32)
        return weights, bias, rows[layer][held_out] @ weights + bias

    weights, bias, scores = fit(labels)
    random = np.random.default_rng(seed)
    permuted = np.empty(controls)
    for i in range(controls):
        wrong = labels.copy()
        for part in (held_out, ~held_out):
            wrong[part] = random.permutation(labels[part])
        values = fit(wrong)[2]
        permuted[i] = auroc(values[wrong[held_out]], values[~wrong[held_out]])
    tested = [text for text, held in zip(given.texts, held_out, strict=True) if held]
    result = ProbeResult(tested, scores, labels[held_out], 0.0, permuted, seed)
    about = {
        "method": "logistic regression",
        "examples": f"{len(given.texts)} texts, sha256 {given.digest}",
        **describe_tokens(positions, pool),
        "stream": encode_numbers({layer: found.streams[layer]}),
        "by": f"vllm-steer {__version__}",
    }
    return TrainedProbe(found.model, found.point, layer, weights, bias, result, aurocs, about)


def check_probe(
    llm: Any,
    path: str | Path,
    examples: Source | Examples,
    *,
    name: str | None = None,
    seed: int = 0,
    use_tqdm: bool = False,
) -> ProbeResult:
    """Score texts with a probe of a file as the engine serves it, a readout, and compare the scores with labels.

    The tokens, and whether their scores are averaged, are those with which the probe was trained.

    Args:
        llm: An `LLM` with steering.
        path: File of a module; any probe of it can be checked, also with a hidden layer or a sigmoid.
        examples: Texts that the probe was not trained on; see `train_probe`.
        name: Name of the probe, if the file has several.
        seed: Seed of the bootstrap and the permutations.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: The file has no such probe, the probe is of another model, there are too few texts, the probe was
            trained on them, or the engine refuses one.
    """
    probe, metadata = read_probe(path, name)
    given = read_unseen(examples, metadata.provenance)
    _check_model(llm, path, probe, metadata)
    weights: Any = probe.weights
    if isinstance(weights, HiddenLayer):
        weights = {**weights.arrays, "activation": weights.activation}
    positions, pool = described_tokens(metadata.provenance)
    scores = read_scores(llm, given.texts, {"probe": weights, **probe.reading}, positions, pool, use_tqdm=use_tqdm)
    return ProbeResult(given.texts, scores, given.labels, 0.5 if probe.sigmoid else 0.0, seed=seed)


def read_probe(path: str | Path, name: str | None = None) -> tuple[Probe, ModuleMetadata]:
    """Return a probe of a file that names its site, and the file's metadata.

    Raises:
        SteeringError: The file cannot be read, has no such probe, or the probe has no hook point and layer.
    """
    module, metadata = read_vector_file(path)
    names = ", ".join(module.probes)
    if not module.probes:
        raise SteeringError("probe", f"{path} has vectors and no probe; train one with train_probe")
    if name is None and len(module.probes) > 1:
        raise SteeringError("name", f"{path} has several probes; name one of {names}")
    probe = next(iter(module.probes.values())) if name is None else module.probes.get(name)
    if probe is None:
        raise SteeringError("name", f"{path} has no probe {shown(name)}; use one of {names}")
    if probe.point is None or probe.layer is None:
        raise SteeringError("probe", f"{path} does not name its hook point and layer; write it with both")
    return probe, metadata


def read_scores(
    llm: Any, texts: Sequence[Text], readout: Mapping[str, Any], positions: Any, pool: Pool, *, use_tqdm: bool = False
) -> Floats:
    """Return the mean or the last score of each text's tokens, as the engine computes the readout.

    Raises:
        SteeringError: A text has no tokens at the positions, or the engine refuses it.
    """
    if not isinstance(positions, str):
        positions = [list(each) if isinstance(each, tuple) else each for each in positions]
    readouts = {PROBE: {**readout, "positions": positions}}
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, readouts=readouts)
    chat = isinstance(texts[0][0], dict)
    run = partial(llm.chat, add_generation_prompt=False) if chat else llm.generate
    scores = np.empty(len(texts))
    try:
        with none_left_running(llm):
            outputs = run(list(texts), params, use_tqdm=use_tqdm)
    except (RuntimeError, ValueError) as error:  # such as a text that is too long
        raise SteeringError("texts", str(error)) from None
    for i, output in enumerate(outputs):
        read = output.outputs[0].readouts[PROBE]
        values = np.asarray(read.values, np.float64)[np.asarray(read.positions) < len(output.prompt_token_ids)]
        if not len(values):
            raise SteeringError("texts", f"{shown(texts[i])} has no token at the positions {positions}; remove it")
        scores[i] = values[-1] if pool == "last" else values.mean()
    return scores


def _check_model(llm: Any, path: str | Path, probe: Probe, metadata: ModuleMetadata) -> None:
    """Raise SteeringError if the probe was made for another model."""
    facts, _, _ = read_site_layers(llm, str(probe.point), [probe.layer])
    names = models_of(llm.llm_engine.vllm_config.model_config)
    made_for = metadata.model
    if made_for and plain_name(made_for) not in map(plain_name, names):
        problem = f"{path} was trained on the model {shown(made_for)}, not on {' or '.join(map(repr, names))}"
        raise SteeringError("probe", f"{problem}; start that model, or give its name as served_model_name")
    if probe.width != facts.hidden_size:
        problem = f"{path} reads rows of {probe.width} numbers, and {facts.model} has {facts.hidden_size}"
        raise SteeringError("probe", f"{problem}; start the model that it was trained on")


def _unseen_auroc(rows: Floats, labels: Labels, fold: npt.NDArray[np.int64]) -> float:
    """Return the mean over the folds of the AUROC of their texts on a probe of the other folds."""
    found = []
    for number in np.unique(fold):
        test = fold == number
        weights, bias = logistic(rows[~test], labels[~test])
        scores = rows[test] @ weights + bias
        found.append(auroc(scores[labels[test]], scores[~labels[test]]))
    return float(np.mean(found))
