"""Beyond a DLRM of one label: a model class, keys of tables, labels and weights, shuffled rows, tests that end a run or
choose its version, and what a run reports."""

import json
import math
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from itertools import chain
from types import SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import tierstore
from tests.serve.models.stores import asked
from tests.train import nets
from tests.train.nets import REPORTED
from tierstore.metrics import Measures, MetricName, Metrics, evaluate, training_loss
from tierstore.serve.messages import InferTensor
from tierstore.serve.models import Models
from tierstore.train import ConfigError
from tierstore.train.build import build_model, open_data, reader_of_epoch
from tierstore.train.checkpoint import Position, saved_config
from tierstore.train.config import ModelSection, RunConfig
from tierstore.train.readers import DataError

from .readers.rows import bags, category_of
from .runs import config_of
from .test_trainer import CrashError, crash, stop_after

ROWS, NAMES = 96, get_args(MetricName)
TABLES = {"C1": {"dim": 6, "pooling": "mean"}, "C2": {"sparse": "sgd", "sparse_lr": 0.5, "init_range": 0.0}}
NET = {"model__class": "tests.train.nets:Net", "optimizer__warmup_steps": 4}
SETTINGS = {
    "class": NET | {"embedding__tables": TABLES, "embedding__dim": 3},
    "shuffled": {"data__shuffle_rows": 96},
    "tests": {"train__test_every_steps": 3, "train__patience": 3, "train__keep_best": True},
}
SETTINGS["tests"]["optimizer__sparse_lr"] = 0.3


def resumed(run, monkeypatch, step, settings):
    with monkeypatch.context() as patch:
        stop_after(patch, step, crash)
        with pytest.raises(CrashError):
            run("parts", **settings)
    return run("parts", resume=True, store__ddr="480KiB", **settings)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_killed_run_goes_on_to_the_same_bits(run, monkeypatch, kind):
    settings = SETTINGS[kind] | {"train__commit_every": 4}
    whole, plain = run("whole", train__prefetch_depth=0, **settings), run("plain")
    again = resumed(run, monkeypatch, 11, settings)
    assert (again.bits, again.test, again.step) == (whole.bits, whole.test, whole.step)
    assert whole.bits != plain.bits
    with pytest.raises(ValueError, match=r"trained with (embedding|data|model|train|optimizer)\."):
        run("plain", resume=True, **settings)


def test_a_class_has_tables_of_their_own_keys_and_is_committed_whole(run):
    summary = run(**SETTINGS["class"])
    with tierstore.open(summary.store, mode="r") as store:
        found = [(store[name].config.embedding_dim, store[name].config.pooling) for name in ("C1", "C2")]
        assert found == [(6, "mean"), (3, "sum")]
        assert (store["C2"].config.optimizer, store["C2"].learning_rate) == (tierstore.optim.SGD(lr=0.5), 0.5)
        assert "ranking" not in Models(store).by_name
        assert {"model.score.0.weight", "model.score.1.running_mean"} < store.tensors().keys()  # which --model takes
    for changes, message in (
        ({"model__class": "tests.train.nets"}, r"model\.class = .* has no attribute ''; give package\.module:name"),
        ({"model__class": ".nets:Net"}, r"model\.class = '\.nets:Net' cannot be imported: "),
        ({"model__class": "tests.train.nets:REPORTED"}, r"model\.class = .* is of type list; name a class"),
        ({"train__callbacks": ["tests.train.nets:REPORTED"]}, r"train\.callbacks = .* is of type list; name a class"),
        ({"model__class": "types:SimpleNamespace"}, r"model\.class = .*, model\.args: "),
        (
            {"model__class": "tests.train.nets:no_module"},
            r"model\.class = .* makes list; name a class of torch",
        ),
        ({"model__class": "nowhere:Net"}, r"model\.class = .* cannot be imported: No module named 'nowhere'"),
        (NET | {"model__args": {"outputz": 2}}, r"model\.class = .*, model\.args: .*'outputz'"),
        (NET | {"model__args": {"outputs": 2}}, r"gave logits of shape \[32, 2\], and the labels have \[32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            run("never", **changes)


DRAWN = np.random.default_rng(3)
COLUMNS = {name: DRAWN.integers(0, 2, ROWS).tolist() for name in ("bought", "clicked")}
COLUMNS |= {"worth": DRAWN.random(ROWS).round(3).tolist(), "user": DRAWN.integers(0, 9, ROWS).tolist()}
COLUMNS |= {"shop": DRAWN.integers(0, 5, ROWS).tolist(), "city": DRAWN.choice(["DE", "x y", "7", "Ü"], ROWS).tolist()}
COLUMNS["items"] = [DRAWN.integers(0, 40, int(DRAWN.integers(4))).tolist() for _ in range(ROWS)]


@pytest.fixture(scope="module", params=["parquet", "csv", "npy"])
def data(request, tmp_path_factory):
    """The keys that read the same rows, of several files where the format has some; CSV has no lists."""
    pa, kind, folder = pytest.importorskip("pyarrow"), request.param, tmp_path_factory.mktemp(request.param)
    from pyarrow import csv, parquet

    names = [name for name in COLUMNS if kind != "csv" or name != "items"]
    arrays = {name: np.array(COLUMNS[name]) for name in ("worth", "user", "shop")}
    arrays["city"] = np.array([category_of(each) for each in COLUMNS["city"]])
    arrays |= {"label": np.stack([COLUMNS["bought"], COLUMNS["clicked"]], axis=1), "items": [*chain(*COLUMNS["items"])]}
    arrays["items.offsets"] = np.append(0, np.cumsum([len(each) for each in COLUMNS["items"]]))
    for name, array in arrays.items() if kind == "npy" else ():
        np.save(folder / f"{name}.npy", array)
    for begin in range(0, ROWS, 32) if kind != "npy" else ():
        write = {"parquet": parquet.write_table, "csv": csv.write_csv}[kind]
        write(pa.table({name: COLUMNS[name][begin : begin + 32] for name in names}), folder / f"{begin}.{kind}")
    found = {"path": str(folder), "label_column": ["bought", "clicked"], "weight_column": "worth", "dense_columns": []}
    found |= {"train_rows": 0, "test_rows": 0, "test_path": str(folder)}
    found["sparse_columns"] = [each for each in ("user", "items") if each in names]
    return {f"data__{key}": value for key, value in found.items()} | {"train__batch_size": 16}


def test_labels_have_heads_and_rows_have_weights_in_every_format(folder, run, data):
    reader, hasher = open_data(config_of(folder, "none", **data))
    (batch,) = reader.batches(hasher, batch_size=ROWS)
    assert batch.labels.T.tolist() == [COLUMNS["bought"], COLUMNS["clicked"]]
    assert batch.weights.tolist() == torch.tensor(COLUMNS["worth"]).tolist()
    summary, count = run(**data, data__label_weights=[1, 0.25]), len(data["data__sparse_columns"])
    others = run("a", **data).bits, run("b", **data | {"data__weight_column": ""}).bits
    assert len({summary.bits, *others}) == 3
    found = summary.test.figures
    assert found["log_loss"] == pytest.approx((found["log_loss/bought"] + 0.25 * found["log_loss/clicked"]) / 1.25)
    assert f"test AUC of clicked               {found['auc/clicked']:.6f}" in summary.describe()
    inputs = {"dense": InferTensor("FP32", np.empty((2, 0), np.float32))}
    inputs["values"] = InferTensor("INT64", np.arange(2 * count))
    inputs["lengths"] = InferTensor("INT32", np.ones((count, 2), np.int32))
    with tierstore.open(summary.store, mode="r", ddr="8MiB") as store:
        model = Models(store).by_name["ranking"]
        assert (model.metadata.outputs[0].shape, model.metadata.parameters["labels"]) == ((-1, 2), "bought,clicked")
        assert np.shape(asked(model, inputs)[0]["probabilities"]) == (2, 2)
    # The loss is the weighted sum of labels' means.
    logits, labels, weights = torch.randn(5, 2), torch.randint(0, 2, (5, 2)).float(), torch.rand(5)
    each = -torch.where(labels > 0, torch.sigmoid(logits).log(), torch.sigmoid(-logits).log())
    expected = ((each * weights[:, None]).mean(0) * torch.tensor([2.0, 0.5])).sum()
    torch.testing.assert_close(training_loss(logits, labels, weights, (2.0, 0.5)), expected)
    torch.testing.assert_close(training_loss(logits[:, 0], labels[:, 0], weights), (each[:, 0] * weights).mean())


def test_rows_are_measured_by_group_and_segment_in_every_format(run, monkeypatch, data):
    """Of columns that are no features; as they are scored before their step, weights and all."""
    given, real = [], Metrics.update
    monkeypatch.setattr(Metrics, "update", lambda own, *each, **more: (given.append(each), real(own, *each, **more)))
    keys = {"names": NAMES, "window": 40, "group": "shop", "segment": "city", "segment_values": ["DE", 7]}
    summary = run(**data, **{f"metrics__{name}": value for name, value in keys.items()}, train__best_by="ne")
    columns = [torch.cat(each) for each in zip(*given, strict=True)]
    assert columns[2].tolist() == torch.tensor(COLUMNS["worth"] * 2).tolist()
    assert [each.tolist() for each in columns[3:]] == [COLUMNS["shop"] * 2, [*map(category_of, COLUMNS["city"])] * 2]
    measures = Measures(names=NAMES, labels=("bought", "clicked"), segments={category_of("DE"): "city=DE", 7: "city=7"})
    for window, begin in zip(summary.windows, range(0, 2 * ROWS, 48), strict=True):
        own = evaluate(*(each[begin : begin + 48] for each in columns), measures=measures).figures
        assert {f"window_{name}": value for name, value in own.items()}.items() <= window.items()
    clicked = [each[begin:] for each in (columns[0][:, 1], columns[1][:, 1], *columns[2:])]
    assert own["gauc/clicked"] == evaluate(*clicked, measures=Measures(names=NAMES)).figures["gauc"]
    assert summary.test.figures.keys() == own.keys() > {"ne/bought/city=DE", "auc/clicked/city=7", "calibration/other"}


METRICS = {"metrics__names": ["ne", "calibration", "gauc"], "metrics__window": 70, "metrics__group": "C26"}


def test_windows_of_a_killed_run_go_on_and_change_no_bits(run, monkeypatch, tmp_path):
    keys = [METRICS | {"train__commit_every": 4, "train__metrics": str(tmp_path / name)} for name in ("a", "b")]
    whole, again = run("whole", **keys[0]), resumed(run, monkeypatch, 11, keys[1])
    texts = [(tmp_path / name).read_text().splitlines() for name in ("a", "b")]
    first, second = ([line for line in lines if '"event": "metrics"' in line] for lines in texts)
    assert first == second
    assert [json.loads(each)["step"] for each in first] == [3, 6, 9, 12, 15, 18, 20], "the last one is not full"
    assert whole.bits == again.bits == run("plain").bits
    assert f"lifetime GAUC                     {whole.windows[-1]['lifetime_gauc']:.6f}" in whole.describe()
    more = run("whole", resume=True, **keys[0] | {"train__epochs": 3})
    assert [each["step"] for each in more.windows] == [21, 24, 27, 30], "the window that was not full goes on"
    anew = run("whole", resume=True, **keys[0] | {"train__epochs": 4, "metrics__window": 64})
    assert anew.windows[0]["lifetime_ne"] == anew.windows[0]["window_ne"], "of other metrics there is none"
    second_order = run("b", **METRICS | {"optimizer__dense": "hessian-free", "metrics__window": 1})
    alike = run("c", **METRICS | {"metrics__window": 1})
    assert second_order.windows[0] == pytest.approx(alike.windows[0]), "of the weights before the step"


def test_any_metric_may_say_which_version_is_best(run, tmp_path):
    keys = SETTINGS["tests"] | METRICS | {"train__best_by": "calibration", "train__metrics": str(tmp_path / "a")}
    whole, lines = run(**keys), map(json.loads, (tmp_path / "a").read_text().splitlines())
    tests = {each["step"]: abs(each["calibration"] - 1) for each in lines if each["event"] == "test"}
    assert whole.step == min(tests, key=tests.get)


def test_shuffled_rows_are_the_same_from_any_row_on_and_stay_in_their_blocks(folder, run, monkeypatch, data):
    config = config_of(folder, "none", **data, data__shuffle_rows=32)
    reader, _ = open_data(config)

    def rows(reader, start=0):
        chunks = list(reader.read_chunks(start, None, 8))
        assert [len(chunk.labels) for chunk in chunks] == [8] * ((ROWS - start) // 8)
        parts = [[each.labels.tolist(), each.weights.tolist(), bags(each.categories)] for each in chunks]
        return [str(row) for part in parts for row in zip(*part, strict=True)]

    plain, first, second = rows(reader), *(rows(reader_of_epoch(config, reader, epoch)) for epoch in (0, 1))
    assert plain != first != second
    for begin in range(0, ROWS, 32):
        assert sorted(first[begin : begin + 32]) == sorted(plain[begin : begin + 32])
    for start in (8, 32, 56):
        assert rows(reader_of_epoch(config, reader, 0), start) == first[start:]
    settings = data | {"data__shuffle_files": True, "train__commit_every": 4}
    if (folder := data["data__path"]).endswith("npy0"):
        with pytest.raises(ConfigError, match=rf"shuffle_files is for .* for {folder} set data\.shuffle_rows"):
            run("npy", **settings)
        return
    assert resumed(run, monkeypatch, 11, settings).bits == (whole := run("whole", **settings)).bits
    assert whole.bits != run("plain", **data).bits


def test_the_version_that_tests_best_is_shown_and_lines_say_what_happened(run, monkeypatch, tmp_path):
    REPORTED.clear()
    settings, paths = SETTINGS["tests"] | {"train__tensorboard": "board"}, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    settings |= {"train__callbacks": ["tests.train.nets:REPORTED.append"], "train__metrics_every": 1}
    keys = [settings | {"train__metrics": str(path)} for path in paths]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"train\.tensorboard needs more packages .*: pip install tensorboard"):
        run("never", **settings)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=(board := MagicMock())))
    whole = run("whole", **keys[0])
    tests = {each.step: each.figures["log_loss"] for each in REPORTED if each.event == "test"}
    best = min(tests, key=tests.get)
    assert (whole.step, whole.test.log_loss, whole.interrupted) == (best, tests[best], False)
    assert [*tests] == list(range(3, best + 10, 3)), "it ends after three tests that were not the best"
    assert [each.step for each in REPORTED if each.event == "step"] == list(range(1, best + 10))
    with tierstore.open(whole.store, mode="r") as store:
        assert store.versions == (whole.version,)
    again = resumed(run, monkeypatch, best + 5, keys[1])
    assert (again.bits, again.step) == (whole.bits, best)
    assert [call.kwargs["purge_step"] for call in board.call_args_list] == [None, None, best + 4]
    drawn = {call.args[0] for call in board().__enter__().add_scalar.call_args_list}
    assert drawn == {"step/loss", "step/samples_per_second", "test/auc", "test/log_loss", "commit/version"}
    first, second = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    for lines in (first, second):  # a commit in flight when the process is killed has no line
        lines[:] = [each | {"samples_per_second": 0} for each in lines if each["event"] != "commit"]
    assert first == second
    ended = run("whole", resume=True, **keys[0])
    assert (ended.bits, ended.rows) == (whole.bits, 0)
    with pytest.raises(ValueError, match=r"train\.metrics = .* exists: delete it, or name another file"):
        run("other", **keys[0])
    REPORTED.clear()
    run("timed", train__epochs=1, train__test_every_minutes=1e-9, train__callbacks=settings["train__callbacks"])
    assert [each.step for each in REPORTED if each.event == "test"] == list(range(1, 11))


def test_only_the_trainer_imports_what_a_store_names(run):
    with tierstore.open(run().store, mode="r") as store:
        saved = store.extra["tierstore.train"]
        for key in ("class", "class_"):
            model = saved["config"]["model"] | {"class": "", key: "evil:Net"}
            extra = {"tierstore.train": saved | {"config": saved["config"] | {"model": model}}}
            with pytest.raises(ConfigError, match='unknown key "class_"') if key == "class_" else nullcontext():
                assert saved_config(extra, "a store") is None
    with pytest.raises(ValueError, match=r"only tierstore train makes a model of that class"):
        build_model(RunConfig(model=ModelSection(class_="evil:Net")), None)


@pytest.mark.parametrize(
    ("values", "best", "since"), [([3], 3, 0), ([3, 2], 2, 0), ([2, 2], 2, 1), ([1, 2, 3, math.inf], 1, 3)]
)
def test_a_test_is_the_best_or_counts(values, best, since):
    position = Position(best_version=7)
    for step, value in enumerate(values, 1):
        position = replace(position, step=step, best_version=7).after(value)
    assert (position.tested, position.best, position.tests_since) == (len(values), best, since)
    assert position.best_version == (7 if since else 0)


@pytest.mark.parametrize(("keep", "dropped"), [(1, [1, 3, 4, 5]), (2, [1, 3, 4]), (4, [1]), (5, []), (7, []), (9, [])])
def test_the_best_version_stays_besides_the_last_ones(keep, dropped):
    assert Position(best_version=2).dropped([1, 2, 3, 4, 5], keep) == dropped


def test_a_stop_on_a_step_of_a_test_leaves_the_test_to_the_next_run(run, monkeypatch, tmp_path):
    settings = {"train__test_every_steps": 6, "train__keep_best": True, "optimizer__sparse_lr": 0.3}
    keys = [settings | {"train__metrics": str(tmp_path / name), "train__metrics_every": 7} for name in ("a", "b")]
    whole = run("whole", **keys[0])
    with monkeypatch.context() as patch:
        stop_after(patch, 12, lambda: signal.raise_signal(signal.SIGINT))
        assert run("parts", **keys[1]).interrupted
    again = run("parts", resume=True, **keys[1])
    assert (again.bits, again.test, again.step) == (whole.bits, whole.test, whole.step)
    first, second = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("a", "b"))
    tests = [
        [(each["step"], each["log_loss"]) for each in lines if each["event"] == "test"] for lines in (first, second)
    ]
    assert [step for step, _ in tests[0]] == [6, 12, 18, 20]
    assert tests[0] == tests[1], "the last step is tested, too"
    losses = [each["step"] for each in first if each["event"] == "step"]
    assert losses == [6, 7, 12, 14, 18, 20], "steps before a commit and at the end have a line"
    before = (tmp_path / "a").read_text()
    run("whole", resume=True, **keys[0])
    assert (tmp_path / "a").read_text() == before
    assert run("whole", resume=True, train__epochs=3, **keys[0]).rows > 300, "what was left, and another epoch"
    for text in ("a table of my own\n", '{"step": 1}\nno record\n', "no end"):
        (tmp_path / "a").write_text(text)
        with pytest.raises(ValueError, match=r"a, line [12], is no record of a run; name another file"):
            run("parts", resume=True, **keys[0])
        assert (tmp_path / "a").read_text() == text
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=MagicMock()))
    with pytest.raises(ValueError, match=r"train\.tensorboard = .* has events: name another folder"):
        run("other", train__tensorboard=str(tmp_path))


def test_a_run_that_ended_early_goes_on_for_as_many_tests(run):
    settings = SETTINGS["tests"] | {"train__keep_best": False, "train__epochs": 8}
    ended = run(**settings)
    assert "; --epochs 9 goes on" in run(resume=True, **settings).describe()
    assert run(resume=True, **settings | {"train__epochs": 9}).step == ended.step + 9


def test_a_class_that_is_another_does_not_resume(run, monkeypatch):
    run(**NET)
    for width, found in ((7, r"\[7\]"), (0, "none")):
        with monkeypatch.context() as patch:
            patch.setattr(nets, "WIDTH", width)
            message = rf"model\.class = .* has model\.score\.0\.bias of shape {found}, the commit \[6\]; resume with"
            with pytest.raises(ValueError, match=message):
                run(resume=True, **NET, train__epochs=3)


def test_without_an_auc_the_run_is_committed_and_says_so(run, monkeypatch):
    settings = {"train__test_each_epoch": True, "train__best_by": "auc"}
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.metrics._pairs", lambda *_: np.zeros((1, 3)))
        with pytest.raises(DataError, match="test rows have no AUC: labels are alike, or"):
            run(**settings)
    REPORTED.clear()
    again = run(resume=True, **settings, train__callbacks=["tests.train.nets:REPORTED.append"])
    assert [each.step for each in REPORTED if each.event == "test"] == [10, 20]
    REPORTED.clear()
    assert run("b", train__callbacks=["tests.train.nets:REPORTED.append"]).bits == again.bits
    assert [each.figures["auc"] for each in REPORTED if each.event == "test"] == [again.test.auc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__test_every_steps": 3, "data__test_rows": 0},
            "test_every_minutes = 3: expected none without",
        ),
        ({"data__label_column": ["a", "b"], "data__label_weights": [1.0, math.nan]}, "data.label_weights = .*nan"),
        (
            {"model__class": "a:B", "model__args": {"x": [{"y": date(2026, 1, 2)}]}},
            "model.args = .*: expected no",
        ),
        ({"metrics__names": ["gauc"]}, r"metrics\.group = ''.*: expected a column"),
        ({"metrics__segment": "C1"}, r"metrics\.segment_values = .*: expected values with metrics\.segment"),
        ({"train__best_by": "ne"}, r"best_by = 'ne': expected .*, or a metric of metrics\.names"),
        ({"data__shuffle_rows": 1 << 27}, "shuffle_rows=134217728: expected a whole number from 0 to 67,108,864"),
    ],
)
def test_keys_that_cannot_be_are_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(folder, "none", **changes)
    assert config_of(folder, "none", model__class="a:B", model__args={"x": "datetime.iso"}).model.args
