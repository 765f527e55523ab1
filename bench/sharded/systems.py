"""The systems that take turns in the ranks: tierstore's sharded tables, TorchRec's, and tierstore's in one process.

Each is built alike in all ranks, over tables t0, t1, ... with a feature f0, f1, ... each.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.dist.plan import Exchange, ShardingType
from tierstore.dist.ranks import Precision
from tierstore.models import DLRM

from ..peers import torchrec

_EPS: Final = 1e-8


class Setup(NamedTuple):
    """Tables of one width, trained by row-wise Adagrad, how they are sharded, and the layers around them: ``mlps`` has
    the widths of a DLRM's bottom and top MLP, None for the tables alone."""

    rows: Sequence[int]
    dim: int
    sharding_type: ShardingType
    mlps: tuple[Sequence[int], Sequence[int]] | None = None
    lr: float = 0.05
    exchange: Exchange = "rows"
    forward_precision: Precision = "fp32"
    backward_precision: Precision = "fp32"

    def config(self, number: int) -> tierstore.TableConfig:
        return tierstore.TableConfig(
            name=f"t{number}", feature_names=(f"f{number}",), num_embeddings=self.rows[number],
            embedding_dim=self.dim, optimizer=tierstore.optim.RowWiseAdagrad(lr=self.lr, eps=_EPS), pooling="sum",
        )  # fmt: skip

    @property
    def in_memory(self) -> int:
        """Bytes of DDR that hold all rows with what is kept beside them, and a batch's room."""
        return 2 * sum(self.rows) * (self.dim * 4 + 24) + (64 << 20)

    def around(self, embeddings: nn.Module) -> nn.Module:
        """The whole model, of the same first weights wherever it is built."""
        if self.mlps is None:
            return embeddings
        torch.manual_seed(1)
        bottom, top = self.mlps
        return DLRM(embeddings, num_features=len(self.rows), embedding_dim=self.dim, bottom_mlp=bottom, top_mlp=top)

    def ranks(self) -> list[list[int]]:
        """Those that have each table; table-wise, the largest are dealt out first, in turns."""
        size, order = dist.get_world_size(), sorted(range(len(self.rows)), key=lambda number: -self.rows[number])
        if self.sharding_type == "table_wise":
            return [[order.index(number) % size] for number in range(len(self.rows))]
        return [list(range(size)) for _ in self.rows]


class System:
    """A way to train the tables, by tierstore unless a subclass says otherwise. ``model`` is called with the dense
    features and a batch, or with a batch where there are tables alone."""

    store: tierstore.Store | ShardedStore
    module: nn.Module
    model: nn.Module

    def jagged(self, batch: tierstore.KeyedJaggedTensor) -> Any:
        """The batch as the system wants it."""
        return batch

    def pooled(self, batch: Any) -> Tensor:
        """float32 [B, E] of tables alone, the columns in an order of the system's own."""
        found: Tensor = self.module(batch).values()
        return found

    def close(self) -> None:
        self.store.close()


class Ours(System):
    """tierstore's sharded tables, a thread a rank."""

    store: ShardedStore

    def __init__(self, setup: Setup) -> None:
        self.store = open_sharded(
            cold="memory", ddr=setup.in_memory, threads=1,
            forward_precision=setup.forward_precision, backward_precision=setup.backward_precision,
        )  # fmt: skip
        for number, ranks in enumerate(setup.ranks()):
            config, kind = setup.config(number), setup.sharding_type
            self.store.create_table(config, sharding_type=kind, ranks=ranks, exchange=setup.exchange)
        self.module = ShardedTieredEmbeddingBagCollection(self.store)
        whole = setup.around(self.module)
        self.model = whole if setup.mlps is None else data_parallel(whole)


class Theirs(System):
    """TorchRec's ``DistributedModelParallel``, of the first weights that tierstore's have."""

    def __init__(self, setup: Setup) -> None:
        self._bags = torchrec.TorchRecBags(setup.rows, setup.dim)
        whole, ranks = setup.around(self._bags), setup.ranks()
        self.model = torchrec.distribute(whole, setup.sharding_type, ranks, lr=setup.lr, eps=_EPS)
        with _open_alone(setup, 1) as store:  # whose first rows are a function of their configuration alone
            weights = [table.read(torch.arange(table.config.num_embeddings)) for table in store.tables.values()]
        torchrec.set_weights(self.model, weights)

    def jagged(self, batch: tierstore.KeyedJaggedTensor) -> Any:
        return self._bags.jagged(batch)

    def pooled(self, batch: Any) -> Tensor:
        found: Tensor = self.model(batch).unordered()
        return found

    def close(self) -> None:
        pass


class Alone(System):
    """tierstore in one process, which may use so many threads besides torch's."""

    def __init__(self, setup: Setup, threads: int) -> None:
        self.store = _open_alone(setup, threads)
        self.module = tierstore.TieredEmbeddingBagCollection(self.store)
        self.model = setup.around(self.module)


def _open_alone(setup: Setup, threads: int) -> tierstore.Store:
    store = tierstore.open(cold="memory", ddr=setup.in_memory, threads=threads)
    for number in range(len(setup.rows)):
        store.create_table(setup.config(number))
    return store
