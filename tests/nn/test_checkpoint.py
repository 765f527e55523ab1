"""A whole job saved and loaded: a run that went on from a checkpoint has the bits of one that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore import checkpoint, errors

ROWS, DIM = 300, 20


class Job:
    """A model over a store, with everything that has a state."""

    def __init__(self, store: tierstore.Store, **config: Any) -> None:
        self.store = store
        if "t" not in store:
            config = {"optimizer": tierstore.optim.Adam(lr=0.05), **config}
            store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, **config))
        torch.manual_seed(0)
        self.model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(DIM, 8), nn.Dropout(0.2))
        self.rows, self.dense = store.optimizer(), torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (self.rows, self.dense)]
        self.all = self.model, [self.rows, self.dense], self.schedulers

    def train(self, steps: range) -> None:
        for step in steps:
            ids = torch.randint(0, ROWS, (8, 5), generator=torch.Generator().manual_seed(step))
            self.model(ids).square().mean().backward()
            for each in (self.rows, self.dense):
                each.step()
                each.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    def state(self) -> list[Tensor]:
        return [self.store["t"].read(torch.arange(ROWS)), self.model[1].weight.detach().clone()]


@pytest.mark.parametrize("background", [False, True])
def test_a_job_goes_on_where_it_was_saved(tmp_path: Path, background: bool) -> None:
    with tierstore.open(tmp_path / "one") as store:
        whole = Job(store)
        whole.train(range(6))
        expected = whole.state()
    with tierstore.open(tmp_path / "two") as store:
        job = Job(store)
        job.train(range(3))
        if background:
            saved = checkpoint.save_async(store, *job.all, extra={"step": 3})
            job.train(range(3, 5))  # not in the version
            assert saved.result() == 1
        else:
            assert checkpoint.save(store, *job.all, extra={"step": 3}) == 1
    with tierstore.open(tmp_path / "two") as store:
        job = Job(store)
        torch.manual_seed(5)
        assert checkpoint.load(store, *job.all) == {"step": 3}
        job.train(range(3, 6))
        assert all(torch.equal(one, other) for one, other in zip(job.state(), expected, strict=True))


def test_a_job_goes_back_to_where_it_was_saved_by_rollback_and_load() -> None:
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        job = Job(store)
        job.train(range(3))
        checkpoint.save(store, *job.all)
        saved = job.state()
        job.train(range(3, 5))
        store.rollback(store.version)
        checkpoint.load(store, *job.all)
        assert all(map(torch.equal, job.state(), saved))


def test_weights_do_not_go_back_without_their_rows(tmp_path: Path) -> None:
    def weights() -> Tensor:
        return job.model[1].weight.detach().clone()

    with tierstore.open(tmp_path) as store:
        job = Job(store)
        job.train(range(2))
        checkpoint.save(store, *job.all)
        assert store.changed_tables == ()
        checkpoint.load(store, *job.all)
        job.train(range(2, 4))
        assert store.changed_tables == ("t",)
        trained, rate = weights(), store["t"].learning_rate
        with pytest.raises(
            errors.TierstoreError, match=r"'t' .* since version 1.*: call store.rollback\(store.version\)"
        ):
            checkpoint.load(store, *job.all)
        assert torch.equal(weights(), trained)
        assert store["t"].learning_rate == rate
        pending = checkpoint.save_async(store, *job.all)
        job.train(range(4, 5))
        pending.result()
        assert store.changed_tables == ("t",)
        store.rollback(store.version)
        checkpoint.load(store, *job.all)
        assert torch.equal(weights(), trained)
        store["t"].write(torch.tensor([3]), torch.ones(1, DIM))
        with pytest.raises(errors.TierstoreError, match="changed since version 2"):
            checkpoint.load(store, *job.all)
        store.rollback(store.version)


def test_a_commit_of_rows_alone_drops_no_checkpoint(tmp_path: Path) -> None:
    with tierstore.open(tmp_path) as store:
        job = Job(store)
        checkpoint.save(store, *job.all)
    with tierstore.open(tmp_path) as store:
        job.train(range(0))
        with pytest.raises(ValueError, match=r"version 1 .*checkpoint.save.*keep=2 or more.*commit\(tensors=\{\}\)"):
            store.commit()
        assert store.version == 1
        checkpoint.load(store, *Job(store).all)
        checkpoint.save(store, *job.all)
        assert store.commit(tensors={}) == 3
        assert store.commit() == 4
    with tierstore.open(tmp_path, keep=2) as store:
        checkpoint.save(store, *job.all)
        store.commit()
        with pytest.raises(ValueError, match=r"version 5 .*keep=2\): .*open the store with keep=3"):
            store.commit()
        assert store.versions == (5, 6)


def test_what_is_no_checkpoint_is_refused() -> None:
    def load(*given: Any) -> None:
        checkpoint.load(store, *given)

    with tierstore.open(cold="memory") as store:
        job = Job(store)
        with pytest.raises(errors.TierstoreError, match=r"version 0 .* has no checkpoint.*checkpoint.save"):
            load(*job.all)
        store.commit()
        with pytest.raises(errors.TierstoreError, match=r"version 1 .* has no checkpoint"):
            load(*job.all)
        checkpoint.save(store, *job.all)
        with pytest.raises(ValueError, match="1 optimizers given, but the checkpoint has 2"):
            load(job.model, [job.dense], job.schedulers)
