"""How sharp the minimum of a run is, against measures of the run's own model."""

import math

import pytest
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.train.runs import commit_scaled, config_of
from tierstore.models import box_sharpness, hessian_eigenvalues
from tierstore.train import sharpness_of, sweep, trainer
from tierstore.train.build import open_data


def test_figures_are_those_of_the_runs_model(tmp_path, monkeypatch):
    """Batches are added up, the last shorter."""
    monkeypatch.setattr(sweep, "_BATCH", 100)
    config = config_of(tmp_path, "store", model__bottom_mlp=[], model__top_mlp=[])
    trainer.train(config)
    found = sharpness_of(tmp_path / "store", rows=250)
    reader, hasher = open_data(config)
    (batch,) = reader.batches(hasher, batch_size=250, stop_row=250)

    def measured(model):
        weights, pooled = list(model.dense_parameters().values()), model.embeddings(batch.sparse).values()

        def losses():
            return [binary_cross_entropy_with_logits(model.dense_part(batch.dense, pooled), batch.labels)]

        boxes = [(1e-3, None), (5e-4, None), (1e-3, 100)]
        percents = [box_sharpness(losses, weights, epsilon=epsilon, dims=dims) for epsilon, dims in boxes]
        return *percents, hessian_eigenvalues(losses, weights).largest

    version, expected = commit_scaled(config, 1, measured)
    assert found[:2] == (version - 1, 250) == (1, 250)
    assert found[2:-1] == pytest.approx(expected, rel=1e-3)
    assert sharpness_of(tmp_path / "store").rows == 300
    commit_scaled(config, math.nan, lambda model: None)
    assert all(map(math.isnan, sharpness_of(tmp_path / "store")[2:-1]))
    with pytest.raises(ValueError, match="rows=0"):
        sharpness_of(tmp_path / "store", rows=0)
