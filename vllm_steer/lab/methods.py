# SPDX-License-Identifier: Apache-2.0
"""Making directions and probes from the activations of examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vllm_steer._version import __version__
from vllm_steer.errors import SteeringError, install_hint, warn_caller
from vllm_steer.lab.activations import Activations, Pool, collect, describe_tokens
from vllm_steer.lab.examples import Examples, Source, read_examples
from vllm_steer.lab.statistics import Floats, Labels, auroc, folds
from vllm_steer.registry.directions import WITHOUT_FIRST, Direction, Directions
from vllm_steer.request.scalars import read_choice

Method = Literal["mean", "pca", "probe"]
ProbeMethod = Literal["logistic", "ridge", "mean", "mlp"]
HIDDEN_UNITS = 16
"""Units of the hidden layer of ``mlp``."""
_FOLDS = 5
_LEAST = 1e-6
"""Smallest distance of the class means, in lengths of the stream: rounding alone is below it."""
_UNCONVERGED = (
    "stopped before it converged. If the AUROC on unseen texts is good, the probe can be used; otherwise correct wrong"
    " labels, give more texts, or use another method"
)


def make(
    llm: Any,
    examples: Source | Examples,
    *,
    method: Method = "mean",
    layers: Any = "all",
    point: str = "post_block",
    positions: Any = WITHOUT_FIRST,
    pool: Pool = "mean",
    seed: int = 0,
    use_tqdm: bool = False,
) -> Directions:
    """Make a direction at each layer, from the negative to the positive examples.

    Args:
        llm: An `LLM` with steering.
        examples: A file of JSON lines, or a list of their objects; see `read_examples`.
        method: ``"mean"``, the difference of the class means; ``"pca"``, the first principal component of the texts'
            distances from the midpoint of their pair; or ``"probe"``, the weights of a logistic regression. Labels
            decide the sign.
        layers: Layers, or ``"all"``.
        point: Hook point.
        positions: Tokens of each text, as in a capture spec: all but the first by default. ``"assistant"`` for
            conversations takes the answers.
        pool: Mean of these tokens' rows, or the last row.
        seed: Seed of the folds on which AUROC is measured.
        use_tqdm: Whether to show progress bars.

    Raises:
        SteeringError: An argument or an example is invalid, or the classes have the same mean.
    """
    if read_choice(method, METHODS, "method") == "probe":
        scikit_learn("linear_model")
    read = read_examples(examples)
    found = collect(llm, read.texts, point=point, layers=layers, positions=positions, pool=pool, use_tqdm=use_tqdm)
    about = {"examples": f"{len(read.texts)} texts, sha256 {read.digest}", **describe_tokens(positions, pool)}
    about["by"] = f"vllm-steer {__version__}"
    return Directions(directions_of(found, read, method, seed), found.model, method, about)


def directions_of(found: Activations, examples: Examples, method: Method, seed: int = 0) -> dict[int, Direction]:
    """Return the direction of each layer of activations."""
    fold = folds(examples.groups, examples.labels, _FOLDS, seed)
    directions = {}
    for layer, array in found.rows.items():
        rows, stream = array.astype(np.float64), found.streams[layer]
        try:
            unit, distance, centre = fit(rows, examples, method, _LEAST * stream)
        except ValueError as error:
            raise SteeringError("examples", f"have no direction at {found.point} of layer {layer}: {error}") from None
        numbers = (stream, distance, centre.astype(np.float32), _held_out(rows, examples, method, fold))
        directions[layer] = Direction(found.point, layer, unit.astype(np.float32), *numbers)
    return directions


def fit(rows: Floats, examples: Examples, method: Method, least: float = 0.0) -> tuple[Floats, float, Floats]:
    """Return a unit vector, the distance of the class means along it, and their midpoint.

    Raises:
        ValueError: The means are not further apart than ``least``.
    """
    labels = examples.labels
    means = [rows[labels].mean(0), rows[~labels].mean(0)]
    weights = METHODS[method](rows, examples)
    size = float(np.linalg.norm(weights))
    distance = float(weights @ (means[0] - means[1])) / (size or 1.0)
    if not size or not abs(distance) > least:
        raise ValueError("the two classes have the same mean; use other examples, or tokens where they differ")
    return weights / size * np.sign(distance), abs(distance), (means[0] + means[1]) / 2


def _mean(rows: Floats, examples: Examples) -> Floats:
    difference: Floats = rows[examples.labels].mean(0) - rows[~examples.labels].mean(0)
    return difference


def _pca(rows: Floats, examples: Examples) -> Floats:
    """Return the first principal component of the distances from the midpoint of the pair, or of the classes."""
    if examples.paired:
        centred = rows - rows.reshape(-1, 2, rows.shape[1]).mean(1).repeat(2, axis=0)
    else:
        centred = rows - (rows[examples.labels].mean(0) + rows[~examples.labels].mean(0)) / 2
    component: Floats = np.linalg.svd(centred, full_matrices=False)[2][0]
    return component


def _probe(rows: Floats, examples: Examples) -> Floats:
    return logistic(rows, examples.labels)[0]


def logistic(rows: Floats, labels: Labels, penalty: float = 1.0, *, warn: bool = True) -> tuple[Floats, float]:
    """Return weights and bias of a logistic regression on standardised rows, for rows as they are.

    Args:
        rows: ``[examples, hidden]``.
        labels: Whether each example is positive.
        penalty: Weight of half the squared length of the standardised weights, beside the sum of the losses.
        warn: Whether to warn if the fit does not converge.
    """
    made = scikit_learn("linear_model").LogisticRegression(C=1 / penalty, tol=1e-9, max_iter=2000)
    return _folded(made, rows, labels, warn)


def fit_probe(
    method: ProbeMethod, rows: Floats, labels: Labels, seed: int = 0, *, warn: bool = True
) -> tuple[Any, float]:
    """Return the float32 weights of a probe, or the arrays of one with a hidden layer, and its bias.

    ``warn`` is whether to warn if the fit does not converge.
    """
    if method == "mean":
        means = rows[labels].mean(0), rows[~labels].mean(0)
        weights, bias = means[0] - means[1], float((means[1] @ means[1] - means[0] @ means[0]) / 2)
    elif method == "ridge":
        weights, bias = _folded(scikit_learn("linear_model").RidgeClassifier(alpha=rows.shape[1]), rows, labels, warn)
    elif method == "logistic":
        weights, bias = logistic(rows, labels, warn=warn)
    else:
        classifier = scikit_learn("neural_network").MLPClassifier
        made = classifier((HIDDEN_UNITS,), solver="lbfgs", alpha=1.0, max_iter=2000, random_state=seed)
        weights, biases = _folded(made, rows, labels, warn)
        arrays = {"weights": weights, "biases": biases, "outputs": made.coefs_[1][:, 0]}
        return {name: array.astype(np.float32) for name, array in arrays.items()}, float(made.intercepts_[1][0])
    return weights.astype(np.float32), bias


def probe_scores(weights: Any, bias: float, rows: Floats) -> Floats:
    """Return the score of each row by the numbers of `fit_probe`."""
    if isinstance(weights, Mapping):
        rows, weights = np.maximum(rows @ weights["weights"].T + weights["biases"], 0.0), weights["outputs"]
    scores: Floats = rows @ weights + bias
    return scores


def read_probe_method(method: object, pool: str) -> ProbeMethod:
    """Return a method; raise SteeringError for others, a pool that it has no score for, or a missing package."""
    chosen: ProbeMethod = read_choice(method, get_args(ProbeMethod), "method")
    if chosen == "mlp" and pool != "last":
        problem = "the mean of the scores of a hidden layer is not the score of the mean row"
        raise SteeringError("pool", f'must be "last" for mlp, because {problem}; or use another method')
    if chosen != "mean":
        scikit_learn("linear_model")
    return chosen


def _folded(estimator: Any, rows: Floats, labels: Labels, warn: bool) -> tuple[Floats, Any]:
    """Fit an estimator to standardised rows; return weights and bias, of its first layer, for rows as they are."""
    mean, scale = rows.mean(0), rows.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    unconverged = scikit_learn("exceptions").ConvergenceWarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", unconverged)
        found = estimator.fit((rows - mean) / scale, labels)
    for each in caught:
        if not issubclass(each.category, unconverged):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif warn:
            warn_caller(f"{type(estimator).__name__} {_UNCONVERGED}")
    if hasattr(found, "coefs_"):
        weights = found.coefs_[0].T / scale
        return weights, found.intercepts_[0] - weights @ mean
    weights = np.ravel(found.coef_) / scale
    return weights, float(np.ravel(found.intercept_)[0] - weights @ mean)


def scikit_learn(part: str) -> Any:
    """Return a module of scikit-learn; raise SteeringError if it is not installed."""
    try:
        return import_module(f"sklearn.{part}")
    except ImportError:
        problem = "this method needs the package scikit-learn"
        raise SteeringError("probe", f"{problem}; {install_hint('lab')}") from None


METHODS: Mapping[Method, Callable[[Floats, Examples], Floats]] = {"mean": _mean, "pca": _pca, "probe": _probe}


def _held_out(rows: Floats, examples: Examples, method: Method, fold: npt.NDArray[np.int64]) -> float:
    """Return the AUROC of examples on directions of the other folds; NaN if there are too few."""
    scores = np.full(len(rows), np.nan)
    for number in np.unique(fold):
        test = fold == number
        others = replace(examples, labels=examples.labels[~test])  # the texts are not needed
        if len(set(others.labels.tolist())) < 2:
            return float("nan")
        try:
            unit, distance, centre = fit(rows[~test], others, method)
        except ValueError:
            return float("nan")
        scores[test] = (rows[test] - centre) @ unit / distance
    return auroc(scores[examples.labels], scores[~examples.labels])
