"""Modules against TorchRec's own, given TorchRec's own jagged tensors; needs ``make peers``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"

pytestmark = pytest.mark.skipif(not (PEERS / "torchrec").is_dir(), reason="TorchRec is not there: make peers")

CODE = """
import torch, torchrec, tierstore

ROWS, LENGTHS = 100, torch.tensor([[2, 0, 3], [1, 1, 0], [4, 2, 1]])
ids = torch.randint(0, ROWS, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(1))
batch = torchrec.KeyedJaggedTensor(["b", "t", "a"], ids, lengths=LENGTHS.flatten())
rule = tierstore.optim.SGD(lr=0.5)

def twins(store, pooled):
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    features = {"t": ["t"], "u": ["a", "b"]}
    shared = [dict(name=name, embedding_dim=8, feature_names=own) for name, own in features.items()]
    for each in shared:
        store.create_table(tierstore.TableConfig(num_embeddings=ROWS, optimizer=rule, **each))
    configs = [config(num_embeddings=ROWS, **each) for each in shared]
    if pooled:
        return tierstore.TieredEmbeddingBagCollection(store), torchrec.EmbeddingBagCollection(tables=configs)
    return tierstore.TieredEmbeddingCollection(store), torchrec.EmbeddingCollection(tables=configs)

def by_key(found):
    return {key: found[key] if isinstance(found[key], torch.Tensor) else found[key].values() for key in ("t", "a", "b")}

for pooled in (True, False):
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        ours, theirs = twins(store, pooled)
        weights = {name.split(".")[-2]: weight for name, weight in theirs.named_parameters()}
        for name, weight in weights.items():
            weight.data.copy_(store[name].read(torch.arange(ROWS)))
        for _ in range(3):
            found, expected = by_key(ours(batch)), by_key(theirs(batch))
            for key in found:
                torch.testing.assert_close(found[key], expected[key])
            for each in (found, expected):
                sum((place + 1) * each[key].square().sum() for place, key in enumerate("tab")).backward()
            for weight in weights.values():
                weight.data -= 0.5 * weight.grad
                weight.grad = None
        for name, weight in weights.items():
            torch.testing.assert_close(store[name].read(torch.arange(ROWS)), weight.detach())
        for _ in tierstore.prefetch(iter([batch]), ours):
            torch.testing.assert_close(by_key(ours(batch)), by_key(theirs(batch)))

with tierstore.open(cold="memory", ddr="4MiB") as store:
    ours, _ = twins(store, True)
    varying = torchrec.KeyedJaggedTensor(
        ["b", "t", "a"], ids[:6], lengths=torch.ones(6, dtype=torch.int64), stride_per_key_per_rank=[[1], [2], [3]]
    )
    try:
        ours(varying)
    except ValueError as error:
        assert "different numbers of samples" in str(error)
    else:
        raise AssertionError("features of other batch sizes were taken for one another")

own = tierstore.KeyedJaggedTensor(["b", "t", "a"], ids, lengths=LENGTHS.flatten())
for key, lists in batch.to_dict().items():
    assert torch.equal(own[key].values(), lists.values()) and torch.equal(own[key].lengths(), lists.lengths())
for one, other in zip(own.split([1, 2]), batch.split([1, 2])):
    assert one.keys() == other.keys() and torch.equal(one.offsets(), other.offsets())
assert torch.equal(tierstore.KeyedJaggedTensor.concat(own.split([1, 2])).values(), ids)
assert own.offset_per_key() == batch.offset_per_key()
print("equal")
"""
EXAMPLE = "import runpy; runpy.run_path('examples/from_torchrec.py')  # compares its losses with TorchRec's"


def test_rows_are_those_of_torchrec() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE + EXAMPLE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PEERS)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.fullmatch("equal\ntierstore: .*\nTorchRec: .*\n", run.stdout)
