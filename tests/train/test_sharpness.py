"""How sharp the minimum of a run is, against a model of plain torch."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

import tierstore
from tests.train.runs import commit_scaled, config_of
from tierstore.models import box_sharpness
from tierstore.train import sharpness_of, sweep, trainer
from tierstore.train.build import open_data


def test_figures_are_those_of_plain_torch(tmp_path, monkeypatch):
    """Rows of the store and weights of its commit; the Hessian formed whole. Batches are added up, the last shorter."""
    monkeypatch.setattr(sweep, "_BATCH", 100)
    config = config_of(tmp_path, "store", model__bottom_mlp=[], model__top_mlp=[])
    trainer.train(config)
    reader, hasher = open_data(config)
    (batch,) = reader.batches(hasher, batch_size=250, stop_row=250)
    with tierstore.open(tmp_path / "store", mode="r") as store:
        tensors, offsets = store.tensors(), batch.sparse.offsets()
        tables = torch.cat([store[name].read(torch.arange(150)) for name in config.data.sparse_columns])
    ids = batch.sparse.values() + (torch.arange(26 * 250) // 250 * 150).repeat_interleave(offsets.diff())
    pooled = embedding_bag(ids, tables, offsets, mode="sum", include_last_offset=True).view(26, 250, 4).transpose(0, 1)
    layers = [tensors[f"model.{part}.0.{kind}"] for part in ("bottom", "top") for kind in ("weight", "bias")]
    at = torch.cat([each.flatten() for each in layers]).requires_grad_()

    def loss_of(at):
        weight, bias, top, last = at.split([each.numel() for each in layers])
        first = torch.relu(batch.dense @ weight.view(4, 13).T + bias)
        vectors = torch.cat([first.unsqueeze(1), pooled], dim=1)
        products = (vectors @ vectors.mT)[:, *torch.tril_indices(27, 27, -1)]
        return binary_cross_entropy_with_logits(torch.cat([first, products], 1) @ top + last, batch.labels)

    found = sharpness_of(tmp_path / "store", rows=250)
    assert found[:2] == (1, 250)
    assert found == sharpness_of(tmp_path / "store", rows=250)
    for percent, epsilon, dims in zip(found[2:5], (1e-3, 5e-4, 1e-3), (None, None, 100), strict=True):
        expected = box_sharpness(lambda: [loss_of(at)], [at], epsilon=epsilon, dims=dims)
        assert percent == pytest.approx(expected, rel=1e-3)
    whole = torch.autograd.functional.hessian(loss_of, at)
    assert found.largest_eigenvalue == pytest.approx(np.linalg.eigvalsh(whole.numpy())[-1], rel=1e-3)
    assert sharpness_of(tmp_path / "store").rows == 300
    commit_scaled(config, math.nan, lambda model: None)
    assert all(map(math.isnan, sharpness_of(tmp_path / "store")[2:-1]))
    with pytest.raises(ValueError, match="rows=0"):
        sharpness_of(tmp_path / "store", rows=0)
