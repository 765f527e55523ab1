"""The systems that take turns in the ranks: tierstore's sharded tables, TorchRec's, and tierstore's in one process.

Each is built alike in all ranks, over tables t0, t1, ... with a feature f0, f1, ... each.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.dist.plan import Exchange, ShardingType
from tierstore.dist.ranks import Precision
from tierstore.models import DLRM

from ..peers import torchrec

Shardings = dict[str, tuple[ShardingType, Sequence[int]]]


class Setup(NamedTuple):
    """Tables, how they are sharded and trained, and the layers around them.

    Attributes:
        rows: of each table. dim: of all.
        sharding_type: by TorchRec's name, of all tables.
        rule: "SGD" or "row-wise Adagrad"; ``initial_accumulator`` is of the latter, in tierstore.
        mlps: widths of the hidden layers of a DLRM's bottom and top MLP; None for the tables alone.
        exchange, forward_precision, backward_precision: of tierstore, as ``open_sharded`` has them.
    """

    rows: Sequence[int]
    dim: int
    sharding_type: ShardingType
    rule: str = "row-wise Adagrad"
    mlps: tuple[Sequence[int], Sequence[int]] | None = None
    lr: float = 0.05
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    exchange: Exchange = "rows"
    forward_precision: Precision = "fp32"
    backward_precision: Precision = "fp32"

    def config(self, number: int) -> tierstore.TableConfig:
        rule = tierstore.optim.SGD(lr=self.lr)
        adagrad = tierstore.optim.RowWiseAdagrad(
            lr=self.lr, eps=self.eps, initial_accumulator_value=self.initial_accumulator
        )
        return tierstore.TableConfig(
            name=f"t{number}", feature_names=(f"f{number}",), num_embeddings=self.rows[number],
            embedding_dim=self.dim, optimizer=rule if self.rule == "SGD" else adagrad, pooling="sum",
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
        return DLRM(
            embeddings, num_features=len(self.rows), embedding_dim=self.dim, bottom_mlp=bottom, top_mlp=top
        )  # fmt: skip


def shardings(sharding_type: ShardingType, rows: Sequence[int], size: int) -> Shardings:
    """Of all tables over so many ranks; table-wise, the largest are dealt out first, in turns."""
    order = sorted(range(len(rows)), key=lambda number: -rows[number])
    if sharding_type == "table_wise":
        return {f"t{number}": (sharding_type, [place % size]) for place, number in enumerate(order)}
    return {f"t{number}": (sharding_type, list(range(size))) for number in range(len(rows))}


class System:
    """A way to train the tables, by tierstore unless a subclass says otherwise.

    Attributes:
        model: called with the dense features and a batch, or with a batch where there are tables alone.
    """

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
        places = shardings(setup.sharding_type, setup.rows, dist.get_world_size())
        for number in range(len(setup.rows)):
            kind, ranks = places[f"t{number}"]
            self.store.create_table(setup.config(number), sharding_type=kind, ranks=ranks, exchange=setup.exchange)
        self.module = ShardedTieredEmbeddingBagCollection(self.store)
        whole = setup.around(self.module)
        self.model = whole if setup.mlps is None else data_parallel(whole)


class Theirs(System):
    """TorchRec's ``DistributedModelParallel``, of the first weights that tierstore's have."""

    def __init__(self, setup: Setup) -> None:
        self._bags = torchrec.TorchRecBags(setup.rows, setup.dim)
        places = shardings(setup.sharding_type, setup.rows, dist.get_world_size())
        self.model = torchrec.distribute(
            setup.around(self._bags), places, optimizer=setup.rule, lr=setup.lr, eps=setup.eps
        )
        torchrec.set_weights(self.model, first_weights(setup))

    def jagged(self, batch: tierstore.KeyedJaggedTensor) -> Any:
        return self._bags.jagged(batch)

    def pooled(self, batch: Any) -> Tensor:
        found: Tensor = self.model(batch).unordered()
        return found

    def close(self) -> None:
        pass


class Alone(System):
    """tierstore in one process.

    Args:
        threads: that it may use, besides those that torch has.
    """

    def __init__(self, setup: Setup, threads: int) -> None:
        self.store = _open_alone(setup, threads)
        self.module = tierstore.TieredEmbeddingBagCollection(self.store)
        self.model = setup.around(self.module)


def _open_alone(setup: Setup, threads: int) -> tierstore.Store:
    store = tierstore.open(cold="memory", ddr=setup.in_memory, threads=threads)
    for number in range(len(setup.rows)):
        store.create_table(setup.config(number))
    return store


def first_weights(setup: Setup) -> list[Tensor]:
    """float32 [rows, dim] of each table before training: a function of its configuration alone."""
    with _open_alone(setup, 1) as store:
        return [table.read(torch.arange(table.config.num_embeddings)) for table in store.tables.values()]


def dense_part(batch: tierstore.KeyedJaggedTensor, seed: int) -> tuple[Tensor, Tensor]:
    """Dense features at random, and labels that tell whether the ids in the first feature's bag have an odd sum."""
    samples = batch.stride()
    lengths = batch.lengths()[:samples]
    bags = torch.arange(samples).repeat_interleave(lengths)
    sums = torch.zeros(samples, dtype=torch.int64).index_add_(0, bags, batch.values()[: len(bags)])
    dense = torch.randn(samples, 13, generator=torch.Generator().manual_seed(seed))
    return dense, (sums % 2).float()


def train_step(system: System, lr: float) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """A step of a whole model, given a batch, dense features and labels; returns the loss."""
    own = [each for name, each in system.model.named_parameters() if "embeddings." not in name]
    rule = torch.optim.SGD(own, lr=lr)

    def step(batch: Any, dense: Tensor, labels: Tensor) -> Tensor:
        rule.zero_grad()
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(system.model(dense, batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        return loss.detach()

    return step
