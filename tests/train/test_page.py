"""The page of runs: their figures, and nothing from a network."""

import functools
import json
import re
from html import unescape

import pytest

from tierstore import cli
from tierstore.pool.stats import Stats, TierStats
from tierstore.settings.sections import to_toml
from tierstore.train.history import Point
from tierstore.train.metrics import Evaluation
from tierstore.train.report import run_page
from tierstore.train.summary import Summary

from .runs import config_of

STEPS = 40
HOSTILE = "<script>alert('a')</script> & \"co\""


def made_run(*, hbm=0, hits=70, samples_per_second=123_456.0):
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
        seconds=STEPS / 8, samples_per_second=samples_per_second, loss=0.1, test=Evaluation(10, 0.8125, 0.4375),
        tiers=Stats(
            TierStats(hits=90, unique=100, capacity_rows=hbm),
            TierStats(hits=hits, unique=100, capacity_rows=8, bytes=2048),
            TierStats(bytes_read=3072 * STEPS, bytes_written=5120 * STEPS),
        ),
        start_bytes=1, end_bytes=1, peak_rss_bytes=1, bits="0123456789abcdef0123", history=history,
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
