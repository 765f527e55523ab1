"""A DLRM over tables larger than their memory budget. Run it twice: the second run goes on where the first stopped."""

from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tierstore.models import DLRM

ROWS = {"user": 100_000, "item": 50_000, "shop": 1_000}
STEPS, BATCH, NUM_DENSE, DIM = 120, 512, 4, 16


class Batch(NamedTuple):
    dense: torch.Tensor  # float32 [BATCH, NUM_DENSE]
    sparse: tierstore.KeyedJaggedTensor  # one to three ids a sample and feature
    clicked: torch.Tensor  # float32 [BATCH]


def make_batch(step: int) -> Batch:
    """Clicks that depend on the items. The batch is a function of the step, so a resumed run has the same data."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 4, (len(ROWS), BATCH), generator=random)
    counts = lengths.sum(1).tolist()
    ids = [(rows * torch.rand(n, generator=random) ** 3).long() for rows, n in zip(ROWS.values(), counts, strict=True)]
    sparse = tierstore.KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths.flatten())
    taste = torch.segment_reduce(torch.sin(ids[1].float()), "mean", lengths=lengths[1])
    clicked = torch.rand(BATCH, generator=random) < torch.sigmoid(5 * taste)
    return Batch(torch.rand(BATCH, NUM_DENSE, generator=random), sparse, clicked.float())


torch.manual_seed(0)
with tierstore.open("dlrm-store", ddr="2MiB") as store:  # a directory; made if it is not there
    for name, rows in ROWS.items():  # a table that is there already is returned as it is
        rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
        store.create_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=DIM, optimizer=rule))
    tables = tierstore.TieredEmbeddingBagCollection(store)
    model = DLRM(tables, num_features=len(ROWS), embedding_dim=DIM, num_dense=NUM_DENSE)
    optimizer = torch.optim.Adam(model.dense_parameters().values(), lr=0.002)
    first = tierstore.checkpoint.load(store, model, [optimizer])["step"] if store.version else 0

    losses = []
    for batch in tierstore.prefetch(map(make_batch, range(first, first + STEPS)), model, depth=2):
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.clicked)
        optimizer.zero_grad()
        loss.backward()  # updates the rows, too
        optimizer.step()
        losses.append(loss.item())
    tierstore.checkpoint.save(store, model, [optimizer], extra={"step": first + STEPS})

    ddr, table_bytes = store.stats().ddr, sum(table.size_bytes for table in store.tables.values())
    print(f"steps {first} to {first + STEPS}: loss {sum(losses[:10]) / 10:.3f} to {sum(losses[-10:]) / 10:.3f}")
    print(f"{ddr.bytes / 2**20:.1f} of {table_bytes / 2**20:.1f} MiB in memory: {ddr.hit_rate:.0%} of lookups hit")
