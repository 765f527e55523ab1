"""Does reading one's own data keep up with training?

Samples have the shape of MLPerf's DLRM-v2: 13 dense columns, 26 tables, 214 ids a sample in bags of 1 to 100. They are
read from Parquet and npy, alone and by a training run; the limit is that run over batches that lie in memory. Then one
id a column, as in Criteo's own data, in every format. Last a large file of Parquet, each time by a process of its own:
rows/s beside pyarrow's datasets, and the memory that it takes.
"""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from tierstore.plan.workload import load_workload
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.config import DataSection, EmbeddingSection, RunConfig, StoreSection, TrainSection
from tierstore.train.readers import Batch
from tierstore.train.trainer import feed, train_step

from .common import Goal, Report, Run, Table, fresh_folder, measure, per_second, start
from .data import ROOT
from .workload import ids_of

_NUM_DENSE: Final = 13
_TABLES: Final = load_workload("mlperf-dlrm-v2").tables
_BAGS: Final = [int(table.pooling_factor) for table in _TABLES]
_NAMES: Final = [f"C{i}" for i in range(1, len(_BAGS) + 1)]
_READY: Final = "batches in memory"
_PYARROW: Final = "pyarrow.dataset"

Ids = NDArray[np.int64]
Rates = dict[str, dict[str, float]]
"""Samples/s by the reader's name."""


class _Data:
    """Samples in memory, and as files of each format."""

    def __init__(self, config: dict[str, Any], folder: Path, bags: Sequence[int]) -> None:
        self.count: int = config["samples"]
        self.sizes = tuple(max(1, table.num_embeddings // config["scale"]) for table in _TABLES)
        self.folder = folder
        folder.mkdir(parents=True)
        generator = np.random.default_rng(config["seed"])
        self.labels = generator.integers(0, 2, self.count).astype(np.float32)
        self.dense = generator.integers(0, 1000, (self.count, _NUM_DENSE)).astype(np.float32)
        self.ids: list[Ids] = [
            ids_of(generator, size, self.count * bag, config["exponent"]).reshape(self.count, bag)
            for size, bag in zip(self.sizes, bags, strict=True)
        ]

    def _table(self, column: Callable[[Ids], Any]) -> pa.Table:
        columns = {"label": self.labels} | {f"I{i + 1}": each for i, each in enumerate(self.dense.T)}
        return pa.table(columns | {name: column(ids) for name, ids in zip(_NAMES, self.ids, strict=True)})

    def parquet(self, name: str, column: Callable[[Ids], Any]) -> Path:
        path = self.folder / f"{name}.parquet"
        pyarrow.parquet.write_table(self._table(column), path)
        return path

    def csv(self) -> Path:
        path = self.folder / "x.csv"
        pyarrow.csv.write_csv(self._table(np.ravel), path)
        return path

    def criteo(self) -> Path:
        path = self.folder / "x.tsv"
        rows = zip(self.labels.astype(int).tolist(), self.dense.astype(int).tolist(), np.hstack(self.ids), strict=True)
        lines = ["\t".join([str(label), *map(str, dense), *(f"{i:x}" for i in ids)]) for label, dense, ids in rows]
        path.write_text("\n".join([*lines, ""]))
        return path

    def npy(self, *, offsets: bool) -> Path:
        folder = self.folder / f"npy-{offsets}"
        folder.mkdir()
        np.save(folder / "label.npy", self.labels)
        np.save(folder / "dense.npy", self.dense)
        for name, ids in zip(_NAMES, self.ids, strict=True):
            np.save(folder / f"{name}.npy", ids.ravel() if offsets else ids)
            if offsets:
                np.save(folder / f"{name}.offsets.npy", np.arange(self.count + 1) * ids.shape[1])
        return folder


def _lists(ids: Ids) -> pa.Array:
    return pa.ListArray.from_arrays(np.arange(len(ids) + 1, dtype=np.int32) * ids.shape[1], ids.ravel())


def _strings(ids: Ids) -> pa.Array:
    return pa.array([f"{i:08x}" for i in ids.ravel().tolist()])


def _config(data: _Data, path: Path, dim: int, batch: int, store: Path) -> RunConfig:
    return RunConfig(
        store=StoreSection(path=str(store), ddr="300% of tables"),
        data=DataSection(path=str(path)),
        embedding=EmbeddingSection(dim=dim, num_embeddings=data.sizes),
        train=TrainSection(batch_size=batch),
    )


def _batches(config: RunConfig) -> Iterable[Batch]:
    reader, hasher = open_data(config)
    return reader.batches(hasher, batch_size=config.train.batch_size)


def _read(config: RunConfig) -> None:
    for _ in _batches(config):
        pass


def _decode(path: Path) -> None:
    """What pyarrow needs for the columns alone."""
    with pyarrow.parquet.ParquetFile(path) as parquet:
        for _ in parquet.iter_batches(8192, use_threads=False):
            pass


def _rates(count: int, actions: dict[str, Callable[[], object]], repetitions: int) -> Rates:
    seconds = measure(actions, repetitions=repetitions, warm_up=1)
    return {name: per_second(count, values) for name, values in seconds.items()}


def _alone(data: _Data, paths: dict[str, Path], config: dict[str, Any]) -> Rates:
    """Of each reader alone, and of decoding Parquet."""
    actions: dict[str, Callable[[], object]] = {}
    for name, path in paths.items():
        actions[name] = partial(_read, _config(data, path, 16, config["batch"], data.folder))
        if path.suffix == ".parquet":
            actions[f"{name}: decoding by pyarrow, one thread"] = partial(_decode, path)
    return _rates(data.count, actions, config["repetitions"])


def _trained(data: _Data, paths: dict[str, Path], config: dict[str, Any], dim: int) -> Rates:
    """Of a run over each format, and over the same batches in memory."""
    first = _config(data, next(iter(paths.values())), dim, config["batch"], data.folder / f"store-{dim}")
    ready = list(_batches(first))
    with open_run_store(first) as store:
        run = build_run(first, store)

        def epoch(batches: Iterable[Batch]) -> None:
            with contextlib.closing(feed(run, iter(batches), depth=first.train.prefetch_depth)) as ahead:
                for batch in ahead:
                    train_step(run, batch)

        actions: dict[str, Callable[[], object]] = {_READY: lambda: epoch(ready)}
        for name, path in paths.items():
            own = replace(first, data=replace(first.data, path=str(path)))
            actions[name] = lambda own=own: epoch(_batches(own))  # type: ignore[misc]
        return _rates(data.count, actions, config["repetitions"])


_WHOLE: Final = """
import json, sys, time
from pathlib import Path
import pyarrow.dataset
from tierstore.train.readers import Schema, open_reader
path, columns, reader = sys.argv[1], tuple(f"C{i}" for i in range(1, int(sys.argv[2]) + 1)), sys.argv[3]
began = time.perf_counter()
if reader == "tierstore":
    chunks = open_reader(path, schema=Schema(label="label", dense=(), sparse=columns)).read_chunks(0, None, 8192)
    rows = sum(len(chunk.labels) for chunk in chunks)
else:
    rows = sum(len(batch) for batch in pyarrow.dataset.dataset(path).to_batches(columns=["label", *columns]))
speed = rows / (time.perf_counter() - began)
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([speed, int(status["VmHWM"].split()[0]) << 10]))  # of getrusage the parent's peak would be part
"""
"""Rows/s and peak memory of a process that reads a file."""
_WHOLE_COLUMNS: Final = 10


def _write_whole(path: Path, rows: int, groups: int) -> Path:
    counted = np.arange(rows)
    columns = {f"C{i}": counted * (2 * i + 1) % 1_000_003 for i in range(1, _WHOLE_COLUMNS + 1)}
    table, group_rows = pa.table({"label": (counted % 2).astype(np.int8)} | columns), -(-rows // groups)
    pyarrow.parquet.write_table(table, path, row_group_size=group_rows, compression="none", use_dictionary=False)
    return path


def _whole(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """A large file in one row group and in many, and a small one, by us and by pyarrow in turns."""
    rows, groups = config["whole_rows"], config["whole_groups"]
    files = {"small": (rows // 100, 1), "one row group": (rows, 1), f"{groups} row groups": (rows, groups)}
    results = []
    for name, (count, parts) in files.items():
        path = _write_whole(folder / "whole.parquet", count, parts)
        found: dict[str, list[list[float]]] = {_PYARROW: [], "tierstore": []}
        for reader in (*found,) * config["whole_repetitions"]:
            command = [sys.executable, "-c", _WHOLE, str(path), str(_WHOLE_COLUMNS), reader]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            found[reader].append(json.loads(done.stdout))
        for reader, runs in found.items():
            speed, peak = map(statistics.median, zip(*runs, strict=True))
            file = {"file": name, "bytes": path.stat().st_size}
            results.append(file | {"reader": reader, "rows_per_s": speed, "peak": peak})
        path.unlink()
    return results


def _whole_goals(results: list[dict[str, Any]]) -> Iterator[Goal]:
    (_, small), *files = zip(results[::2], results[1::2], strict=True)
    for peer, own in files:
        share, more = own["rows_per_s"] / peer["rows_per_s"], round((own["peak"] - small["peak"]) / 2**20)
        yield Goal(f"rows/s of a file in {own['file']}, of {_PYARROW}", round(share, 3), at_least=0.9)
        yield Goal(f"MiB of memory for a file in {own['file']}, more than for a small one", more, at_most=128)


def _whole_table(results: list[dict[str, Any]]) -> Table:
    rows = []
    for own in results:
        sizes = f"{own['bytes'] >> 20}", f"{own['peak'] / 2**20:,.0f}"
        rows.append([own["file"], sizes[0], own["reader"], f"{own['rows_per_s']:,.0f}", sizes[1]])
    columns = ["file", "MiB", "read by", "rows/s", "peak memory, MiB"]
    return Table("a large Parquet file, each time by a new process", columns, rows)


def _row(cells: Sequence[str], rate: dict[str, float], *more: str) -> list[str]:
    return [*cells, f"{rate['median']:,.0f}", f"{rate['lowest']:,.0f} - {rate['highest']:,.0f}", *more]


def _readers(title: str, rates: Rates) -> Table:
    rows = [_row([name], rate) for name, rate in rates.items()]
    return Table(f"readers alone: {title}", ["read", "samples/s", "lowest - highest"], rows)


def _runs(batch: int, trained: dict[int, Rates], alone: Rates) -> Table:
    rows = []
    for dim, rates in trained.items():
        for name, rate in rates.items():
            faster = f"{alone[name]['median'] / rate['median']:.1f}" if name in alone else ""
            share = f"{rate['median'] / rates[_READY]['median']:.2f}"
            rows.append(_row([str(dim), name], rate, share, faster))
    columns = ["dim", "read from", "samples/s", "lowest - highest", "of batches in memory", "reader alone, faster by"]
    return Table(f"training on them, all rows in memory, batches of {batch:,}", columns, rows)


def run(request: Run) -> Report:
    config, folder = request.config, request.folder
    with fresh_folder(folder / "reading") as many_folder, fresh_folder(folder / "reading-one") as one_folder:
        many = _Data(config, many_folder, _BAGS)
        paths = {
            "Parquet, lists": many.parquet("lists", _lists),
            "npy, [N, K]": many.npy(offsets=False),
            "npy, offsets": many.npy(offsets=True),
        }
        alone = _alone(many, paths, config)
        trained = {dim: _trained(many, paths, config, dim) for dim in config["dims"]}
        one = _Data(config, one_folder, [1] * len(_BAGS))
        one_paths = {
            "Criteo's text": one.criteo(),
            "CSV": one.csv(),
            "Parquet, integers": one.parquet("integers", np.ravel),
            "Parquet, strings": one.parquet("strings", _strings),
            "npy, [N]": one.npy(offsets=False),
        }
        single = _alone(one, one_paths, config)
        whole = _whole(one.folder, config)
    shares = {
        f"run from {name}, dim {dim}, of the run over batches in memory": own[name]["median"] / own[_READY]["median"]
        for dim, own in trained.items()
        for name in paths
    }
    note = (
        f"{config['samples']:,} samples; tables of MLPerf's sizes divided by {config['scale']}, ids by Zipf's law "
        f"with exponent {config['exponent']}; the small DLRM of a run file's defaults, so that steps are short. A "
        "reader alone runs in one thread and hashes, as in training. Files are in the page cache. The run's own "
        "kernels use all cores, so what reading takes of a core it takes of them. The large file has "
        f"{config['whole_rows']:,} rows of a label and {_WHOLE_COLUMNS} integers, neither compressed nor in a "
        "dictionary. pyarrow.dataset gives decoded columns, on all cores; we check them and give bags, on one."
    )
    tables = [
        _readers(f"{sum(_BAGS)} ids a sample over {len(_BAGS)} tables", alone),
        _runs(config["batch"], trained, alone),
        _readers("one id a column, 13 dense columns", single),
        _whole_table(whole),
    ]
    goals = [Goal(name, round(share, 3), at_least=config["share_of_ready"]) for name, share in shares.items()]
    figures = {"alone": alone, "one_id": single, "trained": trained, "whole": whole}
    return Report(tables, [*_whole_goals(whole), *goals], [note], figures)


if __name__ == "__main__":
    start("reading")
