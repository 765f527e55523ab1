"""The recipes of docs/frameworks.md, in the frameworks: step for step as ``nn.EmbeddingBag``; needs ``make peers``."""

import re
import sys
from pathlib import Path

import pytest

import tierstore
from bench.data import examples
from tests.peers.process import PEERS, run
from tierstore.pool.stats import IdStats, TierStats

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
