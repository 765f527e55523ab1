"""How well logits rank and fit binary labels, as recommender engineers measure it: of rows, by window, over a run.

Of labels y, 0 or 1, logits, and probabilities p = 1 / (1 + exp(-logit)):

- ``log_loss``: the mean of -y ln p - (1 - y) ln(1 - p), in nats.
- ``ne``, normalised entropy: the log loss over that of the best constant p, the mean of y (He et al., "Practical
  lessons from predicting clicks on ads at Facebook", ADKDD 2014).
- ``calibration``: the sum of p over the sum of y.
- ``auc``: the share of pairs of a positive and a negative row whose positive one has the larger logit; ties count half.
- ``gauc``: the mean AUC of the groups of rows that have both labels, and logits that differ.

Rows count by their weights, pairs by the product of two, groups once. NaN: not defined. L: labels, S: segments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from .kernels.arrays import Bools, Float64s, Int64s

__all__ = ["Evaluation", "Measures", "MetricName", "Metrics", "Predictions", "evaluate", "training_loss"]

MetricName = Literal["log_loss", "ne", "calibration", "auc", "gauc"]
TITLES: Final = {"auc": "AUC", "log_loss": "log loss", "ne": "NE", "calibration": "calibration", "gauc": "GAUC"}
_COLUMNS: Final = ("labels", "logits", "weights", "groups", "segments")
_TOTALS: Final = ("sums", "ranks")


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


def _sums(label: Bools, logit: Any, weight: Float64s) -> Float64s:
    """[4]: of weights times log loss, of weights, of those of positive rows, of weights times probability."""
    score = logit.astype(np.float64)
    tail = np.exp(-np.abs(score))
    losses = np.maximum(np.where(label, -score, score), 0) + np.log1p(tail)
    chances = np.where(score < 0, tail, 1) / (1 + tail)
    return np.array([(losses * weight).sum(), weight.sum(), weight[label].sum(), (chances * weight).sum()])


def _pairs(label: Bools, score: Any, weight: Float64s, group: Int64s | None = None) -> Float64s:
    """Of rows by ascending score, in groups or one, [G, 3]: weight of pairs in order, of all, whether scores differ."""
    begins = np.arange(len(score)) == 0
    if group is not None:
        order = np.lexsort(group.astype(np.int64).view(np.uint16).reshape(-1, 4).T)  # stable, and by radix
        label, score, weight = label[order], score[order], weight[order]
        begins[1:] = np.diff(group[order]) != 0
    ties = np.flatnonzero(begins | np.append(True, score[1:] != score[:-1])[: len(score)])
    positive = np.where(label, weight, 0)
    won, lost = np.add.reduceat(positive, ties), np.add.reduceat(weight - positive, ties)
    first = np.flatnonzero(begins[ties])
    lengths = np.diff(first, append=len(ties))
    below = np.cumsum(lost) - lost
    below -= np.repeat(below[first], lengths)
    right, won, lost = (np.add.reduceat(each, first) for each in (won * (below + lost / 2), won, lost))
    return np.stack([right, won * lost, lengths > 1], axis=1)


class Evaluation(NamedTuple):
    """Names of ``figures`` are as "auc"; of one label of several as "auc/LABEL", of a segment as "auc/country=US"."""

    rows: int
    auc: float  # NaN where the labels are all alike
    log_loss: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What is measured. ``labels``: names of several; a figure without one is the mean, by ``label_weights`` or all 1.
    ``segments``: names by the category of a row, as "country=US"; rows of other categories are "other"."""

    names: tuple[MetricName, ...] = ("auc", "log_loss")
    labels: tuple[str, ...] = ()
    label_weights: tuple[float, ...] = ()
    segments: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in TITLES]:
            raise ValueError(f"names={unknown}: expected some of {', '.join(TITLES)}")

    def named(self, sums: Float64s, ranks: Float64s, prefix: str = "") -> dict[str, float]:
        """Figures, as of ``Evaluation``, of what ``Predictions.measured`` gives."""
        loss, weight, positive, chances = np.moveaxis(sums, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = positive / weight
            entropy = -positive * np.log(share) - (weight - positive) * np.log1p(-share)
            tables = {"log_loss": loss / weight, "ne": loss / entropy, "calibration": chances / positive}
            tables["auc"], tables["gauc"] = np.split(ranks[..., 0] / ranks[..., 1], [-1], axis=1)
        found: dict[str, float] = {}
        for name in self.names:
            for column, segment in zip(tables[name].T, ("", *self.segments.values(), "other"), strict=False):
                each = {"": float(np.average(column, weights=self.label_weights or None))}
                each |= dict(zip(self.labels, column.tolist(), strict=False))
                found |= {"/".join(filter(None, (prefix + name, of, segment))): value for of, value in each.items()}
        return found


class Predictions:
    """Labels and logits of batches, and their rows' weights, groups and segments, as they were given."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Tensor]] = []  # by names of ``_COLUMNS``

    @classmethod
    def merged(cls, parts: "Sequence[Predictions]") -> "Predictions":
        """Of parts of the same batches, in the order of rows."""
        made = cls()
        made._batches = [own for together in zip(*(each._batches for each in parts), strict=True) for own in together]
        return made

    def add(self, labels: Any, logits: Any, *of_rows: Any) -> None:
        """Add a batch of tensors or arrays, which are not copied: labels, 0 or 1, and logits, [B] or [B, L]; then, or
        None, weights [B], groups, int64 [B], -1 for none, and segments' categories, int64 [B]. Waits for no device.
        ValueError: a column has another length or type, or other columns came before."""
        logits = torch.as_tensor(logits).detach()
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        columns = zip(_COLUMNS, (labels, logits, *of_rows), strict=False)
        batch = {name: torch.as_tensor(each) for name, each in columns if each is not None}
        if batch.keys() != (first := (self._batches or [batch])[0]).keys():
            raise ValueError(f"a batch has {', '.join(batch)}, the first had {', '.join(first)}: give all the same")
        for name, each in batch.items():
            if len(each) != len(logits) or (name in _COLUMNS[2:] and each.ndim > 1):
                raise ValueError(f"{name} {list(each.shape)} must be as many as logits {list(logits.shape)}")
            if name in _COLUMNS[3:] and each.is_floating_point():
                raise ValueError(f"{name} are {each.dtype}; number them: torch.unique(..., return_inverse=True)")
        self._batches.append(batch)

    def columns(self) -> dict[str, Tensor]:
        """Of all rows, a copy of what ``add`` took, by name."""
        columns = {name: [each[name] for each in self._batches] for name in (self._batches or [{}])[0]}
        return {name: torch.cat([own[0].to(own[-1].device), *own[1:]]) for name, own in columns.items()}

    def __getstate__(self) -> Any:  # arrays, which are faster to pickle than tensors
        return [{name: each.cpu().numpy() for name, each in own.items()} for own in self._batches]

    def __setstate__(self, state: Any) -> None:
        self._batches = [{name: torch.from_numpy(each) for name, each in own.items()} for own in state]

    def evaluate(self, measures: Measures = Measures()) -> Evaluation:
        """ValueError: there are no rows, a label is not 0 or 1, a weight below 0, segments lack, or a logit is NaN."""
        sums, ranks = self.measured(measures)
        if np.isnan(sums).any():
            raise ValueError("scores hold NaN; the model has diverged")
        figures = measures.named(sums, ranks)
        auc, loss = (figures.get(name, math.nan) for name in ("auc", "log_loss"))
        return Evaluation(sum(len(each["labels"]) for each in self._batches), auc, loss, figures)

    def measured(self, measures: Measures) -> tuple[Float64s, Float64s]:
        """What adds up over windows: [L, 1 + S, 4], ``_sums`` of all rows and of each segment; [L, 2 + S, 2],
        ``_pairs`` of these, then the sum of groups' AUC, and how many. ValueError as of ``evaluate``, but for NaN."""
        columns: Any = {name: each.cpu().numpy() for name, each in self.columns().items()}
        if not len(columns.get("labels", ())):
            raise ValueError("there are no rows to evaluate")
        labels, logits, weights, groups, segments = map(columns.get, _COLUMNS)
        if labels.shape != logits.shape or not np.isin(labels, (0, 1)).all():
            raise ValueError(f"labels {list(labels.shape)} must be 0 or 1, and as many as logits {list(logits.shape)}")
        weights = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
        if not weights.min() >= 0:
            raise ValueError(f"weights must be 0 or more, not {weights.min()}")
        groups = np.full(len(labels), -1) if groups is None else groups
        if measures.segments and segments is None:
            raise ValueError(f"no column says which rows are {', '.join(measures.segments.values())}: give int64 [n]")
        part = np.full(len(labels), len(measures.segments))
        for number, category in enumerate(measures.segments):
            part[segments == category] = number
        pairs = zip(np.atleast_2d(labels.T != 0), np.atleast_2d(logits.T), strict=True)
        found = [_of_label(*pair, weights, groups, part, measures) for pair in pairs]
        return np.stack([sums for sums, _ in found]), np.stack([ranks for _, ranks in found])


def _of_label(label: Any, logit: Any, weight: Any, group: Any, part: Any, measures: Any) -> tuple[Float64s, Float64s]:
    order = np.argsort(logit) if {"auc", "gauc"} & {*measures.names} else np.empty(0, np.int64)
    sums, ranks = list[Float64s](), list[Any]()
    for number in range(-1, len(measures.segments) + bool(measures.segments)):
        at = part == number if number >= 0 else part >= 0  # -1: all
        rows = order[at[order]] if "auc" in measures.names else order[:0]
        sums.append(_sums(label[at], logit[at], weight[at]))
        ranks.append(_pairs(label[rows], logit[rows], weight[rows]).sum(axis=0)[:2])
    rows = order[group[order] != -1] if "gauc" in measures.names else order[:0]
    pairs = _pairs(label[rows], logit[rows], weight[rows], group[rows])
    right, every, _ = pairs[pairs[:, 1:].all(axis=1)].T
    ranks.append([(right / every).sum(), len(every)])
    return np.stack(sums), np.stack(ranks) * (math.nan if math.isnan(sums[0][0]) else 1)


def evaluate(labels: Any, logits: Any, *of_rows: Any, measures: Measures = Measures()) -> Evaluation:
    """Of one batch, as ``Predictions.add`` takes it."""
    kept = Predictions()
    kept.add(labels, logits, *of_rows)
    return kept.evaluate(measures)


class Metrics:
    """Metrics of rows as they come, window by window, and over all. A window ends with the batch in which it gets
    ``window`` rows. Over all ("lifetime"), windows add up: AUC is that of the pairs of rows of one window, GAUC the
    mean over the groups of each. Memory: 8 to 28 bytes for each row of a window. Without names it does nothing."""

    def __init__(self, measures: Measures, *, window: int = 100_000) -> None:
        self.measures, self.window = measures, window
        self.rows = 0  # of the window so far, those of other processes included
        self._kept, self._totals = Predictions(), tuple[Float64s, ...]()

    @property
    def is_full(self) -> bool:
        """Whether the window ends here: ``compute`` begins the next one."""
        return self.rows >= self.window

    def update(self, labels: Any, logits: Any, *of_rows: Any, total_rows: int | None = None) -> None:
        """Add a batch, as ``Predictions.add`` does; ``total_rows``: of the batch that this is one process's part of."""
        if self.measures.names:
            self._kept.add(labels, logits, *of_rows)
            self.rows += len(labels) if total_rows is None else total_rows

    def compute(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, float]:
        """For each metric "window_NAME" and "lifetime_NAME", names as of ``Evaluation``. ``gather``: gives what each
        process has, in order. ValueError as of ``Predictions.evaluate``, but for NaN."""
        window = Predictions.merged(gather(self._kept)).measured(self.measures)
        lifetime = (window[0] + self._totals[0], window[1] + self._totals[1]) if self._totals else window
        if self.is_full:
            self._totals, self._kept, self.rows = lifetime, Predictions(), 0
        return self.measures.named(*window, "window_") | self.measures.named(*lifetime, "lifetime_")

    def state_dict(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, Tensor]:
        """The same in all processes; with what ``load_state_dict`` takes it goes on to the same bits."""
        found = Predictions.merged(gather(self._kept) if self.measures.names else []).columns()
        return found | {name: torch.from_numpy(each) for name, each in zip(_TOTALS, self._totals, strict=False)}

    def load_state_dict(self, state: Mapping[str, Tensor], *, rank: int = 0) -> None:
        """Take what one of the same measures gave; the rows of the window go to rank 0."""
        self._totals = tuple(state[name].numpy() for name in _TOTALS if name in state)
        own = {name: state[name][: None if rank == 0 else 0] for name in _COLUMNS if name in state}
        self._kept, self.rows = Predictions(), len(state.get("labels", ()))
        self._kept._batches = [own] if own else []
