"""Runs and readers that follow a folder: each row once, in order, whatever comes when and whoever is killed."""

import dataclasses
import itertools
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.children import run as run_child
from tests.serve.loops import wait_for
from tierstore.cli import entry as cli
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.settings.sections import ConfigError
from tierstore.train import train
from tierstore.train.readers import DataError, FeatureHasher, FollowingReader, following
from tierstore.train.summary import run_page

from .followed import BEGIN, ENDINGS, SCHEMA, config_of, put, rows_of

HASHER = FeatureHasher([100, 100])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(following, "_LIST_SHARE", -1)
    path = tmp_path / "in"
    path.mkdir()
    return path


def reader_of(folder: Path, position: Any = None, **options: Any) -> FollowingReader:
    reader = FollowingReader(folder, **{"schema": SCHEMA, "settle_seconds": 0.0, **options})
    if position is not None:
        reader.seek(json.loads(json.dumps(position)))
    return reader


def taken(reader: FollowingReader, *, size: int = 10) -> list[int]:
    """Numbers of the rows, until nothing came three times."""
    rows, ticks = list[int](), 3
    for batch in reader.batches(HASHER, batch_size=size, log_dense=False):
        rows += map(int, batch.dense[:, 0])
        ticks -= not batch.total_rows
        if not ticks:
            break
    return rows


@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_that_follows_ends_in_the_bits_of_one_over_all_rows(tmp_path, folder, depth):
    """Files of each format come when they may; batches go on from one to the next."""
    counts = [5, 40, 0, 16, 33, 1, 70, 11]
    begins = list(itertools.accumulate(counts, initial=0))
    put(tmp_path / "whole", "all.parquet", rows_of(0, begins[-1]))
    expected = train(config_of(tmp_path / "whole", tmp_path / "plain", data__follow=False), bits=True)

    def write() -> None:
        for number, (first, count) in enumerate(zip(begins, counts, strict=False)):
            put(folder, f"{number}{ENDINGS[number % (4 if count else 2)]}", rows_of(first, count))
            time.sleep(0.05 * (number % 3))
        (folder / "_END").touch()

    writer = threading.Thread(target=write)
    writer.start()
    found = train(config_of(folder, tmp_path / "followed", train__prefetch_depth=depth), bits=True)
    writer.join()
    assert (found.bits, found.rows, found.step) == (expected.bits, begins[-1], expected.step)
    with tierstore.open(found.store) as store:
        assert store.stats().event_time == store.stats().to_dict()["event_time"] == BEGIN + begins[-1] - 1
        extra = store.extra
        assert "event_time" not in extra["tierstore.train"]["position"], "it is there once"
        extra["tierstore.train"]["position"]["event_time"] = BEGIN  # as runs of before have it
        store.commit(extra=extra, tensors=store.tensors())
    assert train(config_of(folder, tmp_path / "followed"), resume=True).rows == 0
    put(folder, "9.parquet", rows_of(0, 16))  # of earlier times
    assert train(config_of(folder, tmp_path / "followed"), resume=True).rows == 16
    with tierstore.open(found.store, mode="r") as store:
        assert store.stats().event_time == BEGIN + begins[-1] - 1


@pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")
@pytest.mark.parametrize(("kills", "seed"), [(6, 1), pytest.param(100, 2, marks=pytest.mark.soak)])
def test_after_kills_each_row_was_trained_once(tmp_path, kills, seed):
    code = "import json; from tests.train.followed import *; "
    code += "print(json.dumps(follow_through_kills(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))"
    told = json.loads(run_child(code, tmp_path, kills, seed, timeout=1800).splitlines()[-1])
    assert told["found"] == told["expected"]
    assert told["gone"] > kills / 10


def test_it_ends_goes_on_and_knows_what_it_has_read(tmp_path, folder, caplog):
    """By a marker, by a time. A position is one of JSON, and files behind it may go."""
    for number in range(3):
        put(folder, f"{number}.csv", rows_of(10 * number, 10))
    waiting = itertools.islice(reader_of(folder).batches(HASHER, batch_size=8), 5)
    assert [(len(batch), batch.position["row"]) for batch in waiting] == [(8, 8), (8, 6), (8, 4), (0, 4), (0, 4)]
    batches = list(reader_of(folder, until=time.time()).batches(HASHER, batch_size=8))
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    assert batches[2].event_time == BEGIN + 23
    for batch, left in zip(batches, (22, 14, 6, 0), strict=True):
        assert taken(reader_of(folder, batch.position, until=time.time())) == [*range(30 - left, 30)]
    (folder / "0.csv").unlink()
    put(folder, "3", rows_of(30, 5))
    (folder / "_END").touch()
    assert taken(reader_of(folder, batches[1].position)) == [*range(16, 35)]
    config = config_of(folder, tmp_path / "store", data__late_files="skip")
    assert (train(config).rows, train(config, resume=True).rows) == (25, 0)
    assert "no file came" in train(config, resume=True).describe()
    put(folder, "4.parquet", rows_of(35, 7))
    assert train(config, resume=True).rows == 7
    put(folder, "35.parquet", rows_of(42, 7))
    assert train(config, resume=True).rows == 0
    assert "35.parquet came late: 4.parquet" in caplog.text


def test_files_that_are_not_whole_are_waited_for_then_refused(folder, caplog):
    cut = put(folder, "1.parquet", rows_of(10, 10)).read_bytes()[:-4]
    waiting = [".0.parquet", "_0.parquet", "0.parquet.part", "0.part.csv", "0_tmp.parquet", "_tmp/0.parquet"]
    for name in (*waiting, "0.json", "1.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(cut)
    (folder / "0.parquet").write_bytes(cut)
    put(folder, "0.part.7.parquet", rows_of(5, 5))
    reader = reader_of(folder, late="skip")
    (folder / "day").symlink_to(folder.parent)
    assert taken(reader) == []
    left_out = [each.getMessage().split()[0] for each in caplog.records]
    assert left_out == [str(folder / "0.json"), str(folder / "day")], "files of an ending, and folders, are named once"
    put(folder, "0.parquet", rows_of(0, 5))
    assert taken(reader) == [*range(20)]
    (folder / "2.parquet").write_bytes(b"PAR1")
    put(folder, "3.parquet", rows_of(20, 10))
    assert taken(reader) == []
    os.utime(folder / "2.parquet", (1, time.time() - 61))
    with pytest.raises(DataError, match=r"2.parquet has no Parquet footer, and has not changed for 61 s.*late_files"):
        taken(reader_of(folder))
    assert taken(reader) == [*range(20, 30)]
    assert "2.parquet has no Parquet footer" in caplog.text
    put(folder, "4.csv", rows_of(30, 10))
    slow = reader_of(folder, late="skip", settle_seconds=0.5)
    assert taken(slow) == [*range(30)]
    time.sleep(0.5)
    assert taken(slow) == [*range(30, 40)]


def test_by_time_all_that_comes_later_waits_for_a_file_that_is_not_whole(folder):
    cut = put(folder, "z.parquet", rows_of(0, 10)).read_bytes()[:-4]
    (folder / "z.parquet").write_bytes(cut)
    put(folder, "a.parquet", rows_of(10, 10))
    reader = reader_of(folder, order="time", settle_seconds=30.0)
    assert taken(reader) == []
    put(folder, "b.parquet", rows_of(20, 10))
    assert taken(reader) == []
    put(folder, "z.parquet", rows_of(0, 10))
    path = put(folder, "c.csv", rows_of(30, 10))
    assert taken(reader) == [*range(30)]
    (folder / "d.parquet").write_bytes(cut)
    os.utime(path, (1, time.time() - 31))
    assert taken(reader) == [*range(30, 40)], "it came before"


def test_by_time_those_that_came_together_wait_for_each_that_is_not_whole(folder):
    for number in (2, 1):
        cut = put(folder, f"{number}.parquet", rows_of(10 * number, 10)).read_bytes()[:-4]
        (folder / f"{number}.parquet").write_bytes(cut)
    put(folder, "3.parquet", rows_of(0, 10))
    reader = reader_of(folder, order="time")
    for number in (1, 2):
        assert taken(reader) == []
        put(folder, f"{number}.parquet", rows_of(10 * number, 10))
    assert taken(reader) == [*range(30)]


def test_by_time_one_that_a_listing_missed_is_waited_for_by_those_of_that_listing(folder, monkeypatch):
    for number in range(3):
        path = put(folder, f"{number}.parquet", rows_of(10 * number, 10))
        if number == 1:
            path.write_bytes(path.read_bytes()[:-4])
    listings = iter([["0.parquet"], ["0.parquet", "2.parquet"]])
    monkeypatch.setattr(
        following, "names_below", lambda _, real=following.names_below: next(listings, None) or real(folder)
    )
    reader = reader_of(folder, order="time")
    assert taken(reader) == []
    put(folder, "1.parquet", rows_of(10, 10))
    assert taken(reader) == [*range(30)]


@pytest.mark.parametrize("missed", [["02"], ["0", "02"]])
@pytest.mark.parametrize("order", ["name", "time"])
def test_a_file_that_a_listing_misses_as_others_are_renamed_in_is_not_late(folder, monkeypatch, order, missed):
    """A listing is no snapshot: of two files that come, it may have the later one alone."""
    for number in range(3):
        put(folder, f"{number}.parquet", rows_of(10 * number, 10))
    listings = iter([[f"{number}.parquet" for number in numbers] for numbers in ["0", "0", *missed]])
    monkeypatch.setattr(following, "names_below", lambda _, real=following.names_below: next(listings, real(folder)))
    assert taken(reader_of(folder, order=order)) == [*range(30)]


def test_a_file_that_others_wait_for_a_minute_is_named_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(following, "_STALL_SECONDS", 0.02)
    path = put(folder, "1.csv", rows_of(0, 10))
    os.utime(path, (1, time.time() + 3600))
    reader = reader_of(folder)
    for _ in range(3):
        assert taken(reader) == []
    assert caplog.messages == [f"{path} is not whole, or of a future time: finish or touch it; others wait"]


@pytest.mark.parametrize("order", ["name", "time"])
def test_files_come_late_by_name_or_by_time(folder, order, caplog):
    names = ["b.parquet", "a.csv", "c", "0.parquet"] if order == "time" else ["a.parquet", "b.csv", "c", "d.parquet"]
    for number in (2, 0):
        put(folder, names[number], rows_of(10 * number, 10))
    put(folder, "bb.parquet", rows_of(0, 0))
    reader = reader_of(folder, order=order)
    assert taken(reader) == [*range(10), *range(20, 30)]
    put(folder, names[3], rows_of(30, 10))
    again = reader_of(folder, reader._position, order=order)
    assert taken(again) == [*range(30, 40)]
    put(folder, names[1], rows_of(10, 10))
    for late in (reader, again):
        with pytest.raises(DataError, match=rf"{names[1]} came late: \S+, which is behind it in order, was read"):
            taken(late)
    assert taken(reader_of(folder, again._position, order=order, late="skip")) == []
    assert f"{names[1]} came late" in caplog.text
    if order == "name":  # of files that were read before those that it remembers it says nothing
        caplog.clear()
        short = reader._position | {"recent": reader._position["recent"][-1:], "is_cut": True}
        resumed = reader_of(folder, short, late="skip")
        assert taken(resumed) == [*range(30, 40)]
        assert "late" not in caplog.text
        put(folder, "0.csv", rows_of(0, 10))
        assert taken(resumed) == []
        assert "0.csv came late" in caplog.text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_files_before_all_that_it_remembers_are_late_unless_it_forgot_some(folder, monkeypatch, count):
    monkeypatch.setattr(following, "_REMEMBERED", 2)
    for number in range(count):
        put(folder, f"b{number}.csv", rows_of(10 * number, 10))
    reader = reader_of(folder)
    assert taken(reader) == [*range(10 * count)]
    put(folder, "a.csv", rows_of(0, 10))
    resumed = reader_of(folder, reader._position)
    if count > 2:
        assert taken(resumed) == []
    else:
        with pytest.raises(DataError, match=r"a.csv came late"):
            taken(resumed)


@pytest.mark.parametrize("order", ["name", "time"])
def test_what_comes_as_a_run_resumes_or_later_is_late_whatever_was_read_before(folder, monkeypatch, order):
    monkeypatch.setattr(following, "_REMEMBERED", 2)
    for number in range(4):
        put(folder, f"b{number}.csv", rows_of(10 + 10 * number, 10))
    reader = reader_of(folder, order=order)
    assert taken(reader) == [*range(10, 50)]
    resumed = reader_of(folder, reader._position, order=order)
    for name in ("b0.csv", "b2.csv"):
        (folder / name).unlink()
        assert taken(resumed) == []
        put(folder, name, rows_of(0, 10))
        with pytest.raises(DataError, match=rf"{name} came late"):
            taken(resumed)

    def list_as_one_comes(path: Path, list_: Any = following.names_below) -> Any:
        found = list_(path)
        if not (folder / "a.csv").exists():
            put(folder, "a.csv", rows_of(0, 10))
        return found

    monkeypatch.setattr(following, "names_below", list_as_one_comes)
    resumed.seek(reader._position)
    with pytest.raises(DataError, match=r"a.csv came late"):
        taken(resumed)


def test_while_nothing_comes_there_are_no_rows_whatever_columns_are(folder):
    schema = dataclasses.replace(SCHEMA, group="day", segment="city")
    batch = next(reader_of(folder, schema=schema).batches(HASHER, batch_size=4))
    assert (len(batch), [each.shape for each in batch.keys]) == (0, [(0,), (0,)])


def test_what_cannot_be_read_in_full_is_an_error(folder, tmp_path):
    put(folder, "1.csv", rows_of(10, 10))
    for count, found in ((0, "0 bytes"), (12, r"\d+ bytes, and had \d+ when the run stood at its row 4")):
        put(folder, "0.csv", rows_of(0, 10))
        position = next(reader_of(folder).batches(HASHER, batch_size=4)).position
        put(folder, "0.csv", rows_of(0, count)) if count else (folder / "0.csv").unlink()
        with pytest.raises(DataError, match=rf"0.csv has {found}.*check_files=false"):
            taken(reader_of(folder, position))
    (folder / "0.csv").unlink()
    assert taken(reader_of(folder, position, checks_files=False)) == [*range(10, 20)]
    batches = reader_of(folder).batches(HASHER, batch_size=4)
    next(batches)
    with (folder / "1.csv").open("a") as file:
        file.write("1,1,1,1,1\n")
    with pytest.raises(DataError, match=r"1.csv grew while it was read"):
        list(batches)
    columns = rows_of(10, 10)
    put(folder, "1.csv", columns | {"at": columns["at"] * 1000})
    with pytest.raises(DataError, match=r"1.csv .*event times in at are from 1.7e\+12 .* not milliseconds"):
        taken(reader_of(folder))
    put(folder, "1.csv", columns | {"at": columns["at"] * math.nan})
    with pytest.raises(DataError, match=r"1.csv, row 0: no event time"):
        taken(reader_of(folder, order="time"))
    assert next(reader_of(folder).batches(HASHER, batch_size=4)).event_time is None
    for key, choices in (("order", "name, time"), ("late", "error, skip")):
        with pytest.raises(ValueError, match=f"{key}='Time' is not one of {choices}"):
            reader_of(folder, **{key: "Time"})
    with pytest.raises(DataError, match=r"none is no folder: make it"):
        reader_of(tmp_path / "none")
    for key, message in (("data__shuffle_rows", "data.follow = True"), ("train__epochs", "train.epochs = 16")):
        with pytest.raises(ConfigError, match=rf"{message}: expected"):
            config_of(folder, tmp_path / "store", **{key: 16})


def test_a_silent_folder_is_committed_once_by_time_and_ctrl_c_ends_at_once(tmp_path, folder):
    put(folder, "0.parquet", rows_of(0, 64))
    told, counts = tmp_path / "run.jsonl", list[float]()

    def stop() -> None:
        wait_for(lambda: told.exists() and '"commit"' in told.read_text())
        for _ in range(2):
            time.sleep(0.5)
            counts.append(told.read_text().count('"commit"'))
        counts.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    changes = {"train__commit_every": 0, "train__commit_seconds": 0.2, "train__metrics": str(told)}
    summary = train(config_of(folder, tmp_path / "store", **changes))
    assert time.monotonic() - counts.pop() < 1
    assert counts[0] == counts[1] <= summary.version <= counts[0] + 1
    assert (summary.interrupted, summary.rows, summary.history[-1].dated_commits) == (True, 64, summary.version)
    assert "From the newest event to its commit" in run_page("run", {"run": summary.to_dict()})
    assert cli._TRAIN_FLAGS["--until"][1]("2026-12-01T18:00+00:00") == 1796148000
