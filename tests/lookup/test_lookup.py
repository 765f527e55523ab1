"""A lookup beside what else happens to its pool."""

from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.pool.pins import Pins

ROWS, DIM = 100, 4
IDS, OFFSETS = torch.tensor([3, 5, 3]), torch.tensor([0, 2, 3])


def _config(name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.SGD(lr=1.0)
    )


@pytest.mark.parametrize("ddr", ["4MiB", "440KiB"])
def test_what_was_staged_in_a_pool_that_a_new_table_replaced_is_staged_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ddr: str
) -> None:
    """A prefetch thread has brought rows in and not yet said that it holds them, when the pool is replaced."""
    with tierstore.open(tmp_path / "store", ddr=ddr) as store:
        table = store.create_table(_config("t"))
        table.write(torch.arange(ROWS), torch.arange(ROWS * DIM, dtype=torch.float32).reshape(ROWS, DIM))
        expected = table.pooled(IDS, OFFSETS)
        lookup = table.lookup(table.jagged(IDS, OFFSETS, mode="sum"), mode="sum")
        with monkeypatch.context() as patch:
            patch.setattr(Pins, "hold", lambda _self, lease: lease.release() is None)
            lookup.stage()
        store.create_table(_config("u"))
        out = torch.empty(2, DIM)
        lookup.forward(out, keep=True)
        assert torch.equal(out, expected)
        lookup.update(torch.ones(2, DIM))
        table.pool.cache.check_integrity()
        assert torch.equal(table.pooled(IDS, OFFSETS), expected - torch.tensor([[3.0], [2.0]]))
        assert not table.pool.in_use
