"""Metrics of labels and logits: against plain numpy and scikit-learn, by window, over processes, from a state."""

import itertools
import math
import pickle
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from tierstore.metrics import Measures, MetricName, Metrics, evaluate

NAMES = get_args(MetricName)
MEASURES = Measures(names=NAMES, segments={7: "at=seven", -3: "at=US"})
ROW = st.tuples(
    st.booleans(), st.sampled_from([-2.5, -1.0, 0.0, 0.5, 0.50001, 3.0]), st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(-1, 2), st.sampled_from([-3, 0, 1, 7]),
)  # fmt: skip
"""Label, logit, weight, group, segment."""
SIZES = (17, 40, 3, 60, 25, 25, 8, 30, 71, 5)
EDGES = list(itertools.pairwise(itertools.accumulate(SIZES, initial=0)))
ENDS = [57, 120, 170, 279]  # of windows of 50 rows


def auc_of(rows: Any) -> float:
    pairs = [(v * w, (a > b) + (a == b) / 2) for y, a, v, *_ in rows for x, b, w, *_ in rows if y and not x]
    return sum(weight * won for weight, won in pairs) / sum(weight for weight, _ in pairs) if pairs else math.nan


def aucs_of(rows: Any) -> list[float]:
    groups = [[row for row in rows if row[3] == group] for group in sorted({row[3] for row in rows} - {-1})]
    return [auc_of(own) for own in groups if len({row[1] for row in own}) > 1 and len({row[0] for row in own}) > 1]


@np.errstate(all="ignore")
def plain(rows: Any) -> dict[str, float]:
    label, logit, weight = np.array([row[:3] for row in rows], np.float64).reshape(-1, 3).T
    chance, share = 1 / (1 + np.exp(-logit)), (weight * label).sum() / weight.sum()
    loss, base = (
        -(weight * np.log(np.where(label > 0, p, 1 - p))).sum() / weight.sum() for p in (chance, share + 0 * chance)
    )
    found = {"log_loss": loss, "ne": loss / base if 0 < share < 1 else math.nan, "auc": auc_of(rows)}
    return found | {"calibration": (weight * chance).sum() / (weight * label).sum()}


@given(st.lists(ROW, min_size=1, max_size=30))
def test_figures_are_those_of_plain_numpy(rows: Any) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    found = evaluate(*columns, measures=MEASURES).figures
    parts = {"": (-3, 0, 1, 7), "/at=seven": (7,), "/at=US": (-3,), "/other": (0, 1)}
    each = {part: plain([row for row in rows if row[4] in own]) for part, own in parts.items()}
    expected = {name + part: value for part, own in each.items() for name, value in own.items()}
    expected["gauc"] = sum(aucs) / len(aucs) if (aucs := aucs_of(rows)) else math.nan
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
    unweighted = auc_of([(*row[:2], 1) for row in rows])
    assert evaluate(*columns[:2]).auc == unweighted or math.isnan(unweighted), "exact to the last bit"


def drawn(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    logits = random.normal(-1, 1.5, count).astype(np.float32)
    labels = (random.random(count) < 1 / (1 + np.exp(random.normal(0, 1, count) - logits))).astype(np.float32)
    keys = random.integers(-1, 20, count), random.choice([-3, 0, 1, 7], count)
    return [torch.from_numpy(each) for each in (labels, logits, random.random(count, np.float32), *keys)]


def test_figures_are_those_of_scikit_learn() -> None:
    labels, logits, weights, *_ = (each.double().numpy() for each in drawn(3000))
    found, chances = evaluate(labels, logits, weights), 1 / (1 + np.exp(-logits))
    assert found.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), rel=1e-12)
    assert found.log_loss == pytest.approx(log_loss(labels, chances, sample_weight=weights), rel=1e-12)


def windows(ranks: int, cut: int = -1, ranks_then: int = 0) -> list[dict[str, float]]:
    """Of processes that share batches; those after the batch of the number ``cut`` are others, which go on."""
    columns, found = drawn(sum(SIZES)), []
    made = [Metrics(MEASURES, window=50) for _ in range(ranks)]
    for number, (begin, end) in enumerate(EDGES):
        for rank, each in enumerate(made):
            part = slice(*(begin + (end - begin) * at // len(made) for at in (rank, rank + 1)))
            each.update(*(column[part] for column in columns), total_rows=end - begin)
        if made[0].is_full:
            kept = pickle.dumps([each._kept for each in made])
            figures = [each.compute(lambda _, kept=kept: pickle.loads(kept)) for each in made]
            assert figures[1:] == figures[:-1]
            found.append(figures[0])
        if number == cut:
            state = made[0].state_dict(lambda _, made=made: [each._kept for each in made])
            made = [Metrics(MEASURES, window=50) for _ in range(ranks_then)]
            for rank, each in enumerate(made):
                each.load_state_dict(state, rank=rank)
    return found


def test_windows_end_with_their_batch_and_add_up() -> None:
    columns, pairs, aucs = drawn(sum(SIZES)), np.zeros(2), list[float]()
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    for figures, begin, end in zip(windows(1), [0, *ENDS[:-1]], ENDS, strict=True):
        own = evaluate(*(column[begin:end] for column in columns), measures=MEASURES).figures
        assert {f"window_{name}": value for name, value in own.items()}.items() <= figures.items()
        weight = math.prod(sum(row[2] for row in rows[begin:end] if row[0] == label) for label in (0, 1))
        pairs += np.array([weight * own["auc"], weight])
        aucs += aucs_of(rows[begin:end])
        every = evaluate(*(column[:end] for column in columns), measures=MEASURES).figures
        for name in (each for each in every if not each.startswith(("auc", "gauc"))):
            assert figures[f"lifetime_{name}"] == pytest.approx(every[name])
        assert figures["lifetime_auc"] == pytest.approx(pairs[0] / pairs[1])
        assert figures["lifetime_gauc"] == pytest.approx(np.mean(aucs))


@pytest.mark.parametrize(("ranks", "cut", "then"), [(2, -1, 0), (1, 0, 1), (2, 4, 2), (3, 6, 1), (1, 8, 2), (2, 1, 3)])
def test_processes_and_a_state_give_the_same_bits(ranks: int, cut: int, then: int) -> None:
    assert windows(ranks, cut, then) == windows(1)


def test_a_loop_of_ones_own_goes_on_with_as_many_columns_as_it_gives() -> None:
    metrics, columns = [Metrics(Measures(names=("ne", "auc"))) for _ in range(2)], drawn(60)[:3]
    for begin in (0, 30):
        for each in metrics:
            each.update(*(column[begin : begin + 30] for column in columns))
        metrics[1].load_state_dict(metrics[1].state_dict())
    assert metrics[0].compute() == metrics[1].compute()


def test_far_out_and_undefined() -> None:
    labels = np.array([0, 1])
    assert evaluate(labels, np.array([1000.0, -1000.0])).log_loss == 1000
    assert evaluate(labels, np.array([-math.inf, math.inf]))[1:3] == (1.0, 0.0)
    assert evaluate(labels, torch.tensor([0.5, 1.5], dtype=torch.bfloat16)).auc == 1
    alike = evaluate(np.ones(2), np.zeros(2), None, np.zeros(2, int), measures=Measures(names=NAMES)).figures
    assert [name for name, value in alike.items() if math.isnan(value)] == ["ne", "auc", "gauc"]
    (metrics := Metrics(Measures(names=NAMES))).update(labels, np.array([math.nan, 1.0]), None, np.zeros(2, int))
    assert all(map(math.isnan, metrics.compute().values())), "a run goes on"
    for columns, reason in (
        ((labels, np.array([0.5])), r"labels \[2\] must be as many as logits \[1\]"),
        ((labels, np.ones((2, 1))), r"labels \[2\] must be 0 or 1, and as many as logits \[2, 1\]"),
        ((np.array([0, 2]), np.array([0.5, 0.5])), "must be 0 or 1"),
        ((labels, np.array([0.5, math.nan])), "diverged"),
        ((labels, labels, np.ones(1)), r"weights \[1\] must be as many as logits \[2\]"),
        ((labels, labels, np.ones((2, 2))), r"weights \[2, 2\] must be as many"),
        ((labels, labels, np.array([-1, 2])), r"weights must be 0 or more, not -1.0"),
        ((labels, labels, np.array([math.nan, 2])), r"weights must be 0 or more, not nan"),
        ((labels, labels, None, np.array([0.1, 0.2])), "groups are torch.float64; number them"),
    ):
        with pytest.raises(ValueError, match=reason):
            evaluate(*columns)
    with pytest.raises(ValueError, match="a batch has labels, logits, weights, the first had labels, logits, groups"):
        metrics.update(labels, labels, np.ones(2))
    with pytest.raises(ValueError, match=r"names=\['AUC'\]: expected some of auc, "):
        Measures(names=("ne", "AUC"))
    with pytest.raises(ValueError, match="no column says which rows are at=seven, at=US: give int64"):
        evaluate(labels, np.zeros(2), measures=MEASURES)
