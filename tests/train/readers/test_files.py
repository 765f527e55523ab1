"""Which files are a data set: those that pyarrow takes; and what a run that goes on says of others."""

import bz2
import dataclasses
import gzip

import numpy as np
import pytest

from tierstore.errors import TierstoreError
from tierstore.train import train, trainer
from tierstore.train.config import DataSection, EmbeddingSection, RunConfig, StoreSection, TrainSection
from tierstore.train.readers import DataError, FeatureHasher, Schema, arrow, open_reader

from .rows import values_of

pa = pytest.importorskip("pyarrow")
ds = pytest.importorskip("pyarrow.dataset")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Schema(label="y", dense=(), sparse=("c",))


def write(path, *ids):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"y": [1] * len(ids), "c": pa.array(ids, pa.int64())}), path)
    else:
        text = "".join(["y,c\n", *(f"1,{each}\n" for each in ids)]).encode()
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress, ".lz4": lz4}.get(path.suffix, bytes)(text))


def lz4(text):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(text)
    return sink.getvalue().to_pybytes()


def ids_of(path, **options):
    chunks = open_reader(path, schema=SCHEMA, **options).read_chunks(0, None, 9)
    return [each for chunk in chunks for each in values_of(chunk.categories).tolist()]


def test_a_folder_is_read_as_pyarrow_reads_it(tmp_path, caplog):
    names = ["b", "a/z", "day=1/x", "day=10/x", "day=2/x", "c.parquet/part-0"]
    hidden = [".half", "_old", "._b", "_temporary/x", ".d/x"]
    for number, name in enumerate([*names, *hidden]):
        write(tmp_path / f"{name}.parquet", number)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".b.parquet.crc").write_bytes(b"crc")
    pq.ParquetWriter(tmp_path / "empty.parquet", pa.schema([("y", pa.int64()), ("c", pa.int64())])).close()
    wanted = ds.dataset(tmp_path, format="parquet").to_table(columns=["c"])["c"].to_pylist()
    assert len(wanted) == len(names)
    assert ids_of(tmp_path) == wanted
    assert "7 files are read; left out: ._b.parquet, .half.parquet, _old.parquet" in caplog.text
    assert "SUCCESS" not in caplog.text


def test_endings_of_any_size_and_what_is_left_out(tmp_path, caplog):
    for number, name in enumerate(["a.csv", "b.CSV", "c.csv.lz4", "d.Csv.Gz", "e.csv.bz2", "f.csv"]):
        write(tmp_path / name, number)
    (tmp_path / "f.csv").rename(tmp_path / "f.csv.gz")  # compression is told by the first bytes
    assert ids_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert not caplog.text
    write(tmp_path / "d.txt", 9)
    (tmp_path / "linked").symlink_to(tmp_path)
    ids_of(tmp_path)
    assert f"{tmp_path}: 6 files are read; left out: d.txt, linked" in caplog.text
    write(tmp_path / "a.parquet", 1)
    with pytest.raises(DataError, match=r"holds both Parquet and CSV files; set data\.format"):
        open_reader(tmp_path, schema=SCHEMA)
    assert ids_of(tmp_path, data_format="csv") == [0, 1, 2, 3, 4, 5]


def test_what_no_format_takes_is_named(tmp_path):
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day_0").write_text("1\n")
    write(tmp_path / "day=1" / "x.parquet", 1)
    with_day = Schema(label="y", dense=(), sparse=("c", "day"))
    for path, options, reason in (
        (tmp_path / "days", {}, r"but day_0; Criteo's text format is one file: name one of the days"),
        ("nix://bucket/x.parquet", {}, "Protocol not known: nix"),
        (tmp_path, {"schema": with_day}, r"lacks the columns day; .*Names of folders are not read as columns"),
        (tmp_path, {"schema": SCHEMA, "quoting": False}, r"data\.quoting = false is for CSV; .* is read as parquet"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_reader(path, **options)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_data_at_a_url_is_read_as_a_file_here_and_again_when_it_changed(tmp_path, monkeypatch, kind):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, there = f"{kind}://{tmp_path}/there", fsspec.filesystem(kind)
    schema = Schema(label="y", dense=("x",), sparse=("c",))
    for rows in (2, 3):
        there.makedirs(f"{tmp_path}/there/b", exist_ok=True)
        there.pipe({f"{tmp_path}/there/{name}.csv": b"y,x,c\n" + b"1,2,3\n" * rows for name in ("a", "b/c")})
        for place, count in ((url, 2 * rows), (f"{url}/a.csv", rows), (f"{url}/b/c.csv", rows)):
            (chunk,) = open_reader(place, schema=schema).read_chunks(0, None, 100)
            assert len(chunk.labels) == count
            before = sorted((tmp_path / "cache").rglob("*"))
            assert open_reader(place, schema=schema).schema == schema
            assert sorted((tmp_path / "cache").rglob("*")) == before
            assert bool(before) == (kind == "memory")
        assert len([*(tmp_path / "cache").glob("tierstore/*/*")]) == 3 * (kind == "memory"), "one state of each"


@pytest.mark.parametrize("kind", ["cut short", "changed meanwhile", "refused", "nothing"])
def test_a_copy_of_data_is_whole_or_none(tmp_path, monkeypatch, kind):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there, url = fsspec.filesystem("memory"), f"memory://user:secret@{tmp_path}/there?key=secret"
    (_, folder), get = fsspec.core.url_to_fs(url), type(there).get
    there.pipe({f"{folder}/{name}.csv": b"y,c\n1,2\n" for name in "ab"} if kind != "nothing" else {})

    def failing(self, place, target, **options):
        if kind == "refused":
            raise RuntimeError(f"no credentials for {url}")
        get(self, place, target, **options)
        there.pipe(f"{folder}/b.csv", b"y,c\n1,2\n1,3\n")
        if kind == "cut short":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(there), "get", failing)
        with pytest.raises((TierstoreError, KeyboardInterrupt)) as failed:
            open_reader(url, schema=SCHEMA)
    assert "secret" not in str(failed.value)
    said = {
        "refused": "check the URL, the cred",
        "changed meanwhile": "changed while",
        "nothing": "there is nothing at ",
    }
    assert said.get(kind, "") in str(failed.value)
    assert not [*(tmp_path / "cache").glob("tierstore/*/*")]
    if kind != "nothing":
        assert len(ids_of(url, data_format="csv")) == (2 if kind == "refused" else 3)
        there.rm(folder, recursive=True)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_errors_of_a_batch_name_the_file_and_its_row(tmp_path, ending):
    for number, ids in enumerate(([1, 2, 3], [4], [5, 600, 7])):
        write(tmp_path / f"{number}.{ending}", *ids)
    reader = open_reader(tmp_path, schema=SCHEMA)
    for options in ({"start_row": 0}, {"start_row": 2}, {"start_row": 5}, {"part": 1, "parts": 2}):
        with pytest.raises(DataError, match=rf"2\.{ending}, row 1, column c: category 600"):
            list(reader.batches(FeatureHasher([100], mode="mod"), batch_size=2, **options))


@pytest.mark.parametrize("groups", [1, 30])
def test_parquet_is_held_a_part_at_a_time(tmp_path, monkeypatch, groups):
    monkeypatch.setattr(arrow, "_RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(arrow, "_BUFFER_BYTES", 1 << 16)
    rows = 150_000
    columns = {f"c{i}": np.arange(rows) * (2 * i + 1) for i in range(4)}
    table = pa.table({"y": np.ones(rows, np.int8)} | columns)
    size = table.nbytes
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=rows // groups, compression="none", use_dictionary=False)
    del table
    before = pa.total_allocated_bytes()
    reader = open_reader(path, schema=Schema(label="y", dense=(), sparse=tuple(columns)))
    held = [pa.total_allocated_bytes() - before for _ in reader.read_chunks(0, None, 10_000)]
    assert len(held) == 15
    assert max(held) < size // 2


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that broke off at row 8 of 20, in two files."""
    for number in range(2):
        write(tmp_path / "data" / f"{number}.parquet", *range(10))
    config = RunConfig(
        store=StoreSection(path=str(tmp_path / "store"), ddr="8MiB"),
        data=DataSection(path=str(tmp_path / "data"), label_column="y", dense_columns=(), sparse_columns=("c",)),
        embedding=EmbeddingSection(dim=2, num_embeddings=30),
        train=TrainSection(batch_size=4, commit_every=1),
    )
    step = trainer.train_step
    steps = iter(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", lambda *given: step(*given) if next(steps) < 2 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: write(data / "1.parquet", 1), r"'1\.parquet' of .* and 1 rows in place of '1\.parquet' of .* 10"),
        (lambda data: (data / "1.parquet").unlink(), r"no file in place of '1\.parquet'"),
        (lambda data: write(data / "2.parquet", 1), r"'2\.parquet' .* in place of no file"),
    ],
)
def test_a_run_goes_on_over_the_same_files_only(stopped, tmp_path, change, message):
    change(tmp_path / "data")
    with pytest.raises(DataError, match=rf"is not what it was when the run stood at row \d+: there is {message}"):
        train(stopped, resume=True)
    anyway = dataclasses.replace(stopped, data=dataclasses.replace(stopped.data, check_files=False))
    assert train(anyway, resume=True).epochs == 1


def test_data_may_move_and_between_epochs_change(stopped, tmp_path):
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    config = dataclasses.replace(stopped, data=dataclasses.replace(stopped.data, path=str(moved)))
    assert train(config, resume=True).epochs == 1
    write(moved / "3.parquet", 1, 2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    assert train(config, resume=True).epochs == 2
