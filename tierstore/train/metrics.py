"""How well logits rank and fit binary labels: the loss that is trained, and figures of test rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..kernels.arrays import Bools, Float64s, Floats


class LabelEvaluation(NamedTuple):
    name: str
    auc: float
    log_loss: float


class Evaluation(NamedTuple):
    """Of several labels, means by the weights of their losses; ``labels`` has each."""

    rows: int
    auc: float  # NaN where the labels are all alike
    log_loss: float
    labels: tuple[LabelEvaluation, ...] = ()


def training_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, label_weights: Sequence[float] = ()
) -> Tensor:
    """The mean over rows of the log loss, a scalar: of logits and labels, float32 [B], times the rows' weights [B] if
    there are any; of [B, L] the sum over labels, each times its weight. Without rows 0, with a gradient, as backward
    needs a loss where processes take part in it. ValueError: the shapes differ."""
    if logits.shape != labels.shape:
        shapes = f"{list(logits.shape)}, and the labels have {list(labels.shape)}"
        raise ValueError(f"the model gave logits of shape {shapes}: let forward return a logit for each label")
    if not len(labels):
        return logits.sum()
    if labels.ndim == 1:
        return binary_cross_entropy_with_logits(logits, labels, weight=weights)
    each = labels.new_tensor(label_weights or [1.0] * labels.shape[1])
    each = each if weights is None else each * weights[:, None]
    return binary_cross_entropy_with_logits(logits, labels, weight=each) * labels.shape[1]


def roc_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve of labels [n], 0 or 1, and scores [n], ties counting half; NaN unless both labels
    occur. The Mann-Whitney statistic, exact up to the last division. ValueError for lengths that differ or a
    score that is NaN."""
    positive, score = _pair(labels, scores)
    if np.isnan(score).any():
        raise ValueError("scores hold NaN; the model has diverged")
    order = np.argsort(score, kind="stable")
    score, positive = score[order], positive[order].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, score[1:] != score[:-1]]) if len(score) else np.empty(0, np.int64)
    positives = np.add.reduceat(positive, starts) if len(score) else positive
    negatives = np.diff(np.r_[starts, len(score)]) - positives
    below = np.cumsum(negatives) - negatives
    num_positive, num_negative = int(positives.sum()), int(negatives.sum())
    if not num_positive or not num_negative:
        return math.nan
    twice_won = int((positives * (2 * below + negatives)).sum())
    return twice_won / (2 * num_positive * num_negative)


def log_loss(labels: ArrayLike, logits: ArrayLike) -> float:
    """Mean negative log-likelihood, in nats, of labels [n] under the logits [n]. ValueError for lengths that differ
    or are 0."""
    positive, logit = _pair(labels, logits)
    if not len(logit):
        raise ValueError("log loss of no rows")
    losses = np.maximum(wrong := np.where(positive, -logit, logit), 0) + np.log1p(np.exp(-np.abs(wrong)))
    return float(losses.mean())


def _pair(labels: ArrayLike, scores: ArrayLike) -> tuple[Bools, Float64s]:
    label, score = np.asarray(labels), np.asarray(scores, np.float64)
    if label.shape != score.shape or label.ndim != 1:
        raise ValueError(f"labels {list(label.shape)} and scores {list(score.shape)} must be of one length")
    if not np.isin(label, (0, 1)).all():
        raise ValueError("labels must be 0 or 1")
    return label != 0, score


class Predictions:
    """Labels and logits of many batches, kept as 5 bytes a row until they are evaluated."""

    def __init__(self) -> None:
        self._labels: list[Bools] = []
        self._logits: list[Floats] = []

    @classmethod
    def merged(cls, parts: "Sequence[Predictions]") -> "Predictions":
        made = cls()
        for part in parts:
            made._labels += part._labels
            made._logits += part._logits
        return made

    def add(self, labels: Tensor, logits: Tensor) -> None:
        """Add a batch: labels and logits, each [B] or [B, L], of any device."""
        self._labels.append(labels.cpu().numpy() != 0)
        self._logits.append(logits.cpu().numpy().astype(np.float32))

    def evaluate(self, names: Sequence[str] = (), label_weights: Sequence[float] = ()) -> Evaluation:
        """Rows count the same whatever they weigh; ``names``: of labels [B, L]. ValueError if no batch was added."""
        if not self._labels:
            raise ValueError("there is nothing to evaluate: no batch was added")
        labels, logits = np.concatenate(self._labels), np.concatenate(self._logits)
        if labels.ndim == 1:
            return Evaluation(rows=len(labels), auc=roc_auc(labels, logits), log_loss=log_loss(labels, logits))
        columns = zip(names, labels.T, logits.T, strict=True)
        found = tuple(LabelEvaluation(name, roc_auc(*own), log_loss(*own)) for name, *own in columns)
        auc, loss = np.average([each[1:] for each in found], axis=0, weights=label_weights or None).tolist()
        return Evaluation(len(labels), auc, loss, found)
