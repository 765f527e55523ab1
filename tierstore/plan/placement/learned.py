"""A cost model fitted to measured lookups.

The idea, to learn what a table costs from its features and to shard by that, is D. Zha et al.'s: AutoShard (KDD 2022)
and DreamShard (NeurIPS 2022), who train a neural network on lookups timed on GPUs and a policy by reinforcement. Here
it is a ridge regression, of the logarithm of seconds, on the logarithms of what a lookup moves and touches, their
squares and products; some hundred measurements determine it, and it is the same each time.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..analytic import expected_distinct
from ..json_file import read_json, write_json
from .measurement import Measurement, require_measurements
from .shapes import LookupShape

__all__ = ["FEATURES", "Accuracy", "LearnedCost", "accuracy", "fit_cost", "read_cost", "write_cost"]

Floats = NDArray[np.float64]

FEATURES: Final = ("lookups", "row bytes", "distinct rows", "table bytes", "bags", "exponent")
"""Of a lookup. All but the last by their logarithms."""
_KIND: Final = "learned cost of lookups"
_PENALTIES: Final = tuple(10.0**power for power in range(-4, 4))
_FOLDS: Final = 5
_LEAST: Final = 2 * _FOLDS
_BEYOND: Final = 0.25
"""How far beyond the measured shapes, in parts of their range, features are followed."""


class Accuracy(NamedTuple):
    """Of a model on measured lookups.

    Attributes:
        median, p90, worst: of ``abs(predicted / measured - 1)``.
        bias: the sum of predicted over the sum of measured seconds, less 1.
    """

    median: float
    p90: float
    worst: float
    bias: float


def accuracy(predicted: Floats, measured: Floats) -> Accuracy:
    """Both are seconds, float64 [n]."""
    errors = np.abs(predicted / measured - 1)
    median, p90, worst = np.quantile(errors, [0.5, 0.9, 1.0])
    return Accuracy(float(median), float(p90), float(worst), float(predicted.sum() / measured.sum() - 1))


@dataclass(frozen=True, kw_only=True)
class LearnedCost:
    """What ``fit_cost`` found.

    Attributes:
        weights: float64 [1 + terms], of the terms that ``_terms`` makes of the features, the constant's first.
        lowest, highest: float64 [features], of the measurements. Beyond them a feature counts as at the edge, once it
            is a quarter of the range outside.
        centre, scale: float64 [features], subtracted from features, and divided by.
        penalty: the ridge's, chosen by cross-validation.
        cross_validated: how well lookups were predicted, their calls included, that the fit had not seen.
        num_measurements: of the fit.
        link_bytes_per_s: of ids to, and of pooled results from, the device, which adds to what was measured.
    """

    weights: Floats
    lowest: Floats
    highest: Floats
    centre: Floats
    scale: Floats
    penalty: float
    cross_validated: Accuracy
    num_measurements: int
    link_bytes_per_s: float = 1e18

    def seconds(self, shapes: Sequence[LookupShape]) -> Floats:
        """float64 [len(shapes)]."""
        if not shapes:
            return np.empty(0)
        room = _BEYOND * (self.highest - self.lowest)
        features = np.clip(_features(shapes), self.lowest - room, self.highest + room)
        lookups = np.exp(_terms((features - self.centre) / self.scale) @ self.weights)
        link = np.array([8 * shape.lookups + shape.output_bytes for shape in shapes])
        found: Floats = lookups + link / self.link_bytes_per_s
        return found

    def is_known(self, shape: LookupShape) -> bool:
        """Whether each feature is in the range of the measurements."""
        features = _features([shape])[0]
        return bool(((features >= self.lowest) & (features <= self.highest)).all())

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reads it back."""
        arrays = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return arrays | {
            "penalty": self.penalty,
            "cross_validated": self.cross_validated._asdict(),
            "num_measurements": self.num_measurements,
            "link_bytes_per_s": self.link_bytes_per_s,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LearnedCost":
        """
        Raises:
            KeyError, TypeError, ValueError: it is not what ``to_dict`` gives.
        """
        arrays = {name: np.array(fields[name], np.float64) for name in _ARRAYS}
        num_features = len(FEATURES)
        terms = 1 + num_features + num_features * (num_features + 1) // 2
        for name, array in arrays.items():
            wanted = terms if name == "weights" else num_features
            if array.shape != (wanted,) or not np.isfinite(array).all():
                raise ValueError(f"{name} must be {wanted} numbers")
        return cls(
            **arrays,
            penalty=float(fields["penalty"]),
            cross_validated=Accuracy(**fields["cross_validated"]),
            num_measurements=int(fields["num_measurements"]),
            link_bytes_per_s=float(fields["link_bytes_per_s"]),
        )


_ARRAYS: Final = ("weights", "lowest", "highest", "centre", "scale")


def _features(shapes: Sequence[LookupShape]) -> Floats:
    """float64 [len(shapes), len(FEATURES)]."""
    rows = [
        [
            math.log(max(shape.lookups, 1.0)),
            math.log(shape.weight_bytes),
            math.log(max(expected_distinct(shape.num_embeddings, shape.lookups, shape.exponent), 1.0)),
            math.log(shape.num_embeddings * shape.weight_bytes),
            math.log(shape.batch_samples),
            shape.exponent,
        ]
        for shape in shapes
    ]
    return np.array(rows)


def _terms(features: Floats) -> Floats:
    """float64 [n, 1 + f + f (f + 1) / 2]: a constant, the features, their squares and products."""
    first, second = np.triu_indices(features.shape[1])
    return np.concatenate([np.ones((len(features), 1)), features, features[:, first] * features[:, second]], axis=1)


def _solve(terms: Floats, targets: Floats, trust: Floats, penalty: float) -> Floats:
    """The ridge's weights; the constant is not penalised. ``trust``: float64 [n], of each target."""
    ridge = penalty * np.eye(terms.shape[1])
    ridge[0, 0] = 0
    return np.asarray(np.linalg.solve((terms.T * trust) @ terms + ridge, (terms.T * trust) @ targets), np.float64)


def _held_out(terms: Floats, targets: Floats, trust: Floats, penalty: float) -> Floats:
    """float64 [n]: each target, predicted by a fit to the other folds."""
    folds = np.random.default_rng(0).permutation(len(targets)) % _FOLDS
    predicted = np.empty(len(targets))
    for fold in range(_FOLDS):
        others = folds != fold
        predicted[~others] = terms[~others] @ _solve(terms[others], targets[others], trust[others], penalty)
    return predicted


def fit_cost(measurements: Sequence[Measurement], *, link_bytes_per_s: float = 1e18) -> LearnedCost:
    """Fit to measured lookups; the penalty is the one with the least squared error in five-fold cross-validation.

    Args:
        link_bytes_per_s: of ids to, and of pooled results from, the device.

    Raises:
        ValueError: fewer than ten measurements, or one without time.
    """
    require_measurements(measurements, _LEAST)
    features = _features([each.shape for each in measurements])
    seconds, calls = (np.array([getattr(each, name) for each in measurements]) for name in ("seconds", "call_s"))
    centre = features.mean(0)
    scale: Floats = np.where(features.std(0) < 1e-9, 1.0, features.std(0))
    terms, targets = _terms((features - centre) / scale), np.log(seconds)
    trust = np.array([each.weight for each in measurements])
    predictions = {penalty: _held_out(terms, targets, trust, penalty) for penalty in _PENALTIES}
    penalty = min(_PENALTIES, key=lambda each: float(trust @ (predictions[each] - targets) ** 2))
    return LearnedCost(
        weights=_solve(terms, targets, trust, penalty),
        lowest=features.min(0),
        highest=features.max(0),
        centre=centre,
        scale=scale,
        penalty=penalty,
        cross_validated=accuracy(np.exp(predictions[penalty]) + calls, seconds + calls),
        num_measurements=len(measurements),
        link_bytes_per_s=link_bytes_per_s,
    )


def write_cost(cost: LearnedCost, path: str | os.PathLike[str]) -> None:
    """Write as JSON, over what is there; whole or not at all."""
    write_json({"kind": _KIND, "features": list(FEATURES), **cost.to_dict()}, path, force=True)


def read_cost(path: str | os.PathLike[str]) -> LearnedCost:
    """What ``write_cost`` wrote.

    Raises:
        ValueError: it is no such file; says why. FileNotFoundError.
    """
    found = read_json(path, _KIND)
    if found.get("features") != list(FEATURES):
        raise ValueError(f"{os.fspath(path)} was fitted to other features; fit it again: {', '.join(FEATURES)} wanted")
    try:
        return LearnedCost.from_dict(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold {_KIND}: {error!r}") from error
