"""What runs and sweeps measure: a history, the sharpness of a minimum; a sweep's runs; their pages."""

import functools
import html
import json
import math
import re
import time
from html import unescape
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from tierstore import cli
from tierstore.metrics import Evaluation
from tierstore.models import box_sharpness, hessian_eigenvalues
from tierstore.pool.stats import Stats, TierStats
from tierstore.settings.sections import ConfigError, to_toml
from tierstore.train import sharpness_of, sweep, train, trainer
from tierstore.train.build import open_data
from tierstore.train.config import load
from tierstore.train.summary import RANGES_MAX, History, Point, Summary, run_page, together
from tierstore.train.sweep import (
    axis_of,
    groups_of,
    prepare,
    rows_of,
    run_all,
    runs_of,
    seed_axis,
    sweep_page,
    sweep_table,
)

from .runs import TRAIN_ROWS, commit_scaled, config_of

COUNTED = ("hbm_hits", "hbm_unique", "ddr_hits", "ddr_unique", "bytes_read", "bytes_written")


@settings(max_examples=15)
@given(st.one_of(st.integers(0, 2 * RANGES_MAX + 2), st.integers(0, 2000)), st.integers(0, 10**9), st.integers(0, 99))
def test_every_point_holds_the_totals_of_its_step_and_neighbours_merge_when_there_are_too_many(num_steps, begin, seed):
    random = np.random.default_rng(seed)
    totals = random.integers(0, 2**40, (num_steps + 2, 6)).cumsum(axis=0).tolist()
    samples, losses = random.integers(1, 512, num_steps).tolist(), random.random(num_steps, dtype=np.float32)
    done = 0

    def tiers():
        hbm_hits, hbm_unique, ddr_hits, ddr_unique, read, written = totals[done]
        ddr, ssd = TierStats(hits=ddr_hits, unique=ddr_unique), TierStats(bytes_read=read, bytes_written=written)
        return Stats(TierStats(hits=hbm_hits, unique=hbm_unique), ddr, ssd)

    history = History(tiers, step=begin)
    for each, loss in zip(samples, losses, strict=True):
        done += 1
        history.step(each, torch.tensor(loss))
    done += 1  # a last commit
    history.close()
    points = history.points()
    assert (points[0].step, points[-1].step, points[0].samples) == (begin, begin + num_steps, 0)
    for point in points:
        done = point.step - begin
        row = totals[-1] if done == num_steps else totals[done]
        assert [getattr(point, name) for name in COUNTED] == [a - b for a, b in zip(row, totals[0], strict=True)]
        assert point.samples == sum(samples[:done])
        assert point.loss_sum == pytest.approx(losses[:done].sum(dtype=np.float64), rel=1e-12)
    *widths, last = [b.step - a.step for a, b in pairwise(points)] or [0]
    assert len(set(widths)) <= 1
    assert last <= max(widths, default=1)
    assert min(num_steps, RANGES_MAX // 2) <= len(points) - 1 <= RANGES_MAX
    assert all(a.seconds <= b.seconds for a, b in pairwise(points))


@pytest.mark.parametrize("count", [1, 199, 200, 201, 202, 399, 400, 401, 402, 403, 1003])
def test_windows_are_thinned_evenly_and_the_last_stays(count):
    history = History(lambda: Stats(TierStats(), TierStats(), TierStats()), step=7)
    for number in range(1, count + 1):
        for _ in range(2):
            history.step(1, torch.zeros(()))
        history.window({"window_ne": number})
    numbers = [each["window_ne"] for each in history.windows]
    width = numbers[0] if count > 1 else 1
    assert numbers == [*range(width, count, width), count]
    assert min(count, RANGES_MAX // 2) <= len(numbers) <= RANGES_MAX
    assert [(each["first"], each["step"]) for each in history.windows] == [(6 + 2 * n, 7 + 2 * n) for n in numbers]


def test_of_ranks_the_tiers_add_up_and_the_steps_are_the_same():
    one, two = ([Point(4, 9, seconds, 2.5, 1, 2, 3, 4, 5, 6)] for seconds in (0.5, 0.75))
    assert together([one, two]) == (Point(4, 9, 0.5, 2.5, 2, 4, 6, 8, 10, 12),)


def test_a_run_adds_up_to_its_summary_and_one_that_resumes_says_where(tmp_path, monkeypatch):
    losses, real = [], trainer.train_step

    def step(*arguments):
        loss, stop = real(*arguments)
        losses.append(loss.item())
        return loss, stop or len(losses) == 7

    monkeypatch.setattr(trainer, "train_step", step)
    config = config_of(tmp_path, "run", store__ddr=424_000, train__commit_every=3)
    for begin, resume in ((0, False), (7, True)):
        run = train(config, resume=resume)
        first, *_, last = run.history
        assert (first.step, last.step, last.samples) == (begin, run.step, run.rows)
        assert (last.ddr_hits, last.ddr_unique) == (run.tiers.ddr.hits, run.tiers.ddr.unique)
        assert (last.bytes_read, last.bytes_written) == (run.tiers.ssd.bytes_read, run.tiers.ssd.bytes_written)
        assert last.bytes_written > 0
        assert [b.loss_sum - a.loss_sum for a, b in pairwise(run.history)] == pytest.approx(losses[begin:])
    assert run.rows < 2 * TRAIN_ROWS
    whole = train(config, resume=True)
    assert [point.step for point in whole.history] == [run.step]
    assert whole.rows == 0


def test_figures_are_those_of_the_runs_model(tmp_path, monkeypatch):
    """Batches are added up, the last shorter."""
    monkeypatch.setattr(sweep, "_BATCH", 100)
    config = config_of(tmp_path, "store", model__bottom_mlp=[], model__top_mlp=[])
    trainer.train(config)
    found = sharpness_of(tmp_path / "store", rows=250)
    reader, hasher = open_data(config)
    (batch,) = reader.batches(hasher, batch_size=250, stop_row=250)

    def measured(model):
        weights, pooled = list(model.dense_parameters().values()), model.embeddings(batch.sparse).values()

        def losses():
            return [binary_cross_entropy_with_logits(model.dense_part(batch.dense, pooled), batch.labels)]

        boxes = [(1e-3, None), (5e-4, None), (1e-3, 100)]
        percents = [box_sharpness(losses, weights, epsilon=epsilon, dims=dims) for epsilon, dims in boxes]
        return *percents, hessian_eigenvalues(losses, weights).largest

    version, expected = commit_scaled(config, 1, measured)
    assert found[:2] == (version - 1, 250) == (1, 250)
    assert found[2:] == pytest.approx(expected, rel=1e-3)
    assert sharpness_of(tmp_path / "store").rows == 300
    commit_scaled(config, math.nan, lambda model: None)
    assert all(map(math.isnan, sharpness_of(tmp_path / "store")[2:]))
    with pytest.raises(ValueError, match="rows=0"):
        sharpness_of(tmp_path / "store", rows=0)


STEPS = 40
HOSTILE = "<script>alert('a')</script> & \"co\""


def made_run(*, hbm=0, hits=70, samples_per_second=123_456.0, windows=()):
    """As read from JSON. Each step reads 3 KiB and writes 5; its loss is 1 / step."""
    history = tuple(
        Point(
            step, 256 * step, step / 8, sum(1 / (1 + each) for each in range(step)),
            90 * hbm * step, 100 * hbm * step, hits * step, 100 * step, 3072 * step, 5120 * step,
        )
        for step in range(0, STEPS + 1, 4)
    )  # fmt: skip
    run = Summary(
        store="run", device="cpu", version=1, commit_id="", interrupted=False, step=STEPS, epochs=1, rows=256 * STEPS,
        seconds=STEPS / 8, samples_per_second=samples_per_second, loss=0.1,
        test=Evaluation(10, 0.8125, 0.4375, {"auc": 0.8125, "auc/a/b=c": 0.5}),
        tiers=Stats(
            TierStats(hits=90, unique=100, capacity_rows=hbm),
            TierStats(hits=hits, unique=100, capacity_rows=8, bytes=2048),
            TierStats(bytes_read=3072 * STEPS, bytes_written=5120 * STEPS),
        ),
        start_bytes=1, end_bytes=1, bits="0123456789abcdef0123", history=history, windows=windows,
    )  # fmt: skip
    return json.loads(json.dumps(run.to_dict()))


class Parsed:
    """Cells of the table, texts of strips over the plots, lines by class, headings, and every address."""

    def __init__(self, page):
        found = functools.partial(re.findall, flags=re.DOTALL)
        self.rows = [
            [*map(unescape, found(r"<t[hd][^>]*>([^<]+)</t[hd]>", row))] for row in found(r"<tr>(.*?)</tr>", page)
        ]
        self.strips = [unescape(text).split("\n") for text in found(r"<rect[^>]*><title>(.*?)</title>", page)]
        self.lines = [(tone, points.split()) for tone, points in found(r'<polyline class="(.*?)" points="(.*?)"', page)]
        self.headings = found(r"<h2[^>]*>(.*?)</h2>", page)
        self.asked = found(r"<script|\b(?:src|href|srcset|data)=", page)


def test_both_runs_are_in_the_table_and_in_every_plot():
    runs = {HOSTILE: made_run(hits=70), "two": made_run(hits=90, samples_per_second=7.0)}
    page = Parsed(run_page(HOSTILE, runs, notes=[HOSTILE]))
    assert page.rows[0] == [HOSTILE, "two"]
    table = {label: cells for label, *cells in page.rows[1:]}
    assert table["samples/s"] == ["123,456", "7"]
    assert table["hit rate of the DDR tier"] == ["70.0 %", "90.0 %"]
    assert table["read from SSD"] == ["120.0 KiB"] * 2
    assert table["test AUC"] == ["0.812500"] * 2
    assert table["bits (SHA-256)"] == ["0123456789abcdef"] * 2
    assert "hit rate of the HBM tier" not in table
    assert "Hit rate of the HBM tier" in Parsed(run_page("HBM", {"one": made_run(hbm=4)})).headings
    assert table["test AUC of a/b=c"] == ["0.500000"] * 2
    ends = ({"first": 6, "step": 10, "window_ne": 0.9, "window_calibration": 1.25}, {"step": 40, "window_ne": math.nan})
    measured = Parsed(run_page("windows", {"one": made_run(windows=ends)}))
    assert measured.headings[-3:-1] == ["NE of each window", "Calibration of each window"]
    assert measured.strips[-2:] == [["steps 6 - 10", "one: 0.9 NE"], ["steps 6 - 10", "one: 1.25 mean p over mean y"]]
    names = [heading.partition(":")[0] for heading in page.headings]
    plots = ["Loss, mean of the steps", "Hit rate of the DDR tier", "Read from SSD", "Written to SSD"]
    assert names == ["Answer", *plots, "Figures"]
    assert [tone for tone, _ in page.lines] == ["c1", "c2"] * 4
    assert {len(points) for _, points in page.lines} == {STEPS // 4}
    losses, hits, read, written = (page.strips[begin : begin + STEPS // 4] for begin in range(0, STEPS, STEPS // 4))
    assert hits[0] == ["steps 1 - 4", f"{HOSTILE}: 70 %", "two: 90 %"]
    assert read[-1] == ["steps 37 - 40", f"{HOSTILE}: 3 KiB a step", "two: 3 KiB a step"]
    assert written[0] == ["steps 1 - 4", f"{HOSTILE}: 5 KiB a step", "two: 5 KiB a step"]
    for index, (_, *texts) in enumerate(losses):
        mean = sum(1 / (1 + step) for step in range(4 * index, 4 * index + 4)) / 4
        assert [float(text.split()[-3]) for text in texts] == pytest.approx([mean] * 2, rel=1e-3)
    assert page.asked == []


def test_train_writes_it_and_says_so(tmp_path, capsys):
    run_file, page = tmp_path / "run.toml", tmp_path / "run.html"
    run_file.write_text(to_toml(config_of(tmp_path, "store", train__epochs=1)))
    assert cli.main(["train", str(run_file), "--html", str(page)]) == 0
    assert f"page     {page}" in capsys.readouterr().out.splitlines()
    assert Parsed(page.read_text(encoding="utf-8")).rows[0] == ["run.toml"]


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
    pairs = [(size, seed) for size in (32, 128) for seed in (5, 6)]
    runs = runs_of(run_file, tmp_path / "out", axes)
    assert [run.folder.name for run in runs] == [
        f"train.batch_size={size},optimizer.dense=sgd,train.seed={seed}" for size, seed in pairs
    ]
    keys = [(run.config.train.batch_size, run.config.train.seed, run.config.optimizer.dense) for run in runs]
    assert keys == [(*pair, "sgd") for pair in pairs]
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
    words = ["sweep", str(run_file), str(tmp_path / "out"), "--set", "store.ddr=64MiB,1", "--jobs", "2"]
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert "1 of 2 runs failed" in said
    assert "store.ddr=1,train.seed=0: status 1: " in said
    (row,) = json.loads((tmp_path / "out" / "sweep.json").read_text())
    twin = trainer.train(config_of(tmp_path, "twin"))
    assert (row["store.ddr"], row["AUC"], row["log loss"]) == ("64MiB", twin.test.auc, twin.test.log_loss)
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
    best = min(groups_of(runs), key=lambda group: group.measured["log loss"].mean)
    size, ddr = map(html.escape, best.labels.values())
    assert f"with train.batch_size = {size}, store.ddr = {ddr}</p>" in page
    assert "<svg" not in sweep_page("none yet", runs_of(run_file, tmp_path / "none", [seed_axis(0, 1)]))
