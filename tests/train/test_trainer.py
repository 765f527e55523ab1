"""The trainer: the same bits whatever the tiers, after any interruption, and the numbers that plain torch gives."""

import dataclasses
import json
import math
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tierstore
from tierstore.errors import BudgetError, ReadOnlyError
from tierstore.models import DLRM
from tierstore.trace import read_trace
from tierstore.trace.sampling import is_sampled
from tierstore.train import train, trainer
from tierstore.train.build import open_data, trace_run
from tierstore.train.metrics import Evaluation, roc_auc
from tierstore.train.trainer import train_step

from .runs import TEST_ROWS, TRAIN_ROWS, clicks, config_of

STEPS = 2 * math.ceil(TRAIN_ROWS / 32)
FITS_NOTHING = 424_000
"""Bytes: write staging and a few rows more than one batch."""


@pytest.fixture(scope="module")
def unbroken(folder):
    """The summary of the run that everything is compared with, and of variants of it."""
    summaries = {}

    def get(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in summaries:
            summaries[key] = train(config_of(folder, f"unbroken-{len(summaries)}", **changes), bits=True)
        return summaries[key]

    return get


def test_the_seed_and_the_model_change_the_bits(unbroken):
    digests = {unbroken().bits, unbroken(train__seed=1).bits, unbroken(model__interaction="dcn").bits}
    assert len(digests) == 3


def stop_after(monkeypatch, step, stop):
    """Call ``stop`` in the middle of a run's n-th step."""
    steps = iter(range(1, 1_000_000))
    real_step = trainer.train_step

    def stopping_step(*arguments):
        if next(steps) == step:
            stop()
        return real_step(*arguments)

    monkeypatch.setattr(trainer, "train_step", stopping_step)


class CrashError(Exception):
    pass


def crash():
    raise CrashError


OPTIMIZERS = [
    {},
    {"optimizer__sparse": "sgd", "optimizer__dense": "sgd"},
    {"optimizer__sparse": "adagrad", "optimizer__dense": "adam", "optimizer__dense_lr": 0.001},
    {"optimizer__sparse": "adam", "optimizer__sparse_lr": 0.001, "optimizer__sparse_weight_decay": 1e-4},
]
POLICIES = ["lru", "lfu", "auto", "tinylfu"]


@pytest.mark.parametrize("seed", range(8))
def test_tiers_threads_commits_and_interruptions_change_no_bit(run, unbroken, monkeypatch, seed):
    """Any of them together: the run ends in the bits, the test figures and the loss of one that had none."""
    draw = random.Random(seed)
    optimizers = OPTIMIZERS[seed % len(OPTIMIZERS)]
    policy, commit_every = POLICIES[seed % len(POLICIES)], draw.choice([0, 7, 9])
    settings = {"store__ddr": FITS_NOTHING if policy in POLICIES[:3] else "440KiB", "store__policy": policy}
    settings |= {"store__threads": draw.choice([1, 3]), "train__commit_every": commit_every, **optimizers}
    settings["train__prefetch_depth"] = 2 if policy in POLICIES[3:] else draw.choice([0, 1, 2, 5])
    how, step = draw.choice(["", "ctrl-c", "ctrl-c", "crash"]), draw.choice([1, 9, 10, 11, 13, STEPS])
    done = 0
    with monkeypatch.context() as patch:
        if how == "crash":
            stop_after(patch, step, crash)
            with pytest.raises(CrashError):
                run(**settings)
            done = (step - 1) // commit_every * commit_every if commit_every else 0
        elif how:
            stop_after(patch, step, lambda: signal.raise_signal(signal.SIGINT))
            stopped = run(**settings)
            assert (stopped.step, stopped.test, stopped.interrupted) == (step, None, True)
            done = step
    summary = run(resume=True, **settings)
    expected = unbroken(**optimizers)
    assert (summary.bits, summary.test, summary.step) == (expected.bits, expected.test, STEPS)
    epochs, steps_more = divmod(done, STEPS // 2)
    assert summary.rows == (2 - epochs) * TRAIN_ROWS - 32 * steps_more
    assert how or (summary.loss == expected.loss and summary.tiers.ddr.evictions > 0)


def test_a_second_ctrl_c_stops_at_once(run, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    stop_after(monkeypatch, 3, twice)
    # A shell that starts tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_resuming_a_finished_run_evaluates_it_and_more_epochs_go_on(run, unbroken):
    one = run(train__epochs=1)
    again = run(train__epochs=1, resume=True)
    assert (again.rows, again.seconds > 0, again.loss) == (0, True, None)
    lines = again.describe().splitlines()
    assert lines[0].split("  ")[-1].strip() == "nothing: complete after 1 epoch; --epochs 2 goes on"
    assert [line.split()[0] for line in lines[1:]] == ["test", "test", "bits", "store"]
    assert (again.bits, again.test, again.version) == (one.bits, one.test, one.version)
    assert run(train__epochs=2, resume=True).bits == unbroken().bits


def test_what_a_store_holds_already_is_not_overwritten(folder, run):
    run(train__epochs=1)
    with pytest.raises(ValueError, match=r"holds a run already: continue it with --resume, or .* --store"):
        run(train__epochs=1)
    with pytest.raises(ValueError, match=r"optimizer\.dense_lr = 0\.02, not 0\.5; train\.seed = 0, not 1"):
        run(resume=True, optimizer__dense_lr=0.5, train__seed=1)
    with pytest.raises(ValueError, match=r"embedding\.dim = 4, not 8"):
        run(resume=True, embedding__dim=8)
    config = config_of(folder, "foreign")
    with tierstore.open(config.store.path, mode="w", ddr="16MiB") as store:
        store.commit(extra={"mine": 1})
    with pytest.raises(ValueError, match="was not written by tierstore train"):
        train(config, resume=True)


@pytest.mark.parametrize(("dtype", "resume"), [("int8", True), ("float16", True), ("int8", False)])
def test_a_quantized_store_names_what_to_train(folder, tmp_path, run, dtype, resume):
    tierstore.quantize(run(train__epochs=1).store, tmp_path / "new", dtype=dtype)
    with pytest.raises(ReadOnlyError, match=f"{dtype} rows, .* float32.* train the store that it was quantized from"):
        train(config_of(folder, "", store__path=str(tmp_path / "new")), resume=resume)


def test_a_broken_line_surfaces_and_what_was_committed_stands(folder, run, unbroken):
    lines = (folder / "clicks.tsv").read_text().splitlines(keepends=True)
    broken = folder / "broken.tsv"
    broken.write_text("".join([*lines[:200], "hello\n", *lines[201:]]))
    with pytest.raises(ValueError, match=r"broken\.tsv, line 201: 1 tab-separated columns"):
        run(data__path=str(broken), train__commit_every=1)
    broken.write_text("".join(lines))
    # Prefetching may have met the broken line while earlier batches were still to be trained on.
    resumed = run(data__path=str(broken), data__check_files=False, train__commit_every=1, resume=True)
    assert 0 < resumed.rows < 2 * TRAIN_ROWS
    assert resumed.bits == unbroken().bits


def _short(folder):
    short = folder / "short-npy"
    short.mkdir(exist_ok=True)
    for name, array in {"label": np.zeros(3), "dense": np.zeros((3, 13)), "sparse": np.zeros((3, 26))}.items():
        np.save(short / f"{name}.npy", array)
    return short


def test_too_few_rows_and_no_rows_are_errors(folder, run):
    with pytest.raises(ValueError, match=r"clicks\.tsv ends before row 401"):
        run("long", data__train_rows=401, data__test_rows=0)
    with pytest.raises(
        ValueError, match=r"ends before row .*; training is committed as version \d+: lower data\.test_rows"
    ):
        run("short", data__test_rows=TEST_ROWS + 1)
    assert run("short", data__test_rows=TEST_ROWS, resume=True).test.rows == TEST_ROWS
    with pytest.raises(ValueError, match=r"has 3 rows; data\.train_rows \+ data\.test_rows = 400 \+ 1 are more"):
        run("never", data__path=str(_short(folder)), data__train_rows=400, data__test_rows=1)
    assert not (folder / "never").exists()
    (folder / "none.tsv").write_text("")
    with pytest.raises(ValueError, match=r"none\.tsv has no rows to train on"):
        run("none", data__path=str(folder / "none.tsv"), data__train_rows=0, data__test_rows=0)
    with pytest.raises(ValueError, match=r"no data\.path; give the data with --data"):
        run("no path", data__path="")
    made = {path.name.split("-")[-1] for path in folder.iterdir()}
    assert "short" in made
    with pytest.raises(BudgetError):
        run("small", store__ddr=1000)
    assert {path.name.split("-")[-1] for path in folder.iterdir()} == made  # what was refused left no store behind
    assert not made & {"long", "none", "no path"}
    every = run("every", data__train_rows=0, data__test_rows=0, train__epochs=1)
    assert (every.rows, every.test) == (TRAIN_ROWS + TEST_ROWS, None)


class PlainTables(nn.Module):
    """A collection's twin from ``torch.nn.EmbeddingBag`` with the same first rows."""

    def __init__(self, store):
        super().__init__()
        self.bags = nn.ModuleDict()
        for name, table in store.tables.items():
            rows = table.read(torch.arange(table.config.num_embeddings))
            self.bags[name] = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum", include_last_offset=True)

    class Pooled:
        def __init__(self, values):
            self._values = values

        def values(self):
            return self._values

    def forward(self, sparse):
        offsets, size = sparse.offsets(), sparse.stride()
        columns = []
        for i, key in enumerate(sparse.keys()):
            bounds = offsets[i * size : (i + 1) * size + 1]
            columns.append(self.bags[key](sparse.values()[bounds[0] : bounds[-1]], bounds - bounds[0]))
        return self.Pooled(torch.cat(columns, dim=1))


def test_training_is_what_plain_torch_does(folder, run):
    settings = {"optimizer__sparse": "sgd", "optimizer__sparse_lr": 0.5, "optimizer__dense": "sgd"}
    config = config_of(folder, "twin", **settings)
    with tierstore.open(config.store.path, mode="w", ddr="16MiB") as store:
        for table in trainer.build_run(config, store).store.tables:
            assert table in config.data.sparse_columns
        tables = PlainTables(store)
    torch.manual_seed(config.train.seed)
    model = DLRM(tables, num_features=26, embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]
    optimizer = torch.optim.SGD(
        [{"params": dense, "lr": config.optimizer.dense_lr}, {"params": tables.parameters(), "lr": 0.5}]
    )
    reader, hasher = open_data(config)
    for _ in range(config.train.epochs):
        for batch in reader.batches(hasher, batch_size=32, stop_row=TRAIN_ROWS):
            optimizer.zero_grad()
            logits = model(batch.dense, batch.sparse)
            nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            optimizer.step()
    with torch.no_grad():
        (test,) = reader.batches(hasher, batch_size=TEST_ROWS, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + TEST_ROWS)
        logits = model(test.dense, test.sparse)
    summary = run(**settings)
    expected = nn.functional.binary_cross_entropy_with_logits(logits, test.labels).item()
    assert summary.test.log_loss == pytest.approx(expected, abs=1e-5)
    assert summary.test.auc == pytest.approx(roc_auc(test.labels.numpy(), logits.numpy()), abs=1e-3)
    with tierstore.open(summary.store, mode="r", ddr="16MiB") as store:
        for name, bag in tables.bags.items():
            rows = store[name].read(torch.arange(150))
            torch.testing.assert_close(rows, bag.weight.detach(), rtol=1e-4, atol=1e-5)


def test_the_summary_is_json_and_says_what_was_done(run, tmp_path):
    summary = run(store__ddr=FITS_NOTHING)
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["rows"] == 2 * TRAIN_ROWS
    assert written["step"] == STEPS
    assert written["test"] == summary.test._asdict()
    assert written["tiers"]["ddr"]["hit_rate"] == summary.tiers.ddr.hit_rate
    assert written["tiers"]["ddr"]["bytes"] <= FITS_NOTHING
    assert written["samples_per_second"] == pytest.approx(written["rows"] / written["seconds"])
    assert written["start_bytes"] > 0
    assert written["end_bytes"] <= written["peak_rss_bytes"]
    described = summary.describe()
    assert summary.bits in described
    assert f"{summary.test.auc:.6f}" in described
    undefined = dataclasses.replace(summary, test=Evaluation(rows=1, auc=math.nan, log_loss=0.5))
    assert undefined.to_dict()["test"]["auc"] is None


def test_bits_tell_any_change_of_a_row_or_weight(folder):
    config = config_of(folder, "bits")
    with tierstore.open(config.store.path, mode="w", ddr="16MiB") as store:
        built = trainer.build_run(config, store)
        digests = [trainer.digest_bits(built)]
        row = store["C26"].read(torch.tensor([149]))
        row[0, 3] = np.nextafter(row[0, 3].item(), 1, dtype=np.float32).item()
        store["C26"].write(torch.tensor([149]), row)
        digests.append(trainer.digest_bits(built))
        with torch.no_grad():
            built.model.top[-1].bias += 1
        digests.append(trainer.digest_bits(built))
        digests.append(trainer.digest_bits(built))
    assert len(set(digests)) == 3
    assert digests[2] == digests[3]


SCHEDULE = {
    "optimizer__warmup_steps": 4,
    "optimizer__decay": "cosine",
    "optimizer__decay_steps": 10,
    "optimizer__decay_to": 0.25,
    "optimizer__dense_clip_norm": 0.05,
}


def test_rates_rise_and_fall_and_dense_gradients_are_cut(run, monkeypatch):
    """Each step's, and a run that was continued ends in the bits of one that was not."""
    told = []

    def watched(own, batch, wants_stop):
        result = train_step(own, batch, wants_stop)
        rates = {table.learning_rate for table in own.store.tables.values()}
        norm = torch.stack([each.grad.norm() for each in own.model.dense_parameters().values()]).norm().item()
        told.append((*rates, own.optimizer.param_groups[0]["lr"], norm))
        return result

    monkeypatch.setattr(trainer, "train_step", watched)
    whole = run("whole", **SCHEDULE)
    sparse, dense, norms = (list(each) for each in zip(*told, strict=True))
    expected = [min(1, (step + 1) / 4) for step in range(4)]
    expected += [0.25 + 0.75 * (1 + math.cos(math.pi * min(step, 10) / 10)) / 2 for step in range(STEPS - 4)]
    assert sparse == pytest.approx([0.02 * share for share in expected])
    assert dense == pytest.approx(sparse)
    assert max(norms) <= 0.05 * (1 + 1e-5)
    assert run("parts", train__epochs=1, **SCHEDULE).bits != whole.bits
    assert run("parts", resume=True, **SCHEDULE).bits == whole.bits
    told.clear()
    run("uncut", **SCHEDULE | {"optimizer__dense_clip_norm": 0})
    assert max(norm for *_, norm in told) > 0.05
    with pytest.raises(ValueError, match=r"optimizer\.decay_steps = 0: expected 1 or more"):
        run("never", optimizer__decay="linear")


def test_a_test_file_is_evaluated_on_after_each_epoch(folder, run, capsys):
    """Whose rows are those after the training rows, the figures are the same; and so are the bits of the run."""
    lines = clicks(folder).read_bytes().splitlines(keepends=True)
    (folder / "train.tsv").write_bytes(b"".join(lines[:TRAIN_ROWS]))
    (folder / "test.tsv").write_bytes(b"".join(lines[TRAIN_ROWS:]))
    after = run("after")
    files = {"data__path": str(folder / "train.tsv"), "data__test_path": str(folder / "test.tsv")}
    own = run("own", data__train_rows=0, data__test_rows=0, train__test_each_epoch=True, **files)
    assert (own.test, own.bits) == (after.test, after.bits)
    first = run("first", train__epochs=1).test
    told = [line for line in capsys.readouterr().err.splitlines() if "tested" in line]
    assert len(told) == 2
    for epoch, test in ((1, first), (2, after.test)):
        assert (
            f"epoch {epoch}: tested {TEST_ROWS} rows, AUC {test.auc:.4f}, log loss {test.log_loss:.4f}"
            in told[epoch - 1]
        )
    with pytest.raises(ValueError, match=r"test\.tsv ends before row"):
        run("short", data__test_rows=TEST_ROWS + 1, **files)


EPOCHS = 2


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_a_run_is_recorded_and_the_same(tmp_path: Path, rate: float) -> None:
    """All epochs, then the rows it is tested on; not the digest, which reads every row."""
    path = tmp_path / "lookups.npz"
    config = config_of(tmp_path, "recorded", store__record=str(path), store__record_rate=rate, train__epochs=EPOCHS)
    summary = train(config, bits=True)
    assert summary.bits == train(config_of(tmp_path, "plain", train__epochs=EPOCHS), bits=True).bits
    found, read = read_trace(path), trace_run(config, rows=TRAIN_ROWS + TEST_ROWS)
    assert list(found.tables) == list(read.tables)
    for index, (name, table) in enumerate(read.tables.items()):
        trained, tested = np.split(table.ids, table.offsets[[TRAIN_ROWS]])
        ids = np.concatenate([*[trained] * EPOCHS, tested])
        assert np.array_equal(found.tables[name].ids, ids[is_sampled(index << 40 | ids, rate)])
    rows = EPOCHS * TRAIN_ROWS + TEST_ROWS
    assert (found.num_samples, found.sampling_rate) == (rows, rate)
    assert summary.recorded is not None
    assert f"{found.num_lookups:,} lookups of {100 * rate:g} % of the rows" in summary.recorded
    assert summary.recorded in summary.describe()


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_run_with_dynamic_ids_goes_on_to_the_same_bits(run, monkeypatch, evict):
    """More categories than rows: ids are admitted, counted and evicted all the time."""
    settings = {"data__hashing": "none", "embedding__ids": "dynamic", "embedding__num_embeddings": 20}
    settings |= {"embedding__admit_after": 2, "embedding__evict": evict, "train__commit_every": 4}
    whole = run("whole", train__prefetch_depth=0, **settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 11, crash)
        with pytest.raises(CrashError):
            run("parts", **settings)
    resumed = run("parts", resume=True, store__ddr="440KiB", **settings)
    assert (resumed.bits, resumed.test) == (whole.bits, whole.test)
    with pytest.raises(ValueError, match=r"data\.hashing"):
        run("never", embedding__ids="dynamic")
