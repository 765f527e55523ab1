"""Sweeps: which runs they are, that they go on, and what is said of them."""

import csv
import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train.runs import commit_scaled, config_of
from tierstore import cli
from tierstore.settings.sections import ConfigError, to_toml
from tierstore.train import sharpness_of, sweep, trainer
from tierstore.train.config import load
from tierstore.train.report import groups_of, rows_of, sweep_page, sweep_table
from tierstore.train.sweep import axis_of, prepare, run_all, runs_of, seed_axis

COLUMNS = ["sharpness 1e-3", "sharpness 5e-4", "sharpness in 100 dims", "largest eigenvalue"]


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config_of(tmp_path, "unused")))
    return path


def test_values_are_toml_or_words():
    for text, labels, values in (
        ("train.batch_size=256,1024", ["256", "1024"], [256, 1024]),
        ("model.top_mlp=[64,32],[8]", ["[64, 32]", "[8]"], [[64, 32], [8]]),
        ("store.ddr=5% of tables, 64MiB", ["5% of tables", "64MiB"], ["5% of tables", "64MiB"]),
    ):
        assert [(label, found.value) for label, found in axis_of(text).choices] == [*zip(labels, values, strict=True)]
    for text, reason in (
        ("train.batch_size=1,1", "a value stands there twice"),
        ("train.batch_size=1,,2", "a value is empty"),
        ("train.batch_size", "expected section.key=value"),
    ):
        with pytest.raises(ConfigError, match=reason):
            axis_of(text)


def test_every_combination_has_a_folder_and_its_keys(run_file, tmp_path):
    axes = [axis_of("train.batch_size=32,128"), axis_of("optimizer.dense=sgd"), seed_axis(5, 2)]
    for rule, samples, rate, warmup in (("sqrt", 100, 0.04, [4, 1]), ("linear", 0, 0.08, [0, 0])):
        runs = runs_of(run_file, tmp_path / "out", axes, rate_rule=rule, warmup_samples=samples)
        assert [run.folder.name for run in runs] == [
            f"train.batch_size={size},optimizer.dense=sgd,train.seed={seed}" for size in (32, 128) for seed in (5, 6)
        ]
        found = [run.config.optimizer for run in runs]
        assert [(each.dense, each.dense_lr, each.sparse_lr, each.warmup_steps) for each in found] == [
            ("sgd", lr, lr, steps) for lr, steps in zip((0.02, rate), warmup, strict=True) for _ in range(2)
        ]
    for first, second, reason in (
        ("train.epochs=1", axis_of("train.epochs=2"), "stands there twice"),
        ("train.seed=1,2", seed_axis(0, 1), "--seeds N"),
        ("train.epochs=1,2", seed_axis(0, 10_000), "20,000 runs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            runs_of(run_file, tmp_path, [axis_of(first), second])
    no_file_names = runs_of(run_file, tmp_path, [axis_of("store.ddr=5% of tables,5%/of tables,../x")])
    assert len({run.folder for run in no_file_names}) == 3
    assert {run.folder.parent for run in no_file_names} == {tmp_path}


def test_a_run_that_was_begun_with_other_keys_is_refused_before_anything_is_written(run_file, tmp_path):
    prepare(runs_of(run_file, tmp_path / "out", [seed_axis(0, 1)]))
    run_file.write_text(run_file.read_text().replace("epochs = 2", "epochs = 4"))
    with pytest.raises(ConfigError, match=r"begun with train\.epochs = 2, now 4"):
        prepare(runs_of(run_file, tmp_path / "out", [seed_axis(0, 2)]))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.seed=0"]


def test_a_sweep_is_its_runs_one_by_one_and_goes_on(run_file, tmp_path, capsys):
    """One run cannot be; the others end as they would alone, and are not run again."""
    words = ["sweep", str(run_file), str(tmp_path / "out"), "--set", "store.ddr=64MiB,1", "--jobs", "2"]
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert "1 of 2 runs failed" in said
    assert "store.ddr=1,train.seed=0: status 1: " in said
    (row,) = csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines())
    twin = trainer.train(config_of(tmp_path, "twin"))
    assert float(row["AUC"]) == twin.test.auc
    assert float(row["log loss"]) == twin.test.log_loss
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())[0]["store.ddr"] == "64MiB"
    folder = tmp_path / "out" / "store.ddr=64MiB,train.seed=0"
    before = (folder / "result.json").stat()
    assert cli.main([*words[:4], "store.ddr=64MiB"]) == 0
    assert "1 run, of which 1 ended before" in capsys.readouterr().out
    assert (folder / "result.json").stat() == before
    assert load(folder / "run.toml").store.path == str(folder / "store")


def test_ctrl_c_stops_what_runs_at_a_commit(run_file, tmp_path, monkeypatch):
    (run,) = runs_of(run_file, tmp_path / "out", [axis_of("train.epochs=100000"), axis_of("train.commit_every=1")])
    prepare([run])
    log = run.folder / "log.txt"

    def sleep(seconds):
        time.sleep(seconds)
        if "committed version" in log.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(KeyboardInterrupt):
        run_all([run], told=lambda *_: None)
    assert run.result is None
    assert "continue with" in log.read_text()


def test_figures_over_seeds_are_means_and_deviations_in_table_and_page(run_file, tmp_path):
    swept = [axis_of("train.batch_size=32,64"), axis_of("store.ddr=<b>,5%"), seed_axis(0, 3)]
    runs = runs_of(run_file, tmp_path, swept)
    generator = np.random.default_rng(0)
    for run in runs[:-1]:
        run.folder.mkdir()
        auc, loss, rate = generator.uniform(size=3)
        result = {"interrupted": False, "test": {"auc": auc, "log_loss": loss, "rows": 5}, "loss": None, "step": 7}
        result |= {"seconds": 2.0, "samples_per_second": rate}
        (run.folder / "result.json").write_text(json.dumps(result))
    assert len(rows_of(runs)) == 11
    values = [run.result["test"]["auc"] for run in runs[:-1]]
    for number, group in enumerate(groups_of(runs)):
        own = values[3 * number : 3 * number + 3]
        expected = np.mean(own), np.std(own, ddof=1), min(own), max(own)
        assert (group.ended, group.measured["AUC"]) == (len(own), pytest.approx(expected))
        assert "training loss" not in group.measured
    head, *lines = sweep_table(runs).splitlines()
    assert " ".join(head.split()) == "train.batch_size store.ddr runs AUC log loss steps seconds samples/s"
    assert [line.split()[:3] for line in lines] == [
        ["32", "<b>", "3"], ["32", "5%", "3"], ["64", "<b>", "3"], ["64", "5%", "2"],
    ]  # fmt: skip
    page = sweep_page("<i>", runs)
    assert all(f": {group.measured['AUC'].mean:,.4g} AUC" in page for group in groups_of(runs)), "lines are means"
    assert page.count("<polyline") == page.count('band"') == 3 * 2
    assert "<b>" not in page
    assert "<i>" not in page
    assert "11 of 12 runs have ended" in page
    assert "<svg" not in sweep_page("none yet", runs_of(run_file, tmp_path / "none", [seed_axis(0, 1)]))


def test_a_sweep_measures_once_what_it_lacks(run_file, tmp_path, capsys, monkeypatch):
    folder, measured, stops = tmp_path / "out", [], [2]
    runs = runs_of(run_file, folder, [axis_of("train.batch_size=32,64"), seed_axis(0, 1)])
    prepare(runs)
    for run in runs:
        trainer.train(run.config).write(run.folder / "result.json")

    def counted(path, *, rows):
        measured.append(path)
        if len(measured) in stops:
            raise KeyboardInterrupt
        return sharpness_of(path, rows=rows)

    def start(*words):
        measured.clear()
        status = cli.main(["sweep", str(run_file), str(folder), "--set", "train.batch_size=32,64", *words])
        return status, len(measured), capsys.readouterr().out

    monkeypatch.setattr(sweep, "sharpness_of", counted)
    assert start("--sharpness", "90")[:2] == (130, 2)
    assert [len(list(run.folder.glob("sharpness.json*"))) for run in runs] == [1, 0]
    stops.clear()
    assert start("--sharpness", "90")[:2] == (0, 1)
    assert start("--sharpness", "90")[:2] == (0, 0)
    rows = json.loads((folder / "sweep.json").read_text())
    for run, row in zip(runs, rows, strict=True):
        assert [row[name] for name in COLUMNS] == [*sharpness_of(run.folder / "store", rows=90)[2:-1]]
    shutil.rmtree(runs[0].folder / "store")
    commit_scaled(runs[1].config, 2, lambda model: None)
    status, _, said = start("--sharpness")
    assert (status, said.count("no sharpness: no store"), said.count("was trained further; delete")) == (1, 1, 1)
    assert rows == json.loads((folder / "sweep.json").read_text())
    (runs[1].folder / "sharpness.json").write_text('{"asked_rows": 90, "commit_id": "of what it was before"}')
    assert [run.lacks_sharpness(90) for run in runs] == [False, True]
