"""Where values stopped being finite, over ranks: the rank whose batch has the gradient, or whose row it is, names it;
all others end with that rank's number, nothing is committed, and nobody waits for ever."""

import pytest
import torch

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.errors import TierstoreError

from .ranks import run

KINDS = {"columns": {"sharding_type": "column_wise"}, "replicated": {"sharding_type": "data_parallel"}}
KINDS |= {"pooled": {"exchange": "pooled"}, "rows": {}, "dynamic": {}}


def train(kind, value, lr, calls, steps):
    """Steps, in the first of which rank 1 has the value in the gradient of the last call's sample 1, and a commit: how
    each ended; what was found; and whether this rank's rows are as they were."""
    fields = {"num_embeddings": 40, "embedding_dim": 4, "optimizer": tierstore.optim.SGD(lr=lr)}
    ids = tierstore.DynamicIds() if kind == "dynamic" else None
    store = open_sharded(cold="memory", ddr="1MiB", threads=1, check_finite="error")
    config = tierstore.TableConfig(name="t", feature_names=("a", "b"), ids=ids, **fields)
    local, ended, found = store.create_table(config, **KINDS[kind]).local, [], []
    module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
    values = torch.arange(12) + 12 * rank + (2**40 if ids else 0)
    batch = tierstore.KeyedJaggedTensor(["a", "b"], values, lengths=torch.full((6,), 2))
    own = values[:0] if ids else torch.arange(local.rows.start, local.rows.stop)
    before = local.read(own)

    def end(call):
        try:
            ended.append(call() and "")
        except TierstoreError as error:
            ended.append(f"{type(error).__name__}: {error}")
            found.append(getattr(error, "found", None))

    for bad in (value, 0.0)[:steps]:
        outputs, gradient = [module(batch).values() for _ in range(calls)], torch.zeros(3, 8)
        gradient[1, 4] = bad if rank else 0.0
        end(((outputs[-1] * gradient).sum() + sum(0.0 * each.sum() for each in outputs[:-1])).backward)
    end(lambda: store.commit() * "")
    return ended, found, torch.equal(before, local.read(own))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_refused_on_all_ranks_and_a_row_named_by_its_owner(tmp_path, kind):
    for calls in (1, 2):
        others, own = run(train, 2, tmp_path, kind, float("nan"), 0.5, calls, 2)
        named = {"source": "gradient", "table": "t", "feature": "b", "sample": 1, "update": 1}
        assert own[1:] == ([named | {"id": 20 + (2**40 if kind == "dynamic" else 0)}], True)
        assert own[0][0].startswith("NonFiniteError: not finite: source 'gradient', table 't'")
        assert others[0][0].startswith("RankError: rank 1 cannot take part in this step")
        assert (own[0][1:], others[0][1:], others[2]) == ([None, ""], [None, ""], True)  # the next step, and a commit
    if kind not in ("columns", "replicated"):  # of which several ranks find it
        ranks = run(train, 2, tmp_path, kind, 1e30, 1e30, 1, 1)
        (row,) = [each for _, found, _ in ranks for each in found if each]
        assert row.pop("id") % 2**40 in (20, 21)
        assert row == {"source": "row", "table": "t", "feature": None, "sample": None, "update": 1}
        assert {ended[-1].split(":")[0] for ended, *_ in ranks} <= {"PartlyTrainedError", "RankError"}
