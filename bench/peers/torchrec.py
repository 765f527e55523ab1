"""TorchRec's sharded embedding bags over gloo, on the CPU."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import PEERS, load


def is_there() -> bool:
    return (PEERS / "torchrec").is_dir()


def module(name: str) -> Any:
    """One of its modules, or of those that it brings."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # It calls what a newer torch names otherwise, in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.distributed")
    return load(name)


class TorchRecBags(nn.Module):
    """``EmbeddingBagCollection`` of tables t0, t1, ... with a feature f0, f1, ... each; shard it by ``distribute``."""

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        super().__init__()
        torchrec = module("torchrec")
        self._names = [f"f{number}" for number in range(len(rows))]
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t{number}", embedding_dim=dim, num_embeddings=count, feature_names=[f"f{number}"]
            )
            for number, count in enumerate(rows)
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def jagged(self, batch: Any) -> Any:
        """TorchRec's own jagged tensor of tierstore's, with lengths in int32, as it has them by default."""
        torchrec = module("torchrec")
        return torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths().to(torch.int32))

    def forward(self, batch: Any) -> "_Results":
        return _Results(self.bags(batch), self._names)


class _Results:
    """Of a lookup."""

    def __init__(self, found: Any, names: Sequence[str]) -> None:
        self._found, self._names = found, names

    def unordered(self) -> Tensor:
        """float32 [B, E], features in the order that the plan gave them."""
        values: Tensor = self._found.values()
        return values

    def values(self) -> Tensor:
        """float32 [B, E], features as declared."""
        return torch.cat([self._found[name] for name in self._names], dim=1)


def distribute(
    model: nn.Module, sharding_type: str, ranks: Sequence[Sequence[int]], *, lr: float, eps: float
) -> nn.Module:
    """``DistributedModelParallel`` over a model that has one ``TorchRecBags``, or is one, "table_wise" or "row_wise";
    row-wise Adagrad is fused with backward. ``ranks`` are those that have each table."""
    plans = module("torchrec.distributed.sharding_plan")
    is_whole, kernel = sharding_type == "table_wise", {"compute_kernel": "fused"}
    shardings = {
        f"t{number}": plans.table_wise(rank=own[0], **kernel) if is_whole else plans.row_wise(**kernel)
        for number, own in enumerate(ranks)
    }
    rule = module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    fused = {"optimizer": rule, "learning_rate": lr, "eps": eps}
    sharder = module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params=fused)
    path, bags = next((name, each) for name, each in model.named_modules() if isinstance(each, TorchRecBags))
    size = torch.distributed.get_world_size()
    plan = plans.construct_module_sharding_plan(
        bags.bags, shardings, sharder=sharder, local_size=size, world_size=size, device_type="cpu"
    )
    whole = module("torchrec.distributed.types").ShardingPlan({f"{path}.bags".lstrip("."): plan})
    parallel = module("torchrec.distributed.model_parallel").DistributedModelParallel
    made: nn.Module = parallel(model, device=torch.device("cpu"), plan=whole, sharders=[sharder])
    return made


def set_weights(model: nn.Module, weights: Sequence[Tensor]) -> None:
    """Copy float32 [rows, dim] of each table into the shards that this rank has of it."""
    for name, found in model.state_dict().items():
        if "embedding_bags." not in name:
            continue
        given = weights[int(name.split(".")[-2].removeprefix("t"))]
        for shard in found.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.metadata.shard_sizes
            shard.tensor.detach().copy_(given[row : row + rows, column : column + columns])
