# SPDX-License-Identifier: Apache-2.0
"""Training a probe on labelled texts, checking a probe on others, and comparing two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_steer._version import __version__
from vllm_steer.capture.hidden_states import none_left_running
from vllm_steer.compat.sources import installed_version
from vllm_steer.errors import SteeringError
from vllm_steer.lab.activations import Pool, collect, describe_tokens, described_tokens, read_stored
from vllm_steer.lab.examples import Examples, Source, Text, read_examples
from vllm_steer.lab.methods import ProbeMethod, fit_probe, probe_scores, read_probe_method
from vllm_steer.lab.probe_comparison import MARGIN, ProbeComparison
from vllm_steer.lab.probe_result import ProbeResult, read_probe, readout_of
from vllm_steer.lab.probe_texts import read_unseen, split_texts
from vllm_steer.lab.statistics import Floats, Labels, auroc, folds
from vllm_steer.lab.text_rows import check_model, position_lists, read_site_layers
from vllm_steer.params import SamplingParams
from vllm_steer.points import PointName
from vllm_steer.registry.directions import WITHOUT_FIRST, save_module
from vllm_steer.registry.metadata import ModuleMetadata, encode_numbers
from vllm_steer.request.probe import Probe
from vllm_steer.request.scalars import read_integer, read_number, shown

PROBE = "probe"
"""Name of the probe in the file of a `TrainedProbe`, and of its readout."""
CONTROLS = 20
_FOLDS = 5


@dataclass(frozen=True, eq=False)
class TrainedProbe:
    """A probe and its scores of unseen texts. Larger scores are positive."""

    model: str
    point: PointName
    layer: int
    weights: Any = field(repr=False)
    """``[hidden]``, with the score ``x.weights + bias``; a mapping with the arrays of a probe with a hidden layer."""
    bias: float
    result: ProbeResult
    """Scores of the texts that were held out."""
    aurocs: Mapping[int, float]
    """AUROC on unseen training texts by layer, which chose the layer."""
    provenance: Mapping[str, str] = field(repr=False)

    def readout(self, **fields: Any) -> dict[str, Any]:
        """Return the readout of `SamplingParams`; ``fields`` are further keys, such as ``positions``."""
        return {"probe": self.weights, "bias": self.bias, "point": self.point, "layer": self.layer, **fields}

    def save(self, path: str | Path) -> None:
        """Write a module with the probe ``probe`` as ``.safetensors``. An existing file is replaced as a whole.

        Raises:
            SteeringError: The file has another suffix, or cannot be written.
        """
        if Path(path).suffix != ".safetensors":
            raise SteeringError("out", f"{path} has an unknown suffix; use .safetensors")
        arrays = self.weights if isinstance(self.weights, Mapping) else {"weights": self.weights}
        probe = {**arrays, "bias": self.bias, "point": self.point, "layer": self.layer}
        save_module(path, {"probes": {PROBE: probe}}, self.model, {**self.provenance, "result": self.result.verdict})


def train_probe(
    llm: Any,
    examples: Source | Examples,
    *,
    method: ProbeMethod = "logistic",
    layers: Any = "all",
    point: str = "post_block",
    positions: Any = WITHOUT_FIRST,
    pool: Pool = "mean",
    controls: int = CONTROLS,
    seed: int = 0,
    use_tqdm: bool = False,
) -> TrainedProbe:
    """Train a probe on two thirds of the texts, and score the others with it.

    A text and its pair are on one side. The training texts alone choose the layer.

    Args:
        llm: An `LLM` with steering, or the folder of a `harvest` of these texts, whose rows are used without a model.
        examples: A file of JSON lines, or a list of their objects; see `read_examples`. Repeated texts count once.
        method: ``"logistic"`` or ``"ridge"`` regression on standardised rows, ``"mean"``, the difference of the class
            means, or ``"mlp"``, a hidden layer of 16 units, which needs the pool ``"last"``.
        layers: Layers to try, or ``"all"``.
        point: Hook point.
        positions: Tokens of each text, as in a capture spec: all but the first by default. A folder has its own.
        pool: Mean of these tokens' rows, or the last row.
        controls: Number of probes of permuted labels.
        seed: Seed of the split, the bootstrap, the permutations and the initial weights of ``"mlp"``.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: An argument or an example is invalid, there are too few texts, the folder has no harvest of these
            texts, or scikit-learn is missing.
    """
    read_probe_method(method, pool)
    read_integer(controls, 2, 1000, "controls")
    read = read_examples(examples)
    given, held_out = split_texts(read, seed)
    labels = given.labels
    spec: dict[str, Any] = {"point": point, "layers": layers, "positions": positions, "pool": pool}
    if isinstance(llm, (str, Path)):
        engine, (found, positions) = "", read_stored(llm, read.texts, given.numbers, **spec)
    else:
        engine, found = _describe_engine(llm), collect(llm, given.texts, **spec, use_tqdm=use_tqdm)
    rows = {layer: array.astype(np.float64) for layer, array in found.rows.items()}
    inner = folds(given.groups[~held_out], given.kinds[~held_out], _FOLDS, seed)
    fit = partial(fit_probe, method, seed=seed, warn=False)
    aurocs = {layer: _unseen_auroc(fit, array[~held_out], labels[~held_out], inner) for layer, array in rows.items()}
    equal = [layer for layer in aurocs if aurocs[layer] == max(aurocs.values())]
    layer = equal[len(equal) // 2]
    training, unseen = rows[layer][~held_out], rows[layer][held_out]
    weights, bias = fit(training, labels[~held_out], warn=True)
    random = np.random.default_rng(seed)
    permuted = np.empty(controls)
    for i in range(controls):
        wrong = labels.copy()
        for part in (held_out, ~held_out):
            wrong[part] = random.permutation(labels[part])
        values = probe_scores(*fit(training, wrong[~held_out]), unseen)
        permuted[i] = auroc(values[wrong[held_out]], values[~wrong[held_out]])
    tested = [text for text, held in zip(given.texts, held_out, strict=True) if held]
    scores = probe_scores(weights, bias, unseen)
    result = ProbeResult(tested, scores, labels[held_out], 0.0, permuted, seed, engine=engine)
    about = {
        "method": method,
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

    The tokens, and whether their scores are averaged, are those with which the probe was trained. The threshold is that
    of the file, if `ProbeResult.store_threshold` has written one.

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
    name, probe, metadata, thresholds = read_probe(path, name)
    given = read_unseen(examples, path, metadata.provenance)
    _check_model(llm, path, probe, metadata)
    positions, pool = described_tokens(metadata.provenance)
    scores = read_scores(llm, given.texts, readout_of(probe), positions, pool, use_tqdm=use_tqdm)
    stored = thresholds.get(name)
    threshold = stored.value if stored else 0.5 if probe.sigmoid else 0.0
    engine = _describe_engine(llm)
    return ProbeResult(given.texts, scores, given.labels, threshold, seed=seed, stored=stored, engine=engine)


def compare_probes(
    llm: Any,
    old: str | Path,
    new: str | Path,
    examples: Source | Examples,
    *,
    name: str | None = None,
    margin: float = MARGIN,
    seed: int = 0,
    use_tqdm: bool = False,
) -> ProbeComparison:
    """Compare two probes on the same texts: whether the new one separates them as well as the old one.

    Args:
        llm: An `LLM` with steering.
        old: File of a module.
        new: File of another module, whose probe may have another site, or other tokens.
        examples: Texts that neither was trained on; see `check_probe`.
        name: Name of both probes, if the files have several.
        margin: Loss of AUROC that is accepted.
        seed: Seed of the bootstrap.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: See `check_probe`.
    """
    if not 0 <= read_number(margin, "margin") < 0.5:
        raise SteeringError("margin", f"must be 0 or more and below 0.5, not {shown(margin)}")
    before = check_probe(llm, old, examples, name=name, seed=seed, use_tqdm=use_tqdm)
    after = check_probe(llm, new, examples, name=name, seed=seed, use_tqdm=use_tqdm)
    return ProbeComparison(before, after, margin, seed)


def read_scores(
    llm: Any, texts: Sequence[Text], readout: Mapping[str, Any], positions: Any, pool: Pool, *, use_tqdm: bool = False
) -> Floats:
    """Return the mean or the last score of each text's tokens, as the engine computes the readout.

    Raises:
        SteeringError: A text has no tokens at the positions, or the engine refuses it.
    """
    readouts = {PROBE: {**readout, "positions": position_lists(positions)}}
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


def _describe_engine(llm: Any) -> str:
    """Return what scores depend on besides the probe."""
    config = llm.llm_engine.vllm_config
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    about = f"{dtype}, quantization {config.model_config.quantization}, KV cache {config.cache_config.cache_dtype}"
    return f"{about}, vLLM {installed_version()}"


def _check_model(llm: Any, path: str | Path, probe: Probe, metadata: ModuleMetadata) -> None:
    """Raise SteeringError if the probe was made for another model."""
    try:
        facts, _, _ = read_site_layers(llm, str(probe.point), [probe.layer])
    except SteeringError as error:
        raise SteeringError("probe", f"{path}, {error.field}: {error.problem}") from None
    check_model(llm, metadata.model, "probe", f"{path} was trained on")
    if probe.width != facts.hidden_size:
        problem = f"{path} reads rows of {probe.width} numbers, and {facts.model} has {facts.hidden_size}"
        raise SteeringError("probe", f"{problem}; start the model that it was trained on")


def _unseen_auroc(
    fit: Callable[[Floats, Labels], tuple[Any, float]], rows: Floats, labels: Labels, fold: npt.NDArray[np.int64]
) -> float:
    """Return the mean over the folds of the AUROC of their texts on a probe of the other folds."""
    found = []
    for number in np.unique(fold):
        test = fold == number
        scores = probe_scores(*fit(rows[~test], labels[~test]), rows[test])
        found.append(auroc(scores[labels[test]], scores[~labels[test]]))
    return float(np.mean(found))
