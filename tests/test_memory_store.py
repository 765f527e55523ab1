"""A store whose cold rows are in memory: no file, and as much memory as its versions need."""

import torch

import tierstore

ROWS, DIM = 2000, 16
EVERY = torch.arange(ROWS)


CONFIG = tierstore.TableConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.Adam(lr=0.1))


def test_versions_that_are_dropped_take_no_memory() -> None:
    with tierstore.open(cold="memory", keep=3, ddr="1MiB", threads=1) as store:
        store.create_table(CONFIG)
        for step in range(6):
            store["a"].write(EVERY, torch.full((ROWS, DIM), float(step)))
            store.commit()
            row_bytes = store["a"].pool.layout.row_bytes
            assert store.verify().bytes <= min(step + 1, 3) * ROWS * row_bytes + ROWS * row_bytes
        assert store.versions == (4, 5, 6)
        assert store.find_newer() is None
