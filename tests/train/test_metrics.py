"""AUC against counting every pair; log loss against its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.train.metrics import Predictions, log_loss, roc_auc

LABELLED = st.lists(st.tuples(st.booleans(), st.sampled_from([-2.5, -1.0, 0.0, 0.5, 0.50001, 3.0])), max_size=30)


def auc_by_pairs(labels, scores):
    won = pairs = 0
    for label, score in zip(labels, scores, strict=True):
        for other_label, other in zip(labels, scores, strict=True):
            if label and not other_label:
                pairs += 1
                won += 1 if score > other else 0.5 if score == other else 0
    return won / pairs if pairs else math.nan


@given(LABELLED)
def test_auc_is_the_share_of_pairs_won(rows):
    labels, scores = [row[0] for row in rows], [row[1] for row in rows]
    expected = auc_by_pairs(labels, scores)
    result = roc_auc(labels, scores)
    assert (math.isnan(result) and math.isnan(expected)) or result == expected


def test_log_loss_is_the_mean_negative_log_likelihood_also_far_out():
    labels, logits = np.array([1, 0, 1, 0]), np.array([0.3, -1.2, -2.0, 4.0])
    probability = 1 / (1 + np.exp(-logits))
    expected = -np.mean(np.where(labels, np.log(probability), np.log(1 - probability)))
    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-12)
    assert log_loss([0, 1], [1000.0, -1000.0]) == 1000.0
    assert log_loss([1, 0], [1000.0, -1000.0]) == 0.0


def test_wrong_input_is_an_error():
    for call, labels, scores, reason in (
        (roc_auc, [0, 1], [0.5], "one length"),
        (roc_auc, [0, 1], [0.5, math.nan], "diverged"),
        (log_loss, [0, 2], [0.5, 0.5], "0 or 1"),
        (log_loss, [], [], "no rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            call(labels, scores)
    with pytest.raises(ValueError, match="no batch"):
        Predictions().evaluate()
