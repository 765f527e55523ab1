"""The trainer: the same bits whatever the tiers and the device, after any interruption; towers, and what is refused."""

import dataclasses
import json
import math
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tierstore
from tierstore.cli import entry as cli
from tierstore.dist.placement.towers import partition, similarity_of
from tierstore.errors import BudgetError, NonFiniteError, ReadOnlyError
from tierstore.metrics import Evaluation
from tierstore.models import DCNTower, DLRMTower
from tierstore.settings.sections import to_dict, to_toml
from tierstore.trace import read_trace
from tierstore.trace.recorded import is_sampled
from tierstore.train import train, trainer
from tierstore.train.build import build_model, open_data, partition_run, trace_run
from tierstore.train.checkpoint import require_resumable, restore_run
from tierstore.train.config import ConfigError, DataSection, RunConfig, load

from .runs import TEST_ROWS, TOWERS, TRAIN_ROWS, clicks, config_of

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


def stop_after(monkeypatch, step, stop):
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


@pytest.mark.parametrize("seed", [1, 4, 6, 7])
def test_tiers_threads_commits_and_interruptions_change_no_bit(run, unbroken, monkeypatch, seed):
    draw = random.Random(seed)
    optimizers = OPTIMIZERS[seed % len(OPTIMIZERS)]
    policy, commit_every = POLICIES[seed % len(POLICIES)], draw.choice([0, 7, 9])
    settings = {"store__ddr": FITS_NOTHING if policy in POLICIES[:3] else "440KiB", "store__policy": policy}
    settings |= {"store__threads": draw.choice([1, 3]), "train__commit_every": commit_every, **optimizers}
    settings["train__prefetch_depth"] = 2 if policy in POLICIES[3:] else draw.choice([0, 1, 2, 5])
    how, step = draw.choice(["", "ctrl-c", "ctrl-c", "crash"]), draw.choice([1, 9, 10, 11, 13, STEPS])
    done, expected = 0, unbroken(**optimizers)
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
    assert (summary.bits, summary.test, summary.step) == (expected.bits, expected.test, STEPS)
    epochs, steps_more = divmod(done, STEPS // 2)
    assert summary.rows == (2 - epochs) * TRAIN_ROWS - 32 * steps_more
    assert how or (summary.loss == expected.loss and summary.tiers.ddr.evictions > 0)


DYNAMIC = {"data__hashing": "none", "embedding__ids": "dynamic", "embedding__num_embeddings": 20}
HESSIAN_FREE = {"optimizer__dense": "hessian-free", "optimizer__curvature_products": 6, "optimizer__warmup_steps": 3}
WAYS = [
    *(DYNAMIC | {"embedding__admit_after": 2, "embedding__evict": evict} for evict in ("lru", "lfu")),
    *(HESSIAN_FREE | {"optimizer__curvature": curvature} for curvature in ("hessian", "gauss-newton")),
    *({"model__towers": TOWERS, "model__interaction": interaction} for interaction in ("dot", "dcn")),
]


@pytest.mark.parametrize("settings", WAYS, ids=lambda settings: str([*settings.values()][-1]))
def test_other_ways_of_training_go_on_to_the_same_bits(run, unbroken, monkeypatch, settings):
    """Dynamic ids are more categories than rows: admitted, counted and evicted all the time."""
    settings = settings | {"train__commit_every": 4}
    whole = run("whole", train__prefetch_depth=0, **settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 11, crash)
        with pytest.raises(CrashError):
            run("parts", **settings)
    resumed = run("parts", resume=True, store__ddr="440KiB", **settings)
    assert (resumed.bits, resumed.test, resumed.step) == (whole.bits, whole.test, STEPS)
    assert whole.bits != unbroken().bits


def spoil_weights(optimizer, *_):
    for each in optimizer.param_groups[0]["params"]:
        each.data.fill_(math.inf)


SPOILT = {
    r"not finite: source 'gradient', table 'C1', id \d+, feature 'C1', sample 0, update 8\.": (
        trainer,
        "training_loss",
    ),
    "model": (torch.optim.Adagrad, "step"),
}


@pytest.mark.parametrize("found", SPOILT)
def test_a_run_ends_at_what_is_not_finite_and_goes_on_from_its_last_commit(run, unbroken, monkeypatch, found):
    by = {"step": spoil_weights, "training_loss": lambda logits, *_: logits.sum() * math.nan}
    settings = {"train__commit_every": 4, "train__check_finite": "error"}
    with monkeypatch.context() as patch:
        stop_after(patch, 8, lambda: patch.setattr(*SPOILT[found], by[SPOILT[found][1]]))
        with pytest.raises(NonFiniteError, match=rf"^step 8: {found}.* go on from version 1 with --resume"):
            run(**settings)
    assert run(resume=True, **settings).bits == unbroken().bits


def test_a_buffer_may_hold_infinity_but_not_nan(run):
    settings = {"model__class": "tests.train.nets:Masked", "train__check_finite": "error", "train__epochs": 1}
    assert run(**settings).version
    with pytest.raises(NonFiniteError, match=r"model.mask is not finite"):
        run("nan", **settings, model__args={"value": math.nan})


def test_a_second_ctrl_c_stops_at_once(run, monkeypatch):
    stop_after(monkeypatch, 3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_resuming_a_finished_run_evaluates_it_and_more_epochs_go_on(run, unbroken):
    one = run(train__epochs=1)
    again = run(train__epochs=1, resume=True)
    assert (again.rows, again.seconds > 0, again.loss) == (0, True, None)
    lines = again.describe().splitlines()
    assert lines[0].split("  ")[-1].strip() == "nothing: complete after 1 epoch; --epochs 2 goes on"
    assert [line.split()[0] for line in lines[1:]] == ["test", "test", "bits", "store"]
    assert (again.bits, again.test, again.version) == (one.bits, one.test, one.version)
    assert run(train__epochs=2, resume=True).bits == unbroken().bits


def test_a_run_from_before_a_key_has_its_default():
    saved = to_dict(RunConfig())
    del saved["data"]["max_list_length"]
    store = SimpleNamespace(version=1, tables={}, extra={"tierstore.train": {"config": saved}}, directory="old")
    require_resumable(store, RunConfig())
    with pytest.raises(ValueError, match=r"old was trained with data\.max_list_length = 0, not 5\. "):
        require_resumable(store, RunConfig(data=DataSection(max_list_length=5)))


def test_what_a_store_holds_already_is_not_overwritten(folder, run):
    train(config_of(folder, "own", train__epochs=1))
    run(train__epochs=1)
    with pytest.raises(ValueError, match=r"holds a run already: continue it with --resume, or .* --store"):
        run(train__epochs=1)
    with pytest.raises(ValueError, match=r"optimizer\.dense_lr = 0\.02, not 0\.5; train\.seed = 0, not 1"):
        run(resume=True, optimizer__dense_lr=0.5, train__seed=1)
    with pytest.raises(ValueError, match=r"embedding\.dim = 4, not 8; model\.towers"):
        run(resume=True, embedding__dim=8, model__towers=TOWERS)
    config = config_of(folder, "foreign")
    with tierstore.open(config.store.path, mode="w", ddr="16MiB") as store:
        store.commit(extra={"mine": 1})
    with pytest.raises(ValueError, match="was not written by tierstore train"):
        train(config, resume=True)
    tierstore.quantize(folder / "own", folder / "new", dtype="float16")
    for resume in (True, False):
        with pytest.raises(ReadOnlyError, match=r"float16 rows, .* float32.* train the store that it was quantized"):
            train(config_of(folder, "new"), resume=resume)


def test_a_broken_line_surfaces_and_what_was_committed_stands(folder, run, unbroken):
    lines, broken = clicks(folder).read_text().splitlines(keepends=True), folder / "broken.tsv"
    broken.write_text("".join([*lines[:200], "hello\n", *lines[201:]]))
    with pytest.raises(ValueError, match=r"broken\.tsv, line 201: 1 tab-separated columns"):
        run(data__path=str(broken), train__commit_every=1)
    broken.write_text("".join(lines))
    # Prefetching may have met the broken line while earlier batches were still to be trained on.
    resumed = run(data__path=str(broken), data__check_files=False, train__commit_every=1, resume=True)
    assert 0 < resumed.rows < 2 * TRAIN_ROWS
    assert resumed.bits == unbroken().bits


def test_too_few_rows_and_no_rows_are_errors(folder, run):
    short, none = folder / "short-npy", folder / "none.tsv"
    short.mkdir()
    none.write_text("")
    for name, shape in {"label": 3, "dense": (3, 13), "sparse": (3, 26)}.items():
        np.save(short / f"{name}.npy", np.zeros(shape))
    reason = r"ends before row .*; training is committed as version \d+: lower data\.test_rows"
    with pytest.raises(ValueError, match=reason):
        run("short", data__test_rows=TEST_ROWS + 1)
    assert run("short", data__test_rows=TEST_ROWS, resume=True).test.rows == TEST_ROWS
    made = set(folder.iterdir())
    for path, rows, changes, reason in (
        (clicks(folder), (401, 0), {}, r"clicks\.tsv ends before row 401"),
        (short, (400, 1), {}, r"has 3 rows; data\.train_rows \+ data\.test_rows = 400 \+ 1 are more"),
        (none, (0, 0), {}, r"none\.tsv has no rows to train on"),
        ("", (0, 0), {}, r"no data\.path; give the data with --data"),
        (clicks(folder), (0, 0), {"store__ddr": 1000}, "ddr"),
    ):
        with pytest.raises((ValueError, BudgetError), match=reason):
            run("never", data__path=str(path), data__train_rows=rows[0], data__test_rows=rows[1], **changes)
        assert set(folder.iterdir()) == made, "what was refused left no store behind"
    every = run("every", data__train_rows=0, data__test_rows=0, train__epochs=1)
    assert (every.rows, every.test) == (TRAIN_ROWS + TEST_ROWS, None)


def test_the_summary_is_json(run, tmp_path):
    summary = run(store__ddr=FITS_NOTHING)
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["rows"], written["step"]) == (2 * TRAIN_ROWS, STEPS)
    assert written["test"] == {"rows": summary.test.rows, **summary.test.figures}
    assert written["tiers"]["ddr"]["hit_rate"] == summary.tiers.ddr.hit_rate
    assert written["tiers"]["ddr"]["bytes"] <= FITS_NOTHING
    assert written["samples_per_second"] == pytest.approx(written["rows"] / written["seconds"])
    assert written["end_bytes"] > 0
    assert summary.bits in summary.describe()
    undefined = dataclasses.replace(summary, test=Evaluation(1, math.nan, 0.5, {"auc": math.nan}))
    assert undefined.to_dict()["test"]["auc"] is None


def test_bits_tell_any_change_of_a_row_or_weight(folder):
    with tierstore.open(folder / "seeded", mode="w", ddr="16MiB") as store:
        seeded = trainer.digest_bits(trainer.build_run(config_of(folder, "seeded", train__seed=1), store))
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
        digests += [trainer.digest_bits(built) for _ in range(2)]
    assert len({*digests, seeded}) == 4
    assert digests[2] == digests[3]


SCHEDULE = {"optimizer__warmup_steps": 4, "optimizer__decay": "cosine", "optimizer__decay_steps": 10}
SCHEDULE |= {"optimizer__decay_to": 0.25, "optimizer__dense_clip_norm": 0.05}


def test_rates_rise_and_fall_and_dense_gradients_are_cut(run, monkeypatch):
    told, real = [], trainer.train_step

    def watched(own, *given):
        result = real(own, *given)
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


def test_a_test_file_is_evaluated_on_after_each_epoch(folder, run, capsys):
    """Whose rows are those after the training rows, the figures are the same; and so are the bits of the run."""
    lines = clicks(folder).read_bytes().splitlines(keepends=True)
    (folder / "train.tsv").write_bytes(b"".join(lines[:TRAIN_ROWS]))
    (folder / "test.tsv").write_bytes(b"".join(lines[TRAIN_ROWS:]))
    after = run("after")
    config = config_of(folder, "none", store__path=after.store)
    reader, hasher = open_data(config)
    (test,) = reader.batches(hasher, batch_size=TEST_ROWS, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + TEST_ROWS)
    with tierstore.open(after.store, ddr="16MiB") as store, torch.no_grad():
        built = trainer.build_run(config, store)
        restore_run(built)
        logits = built.model(test.dense, test.sparse)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, test.labels)
    assert after.test.log_loss == pytest.approx(loss.item(), abs=1e-6)
    files = {"data__path": str(folder / "train.tsv"), "data__test_path": str(folder / "test.tsv")}
    own = run("own", data__train_rows=0, data__test_rows=0, train__test_each_epoch=True, **files)
    assert (own.test, own.bits) == (after.test, after.bits)
    first = run("first", train__epochs=1).test
    said = capsys.readouterr().err
    assert said.count("tested") == 2
    for epoch, test in ((1, first), (2, after.test)):
        figures = f"AUC {test.auc:.4f}, log loss {test.log_loss:.4f}"
        assert f"epoch {epoch}: tested {TEST_ROWS} rows, {figures}" in said
    with pytest.raises(ValueError, match=r"test\.tsv ends before row"):
        run("short", data__test_rows=TEST_ROWS + 1, **files)


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_a_run_is_recorded_and_the_same(folder, run, unbroken, tmp_path, rate):
    """All epochs, then the rows it is tested on; not the digest, which reads every row."""
    path = tmp_path / "lookups.npz"
    summary = run(store__record=str(path), store__record_rate=rate)
    assert summary.bits == unbroken().bits
    found, read = read_trace(path), trace_run(config_of(folder, "none"), rows=TRAIN_ROWS + TEST_ROWS)
    assert list(found.tables) == list(read.tables)
    for index, (name, table) in enumerate(read.tables.items()):
        trained, tested = np.split(table.ids, table.offsets[[TRAIN_ROWS]])
        ids = np.concatenate([trained, trained, tested])
        assert np.array_equal(found.tables[name].ids, ids[is_sampled(index << 40 | ids, rate)])
    assert (found.num_samples, found.sampling_rate) == (2 * TRAIN_ROWS + TEST_ROWS, rate)
    assert f"{found.num_lookups:,} lookups of {100 * rate:g} % of the rows" in summary.recorded
    assert summary.recorded in summary.describe()


FEW, ALL = 26_000, "1MiB"
"""Device memory for about a batch's rows, and for all there are."""


@pytest.mark.parametrize(("first", "then", "depth"), [(FEW, FEW, 0), (0, FEW, 5), (ALL, 0, 2)])
def test_rows_in_device_memory_and_another_budget_change_no_bit(run, unbroken, first, then, depth):
    begun = run(store__hbm=first, train__prefetch_depth=depth, train__epochs=1, train__commit_every=7)
    summary = run(store__hbm=then, train__prefetch_depth=depth, resume=True)
    assert (summary.bits, summary.test) == (unbroken().bits, unbroken().test)
    assert begun.bits != summary.bits
    assert (begun.tiers.hbm.evictions > 0) == (first == FEW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_machine_without_cuda_says_so(folder, tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(config_of(folder, "never")))
    assert cli.main(["train", str(run_file), "--hbm", "1MiB", "--set", "store.device=cuda:0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tierstore: device='cuda")
    assert "CUDA" in error


@pytest.mark.gpu
def test_on_a_gpu_budgets_and_depths_change_no_bit(run):
    whole = run("whole", store__device="cuda", store__hbm=ALL, train__prefetch_depth=0)
    for depth in (0, 2, 5):
        summary = run(f"few {depth}", store__device="cuda", store__hbm=FEW, train__prefetch_depth=depth)
        assert (summary.bits, summary.test, summary.loss) == (whole.bits, whole.test, whole.loss)
        assert whole.tiers.hbm.evictions == 0 < summary.tiers.hbm.evictions


class Tables(torch.nn.Module):
    def embedding_bag_configs(self):
        return [tierstore.TableConfig(name=f"C{i}", num_embeddings=9, embedding_dim=4) for i in range(1, 27)]


@pytest.mark.parametrize("compression", [1.0, 4.0, 1000.0])
def test_keys_decide_the_modules(folder, compression):
    keys = {"model__towers": TOWERS, "model__tower_compression": compression, "model__tower_per_feature": 1}
    dim = max(1, round(26 * 4 / (compression * (26 + 3 * 2))))
    for kind, module, widths, out in (
        ("dot", DLRMTower, [dim * (size + 2) for size in (9, 9, 8)], dim + 33 * 32 // 2),
        ("dcn", DCNTower, own := [max(1, round(size * 4 / compression)) for size in (9, 9, 8)], 4 + sum(own)),
    ):
        model = build_model(config_of(folder, "x", **keys, model__tower_flat=2, model__interaction=kind), Tables())
        assert [type(each) for each in model.embeddings.towers] == [module] * 3
        assert (model.embeddings.widths, model.interaction.out_features) == (widths, out)


def test_a_file_of_towers_is_part_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "towers.json").write_text(json.dumps({"towers": TOWERS}))
    (tmp_path / "run.toml").write_text('[model]\ntowers = "towers.json"\n')
    config = load("run.toml")
    assert config.model.towers == tuple(map(tuple, TOWERS))
    (tmp_path / "again.toml").write_text(to_toml(config))
    for wrong in ("{}", "[]", '{"towers": [1]}', '{"towers": [], "x": 1}', "{"):
        (tmp_path / "towers.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"model\.towers"):
            load("run.toml")
    assert load("again.toml") == config


def test_towers_are_of_the_vectors_of_the_runs_last_commit(folder, run):
    summary = run()
    config = config_of(folder, "none", store__path=summary.store)
    columns, (reader, hasher) = list(config.data.sparse_columns), open_data(config)
    (batch,) = reader.batches(hasher, batch_size=40, stop_row=40)
    lookups = [len(ids.values()) for ids in batch.sparse.to_dict().values()]
    with tierstore.open(summary.store, mode="r", ddr="8MiB") as store:
        vectors = tierstore.TieredEmbeddingBagCollection(store, tables=columns)(batch.sparse).values()
    similarity = similarity_of([vectors.detach().view(40, 26, 4)], columns)
    expected = partition(columns, similarity, np.stack([lookups, np.ones(26)], axis=1), 3)
    assert partition_run(config, 3, rows=40) == expected
