"""Recipes of docs/frameworks.md, and modules against TorchRec's own; in processes of their own, as peers bring versions
of what the package imports, too. Needs ``make peers``."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import tierstore
from bench.data import ROOT, examples
from tierstore.pool.stats import IdStats, TierStats

PEERS: Final = ROOT / ".peers"


def run(code: str, folder: Path = ROOT) -> str:
    """What it prints, without warnings; one that fails does so with its traceback."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PEERS)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


_, LIGHTNING, MANUAL, ACCELERATE, MLFLOW = examples("docs/frameworks.md")

BEFORE = """
import copy, itertools, torch, tierstore, warnings
warnings.simplefilter("ignore")
torch.manual_seed(0)
ROWS, every = 50, torch.arange(50)
plain = torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, 4, mode="sum"), torch.nn.Linear(4, 1))
data = torch.utils.data.TensorDataset(torch.randint(ROWS, (40, 3)), torch.rand(40))
loader = torch.utils.data.DataLoader(data, 8)
store = tierstore.open("s", ddr="4MiB", keep=9)
tiered = tierstore.convert(copy.deepcopy(plain), store, optimizer=tierstore.optim.SGD(lr=0.1))

def now():
    return store["0"].read(every), tiered[1].weight.detach().clone()

def same(one, other):
    return all(map(torch.equal, one, other))
"""
IN_LIGHTNING = """
import logging, os
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Losses(Callback):
    def __init__(self):
        self.losses = []
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["loss"]))

def fit(ranker, loader, epochs=2, saver=(), **given):
    losses = Losses()
    callbacks = [losses, *saver]
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=bool(saver), **QUIET)
    trainer.fit(ranker, loader, **given)
    return losses.losses

QUIET = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
ranker = Ranker(tiered, tierstore.checkpoint.StoreVersion(store))
ranker.lr, before = 0.1, now()
Tuner(lightning.Trainer(max_epochs=3, **QUIET)).lr_find(ranker, loader, num_training=4, update_attr=False)
assert same(now(), before), "lr_find left rows trained"
saver = ModelCheckpoint(dirpath="kept", save_top_k=-1, filename="{epoch}")
ours, theirs = fit(ranker, Ahead(loader, tiered[0]), saver=[saver]), fit(Ranker(plain, None), loader)
assert len(ours) == 10
torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
ended = now()
again = fit(ranker, loader, ckpt_path="kept/epoch=0.ckpt")
assert again == ours[5:] and same(now(), ended), "a resumed epoch differs"
"""
MANUALLY = """
manual = ManualRanker(tiered, store)
copied = tierstore.plain_model(tiered)

class Clipped(Ranker):
    def configure_gradient_clipping(self, optimizer, **_):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

torch.testing.assert_close(torch.tensor(fit(manual, loader)), torch.tensor(fit(Clipped(copied), loader)))
print("equal")
"""
IN_ACCELERATE = """
accelerator, model, optimizer, ours = prepared(tiered, store, loader)
_, _, own, theirs = prepared(plain, store, loader)
losses = [list(train(accelerator, *parts)) for parts in ((model, optimizer, ours), (plain, own, theirs))]
torch.testing.assert_close(*map(torch.tensor, losses))
accelerator.save_state("state")
saved = now()
first = list(train(accelerator, model, optimizer, ours))
assert not same(now(), saved)
accelerator.load_state("state")
assert same(now(), saved) and list(train(accelerator, model, optimizer, ours)) == first
print("equal")
"""


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("lightning", BEFORE + LIGHTNING + IN_LIGHTNING + MANUAL + MANUALLY),
        ("accelerate", BEFORE + ACCELERATE + IN_ACCELERATE),
    ],
)
def test_recipes_train_as_embedding_bags_and_restore_rows(package: str, code: str, tmp_path: Path) -> None:
    if not (PEERS / package).is_dir():
        pytest.skip(f"{package} is not there: make peers")
    assert run(code + "store.commit()\nstore.close()", tmp_path).endswith("equal\n")


def test_names_of_metrics_are_those_that_mlflow_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.logged = metrics, step

    monkeypatch.setitem(sys.modules, "mlflow", recorded := Recorded())  # type: ignore[arg-type]
    names: dict[str, object] = {}
    exec(MLFLOW, names)
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        names["log"](store, 0.5, 3)  # type: ignore[operator]
    metrics, step = recorded.logged
    assert (len(metrics), step) == (3 * (len(TierStats._fields) + 1) + len(IdStats._fields) + 1, 3)
    for name, number in metrics.items():
        assert re.fullmatch(r"[\w./ :-]{1,250}", name)  # its rule for names
        assert isinstance(number, float | int)


WITH_TORCHREC = pytest.mark.skipif(not (PEERS / "torchrec").is_dir(), reason="TorchRec is not there: make peers")

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

weights = torch.rand(len(ids))
own, batch = (
    kind(["b", "t", "a"], ids, lengths=LENGTHS.flatten(), weights=weights)
    for kind in (tierstore.KeyedJaggedTensor, torchrec.KeyedJaggedTensor)
)
def told(kjt):
    return (kjt.keys(), kjt.stride(), kjt.offset_per_key(), kjt.length_per_key(), kjt.lengths().tolist(),
        kjt.values().tolist(), kjt.weights().tolist())
assert told(own) == told(batch)
for one, other in zip(own.split([1, 2]), batch.split([1, 2])):
    assert told(one) == told(other)
assert told(own.to(torch.device("cpu"), True)) == told(batch)
for length in (None, 1, 3, 5):
    assert torch.equal(own["b"].to_padded_dense(length), batch["b"].to_padded_dense(length))
with tierstore.open(cold="memory", ddr="4MiB") as store:
    ours, theirs = twins(store, True)
    made, kept = ours(own), theirs(batch)
    for name in ("keys", "length_per_key", "offset_per_key", "key_dim", "device"):
        assert getattr(made, name)() == getattr(kept, name)(), name
    plain = tierstore.TieredEmbeddingBagCollection(store, is_weighted=False)  # as TorchRec's, by default
    for config, name in zip(theirs.embedding_bag_configs(), ("t", "u")):
        theirs.embedding_bags[name].weight.data.copy_(store[name].read(torch.arange(ROWS)))
    torch.testing.assert_close(plain(own).values(), theirs(batch).values())
    assert (ours.is_weighted(), plain.is_weighted()) == (True, theirs.is_weighted())
    single = tierstore.TieredEmbeddingCollection(store)
    torch.testing.assert_close(single(own)["a"].to_padded_dense(4), single(batch)["a"].to_padded_dense(4))
    from torchrec.modules.regroup import KTRegroupAsDict
    groups, names = [["a", "t"], ["t"]], ["x", "y"]
    expected = torchrec.KeyedTensor.regroup_as_dict([theirs(batch)], groups, names)
    module = KTRegroupAsDict(groups, names)
    torch.testing.assert_close(dict(module([plain(own)])), expected)
    again = torch.cat([plain(own)["t"], plain(own)["b"]], dim=1)
    assert torch.equal(again, torchrec.KeyedTensor.regroup([plain(own)], [["t", "b"]])[0])
print("equal")
"""
MODELS = """
import torch, torchrec, tierstore
from torchrec.fx import symbolic_trace
from torchrec.models import deepfm, dlrm
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

FEATURES, ROWS, DIM = ["f1", "f2", "f3"], 60, 8
KINDS = {
    "DLRM": lambda bags: dlrm.DLRM(bags, 5, [16, DIM], [8, 1]),
    "DLRM_DCN": lambda bags: dlrm.DLRM_DCN(bags, 5, [16, DIM], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
    "DLRM_Projection": lambda bags: dlrm.DLRM_Projection(bags, 5, [16, DIM], [8, 1], [16, 2 * DIM], [16, 2 * DIM]),
    "DeepFM": lambda bags: deepfm.SimpleDeepFMNN(5, bags, 16, 4),
}
rule = dict(lr=0.05, eps=1e-8)
for kind, make in KINDS.items():
    torch.manual_seed(1)
    shape = dict(num_embeddings=ROWS, embedding_dim=DIM)
    configs = [torchrec.EmbeddingBagConfig(name="t_" + name, feature_names=[name], **shape) for name in FEATURES]
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        theirs = torchrec.EmbeddingBagCollection(tables=configs)
        for each in configs:
            store.create_table(tierstore.TableConfig(name=each.name, feature_names=each.feature_names,
                optimizer=tierstore.optim.RowWiseAdagrad(**rule), **shape))
            store[each.name].write(torch.arange(ROWS), theirs.embedding_bags[each.name].weight)
        models = [make(theirs), make(tierstore.TieredEmbeddingBagCollection(store))]
        whole = models[0].state_dict()
        models[1].load_state_dict({name: each for name, each in whole.items() if "embedding_bags" not in name})
        dense = [[each for name, each in model.named_parameters() if "embedding_bags" not in name] for model in models]
        optimizers = [torch.optim.SGD(each, lr=0.05) for each in dense] + [RowWiseAdagrad(theirs.parameters(), **rule)]
        for step in range(6):
            lengths = torch.randint(4, (3 * 7,))
            batch = torchrec.KeyedJaggedTensor(FEATURES, torch.randint(ROWS, (int(lengths.sum()),)), lengths=lengths)
            features, target = torch.rand(7, 5), torch.rand(7)
            losses = [(model(features, batch).squeeze(1) - target).square().mean() for model in models]
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
        for each in configs:
            rows = store[each.name].read(torch.arange(ROWS))
            torch.testing.assert_close(rows, theirs.embedding_bags[each.name].weight.detach(), rtol=1e-4, atol=1e-5)
        traced = symbolic_trace(models[1], leaf_modules=["TieredEmbeddingBagCollection"])
        assert torch.equal(traced(features, batch), models[1](features, batch))
    print(kind)
"""
METRICS = """
import math, re, torch
from tierstore.metrics import Measures, Metrics
from torchrec.metrics import auc, calibration, gauc, ne
from torchrec.metrics.metrics_config import RecTaskInfo
WINDOW, BATCH, NAMES, compared, _ = 512, 64, ("click", "buy"), 0, torch.manual_seed(0)
options = {"world_size": 1, "my_rank": 0, "batch_size": BATCH, "window_size": WINDOW}
options["tasks"] = [RecTaskInfo(name=name, label_name=name, prediction_name=name, weight_name=name) for name in NAMES]
theirs = [kind(**options) for kind in (calibration.CalibrationMetric, auc.AUCMetric, gauc.GAUCMetric)]
theirs.append(ne.NEMetric(**options, include_logloss=True))
ours = Metrics(Measures(names=("log_loss", "ne", "calibration", "auc", "gauc"), labels=NAMES), window=WINDOW)
for step in range(24):
    given, weights = torch.rand(BATCH, 2).clip(1e-3, 1 - 1e-3), torch.randint(1, 9, (BATCH,)) / 8
    labels = (torch.rand(BATCH, 2) < given).float()
    ours.update(labels, torch.logit(given.double()), weights, torch.arange(BATCH) // 8 + step * BATCH)
    columns = [dict(zip(NAMES, each.T)) for each in (given, labels, weights[:, None].expand(-1, 2))]
    for each in theirs:  # its groups are sessions: rows in turn, of one batch
        each.update(**dict(zip(("predictions", "labels", "weights"), columns)), num_candidates=torch.full((8,), 8))
    own = ours.compute() if ours.is_full else {}
    for name, value in (pair for each in theirs if own for pair in each.compute().items()):
        task, scope, metric = re.fullmatch("[a-z]+-([a-z]+)[|](window|lifetime)_([a-z_]+)", name).groups()
        if metric != "gauc_num_samples":
            bits = math.log(2) if metric == "logloss" else 1
            found = own[f"{scope}_{metric.replace('logloss', 'log_loss')}/{task}"] / bits
            assert abs(found - float(value)) < 1e-6, (name, found, value)
            compared += 1
assert compared == 54, compared
"""
EXAMPLE = "import runpy; runpy.run_path('examples/from_torchrec.py')  # compares its losses with TorchRec's"


@WITH_TORCHREC
def test_rows_are_those_of_torchrec() -> None:
    assert re.fullmatch("equal\ntierstore: .*\nTorchRec: .*\n", run(CODE + EXAMPLE))


@WITH_TORCHREC
def test_metrics_are_those_of_torchrec() -> None:
    run(METRICS)


@WITH_TORCHREC
def test_models_of_torchrec_train_to_the_same_losses() -> None:
    assert run(MODELS).split() == ["DLRM", "DLRM_DCN", "DLRM_Projection", "DeepFM"]
