"""A store for commands."""

import pytest

import tierstore


@pytest.fixture
def store_with_rows(store_dir):
    import torch

    with tierstore.open(store_dir, mode="w", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=1000, embedding_dim=8))
        table.write(torch.arange(10), torch.ones(10, 8))
        store.commit(extra={"note": "hello"}, tensors={"dense": torch.zeros(3, 2)})
    return store_dir
