"""Runs whose dense weights are trained Hessian-free: resumed to the same bits, whatever the tiers."""

import pytest

from tierstore.settings.sections import ConfigError
from tierstore.train import trainer
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.trainer import feed, train_step

from .runs import config_of

KEYS = {"optimizer__dense": "hessian-free", "optimizer__curvature_products": 6, "train__epochs": 1}


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_killed_run_resumes_to_the_same_bits(run, monkeypatch, curvature):
    settings = {**KEYS, "optimizer__curvature": curvature, "optimizer__warmup_steps": 3}
    whole = run("whole", **settings)
    steps, real = iter(range(1, 100)), trainer.train_step
    tight = {**settings, "train__commit_every": 4, "store__ddr": 424_000}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", lambda *arguments: real(*arguments) if next(steps) != 7 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("killed", **tight)
    resumed = run("killed", resume=True, train__prefetch_depth=3, **tight)
    assert (resumed.bits, resumed.test, resumed.step) == (whole.bits, whole.test, whole.step)
    assert whole.bits != run("other", **settings | {"optimizer__curvature_share": 1.0}).bits


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_the_loss_of_a_batch_falls_further_than_by_the_default(folder, curvature):
    losses = []
    for changes in ({}, {**KEYS, "optimizer__curvature": curvature}):
        made = config_of(folder, f"{curvature}-{len(losses)}", **changes)
        reader, hasher = open_data(made)
        with open_run_store(made) as store:
            built = build_run(made, store)
            batch = next(iter(reader.batches(hasher, batch_size=64)))
            losses.append([float(train_step(built, each)[0]) for each in feed(built, iter([batch] * 8), depth=0)][-1])
            assert {table.state.step for table in store.tables.values()} == {8}
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer__dense_clip_norm", 1.0), ("optimizer__dense_weight_decay", 0.1), ("model__towers", [["C1"]]),
     ("optimizer__curvature_share", 0.0), ("optimizer__curvature_products", 1)],
)  # fmt: skip
def test_keys_that_do_not_go_with_it_are_errors(folder, key, value):
    with pytest.raises(ConfigError, match=r"optimizer\."):
        config_of(folder, "never", **KEYS | {key: value})
