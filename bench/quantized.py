"""What do rows of 16, 8 and 4 bits cost in bytes, time and AUC, beside float32?

One table is converted by ``tierstore.quantize`` to each dtype. Pooled lookups run with every row in memory, torch's own
operators on the same rows in turns with them; cold reads with the page cache dropped. Quality is that of
examples/criteo.toml, trained in float32 and converted, or trained in rows of 16 bits.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore.plan.measure import page_cache

from .common import Goal, Report, Run, Spread, Table, measure, per_second, program
from .quality import Quality, goals_of, measure_quality, table_of
from .rowdata import Rows
from .workload import CHUNK, ids_of

__all__ = ["run"]

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
IDS = ("uniform", "Zipf")


class Batch(NamedTuple):
    ids: Tensor
    offsets: Tensor
    """With the last one included."""


Lookup = Callable[[Batch], Tensor]


def _build(folder: Path, rows: Rows) -> dict[str, Path]:
    """A store of each dtype, all of the same rows."""
    shutil.rmtree(folder, ignore_errors=True)
    paths = {dtype: folder / dtype for dtype in DTYPES}
    config = tierstore.TableConfig(name="item", num_embeddings=rows.count, embedding_dim=rows.dim)
    with tierstore.open(paths["float32"], ddr="256MiB") as store:
        table = store.create_table(config)
        for start, chunk in rows.chunks():
            table.write(torch.arange(start, start + len(chunk)), torch.from_numpy(chunk - np.float32(0.5)))
        store.commit()
    for dtype in DTYPES[1:]:
        tierstore.quantize(paths["float32"], paths[dtype], dtype=dtype)  # type: ignore[arg-type]
    return paths


def _layout_table(paths: dict[str, Path], rows: Rows) -> tuple[Table, dict[str, Any]]:
    figures: dict[str, Any] = {}
    for dtype, path in paths.items():
        with tierstore.open(path, mode="r") as store:
            layout = store["item"].layout
        figures[dtype] = {
            "cached_row_bytes": layout.row_bytes,
            "stored_row_bytes": layout.stored_row_words * 8,
            "rows_per_block": layout.rows_per_block,
            "row_file_bytes": (path / "rows.lmdb").stat().st_blocks * 512,
        }
    first = figures["float32"]
    shown = [
        [
            dtype,
            str(each["cached_row_bytes"]),
            str(each["stored_row_bytes"]),
            str(each["rows_per_block"]),
            f"{each['row_file_bytes'] / 2**20:,.0f} MiB",
            f"{each['row_file_bytes'] / first['row_file_bytes']:.2f}",
        ]
        for dtype, each in figures.items()
    ]
    columns = ["rows", "bytes in DDR", "bytes on SSD", "rows a block of 4 KiB", "row file", "of float32's"]
    return Table(title=f"{rows.count:,} rows of {rows.dim}", columns=columns, rows=shown), figures


def _torch_lookups(flat: Tensor) -> dict[str, Lookup]:
    """What torch has for the same rows, all of them in memory."""
    own = torch.ops.quantized
    bytes_, nibbles = own.embedding_bag_byte_prepack(flat), own.embedding_bag_4bit_prepack(flat)

    def by_float(batch: Batch) -> Tensor:
        return torch.nn.functional.embedding_bag(batch.ids, flat, batch.offsets, mode="sum", include_last_offset=True)

    def by_bytes(batch: Batch) -> Tensor:
        found = own.embedding_bag_byte_rowwise_offsets(bytes_, batch.ids, batch.offsets, include_last_offset=True)
        return torch.as_tensor(found)

    def by_nibbles(batch: Batch) -> Tensor:
        found = own.embedding_bag_4bit_rowwise_offsets(nibbles, batch.ids, batch.offsets, include_last_offset=True)
        return torch.as_tensor(found)

    return {"torch float32": by_float, "torch int8": by_bytes, "torch int4": by_nibbles}


def _draw(config: dict[str, Any], kind: str, seed: int) -> Batch:
    generator = np.random.default_rng((config["seed"], seed))
    count, rows = config["bags"] * config["pooling_factor"], config["rows"]
    ids = ids_of(generator, rows, count, 0.0 if kind == "uniform" else config["zipf"])
    offsets = torch.arange(0, count + 1, config["pooling_factor"])
    return Batch(torch.from_numpy(ids), offsets)


class _Turns:
    """No two lookups in a row are of one batch: the second would find its rows in the processor's caches."""

    def __init__(self, lookups: dict[str, Lookup], batches: list[Batch]) -> None:
        self._batches = batches
        self._turn = 0
        self.actions = {name: self._action(lookup) for name, lookup in lookups.items()}

    def _action(self, lookup: Lookup) -> Callable[[], object]:
        def act() -> None:
            self._turn += 1
            lookup(self._batches[self._turn % len(self._batches)])

        return act


def _pooled_rates(
    paths: dict[str, Path], config: dict[str, Any], flat: Tensor, threads: int
) -> dict[str, dict[str, Spread]]:
    """Ids a second, by kind of ids and by lookup."""
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        lookups = _torch_lookups(flat)
        for dtype in DTYPES:
            store = stack.enter_context(tierstore.open(paths[dtype], mode="r", ddr="200% of tables", threads=threads))
            table = store["item"]
            for start in range(0, len(flat), CHUNK):
                table.read(torch.arange(start, min(start + CHUNK, len(flat))))
            lookups[f"tierstore {dtype}"] = _lookup_of(table)
        _require_same(lookups, _draw(config, "uniform", 0))
        rates = {}
        for kind in IDS:
            # An odd number, so that nobody's turn comes back to the same few.
            turns = _Turns(lookups, [_draw(config, kind, seed) for seed in range(13)])
            measure(turns.actions, repetitions=2)
            seconds = measure(turns.actions, repetitions=config["repetitions"])
            count = config["bags"] * config["pooling_factor"]
            rates[kind] = {name: per_second(count, values) for name, values in seconds.items()}
        return rates


def _lookup_of(table: tierstore.Table) -> Lookup:
    return lambda batch: table.pooled(batch.ids, batch.offsets)


def _require_same(lookups: dict[str, Lookup], batch: Batch) -> None:
    for dtype in ("int8", "int4"):
        if not torch.equal(lookups[f"tierstore {dtype}"](batch), lookups[f"torch {dtype}"](batch)):
            raise RuntimeError(f"{dtype}: not the bits of torch's operator")
    if not torch.allclose(lookups["tierstore float32"](batch), lookups["torch float32"](batch), atol=1e-4):
        raise RuntimeError("float32: not the sums of torch's embedding_bag")


def _pooled_table(rates: dict[int, dict[str, dict[str, Spread]]], config: dict[str, Any]) -> Table:
    columns = ["pooled by"]
    columns += [f"{kind}, {threads} thread{'s' if threads > 1 else ''}" for threads in rates for kind in IDS]
    names = list(next(iter(rates.values()))[IDS[0]])
    shown = [[name, *(_rate(by_kind, kind, name) for by_kind in rates.values() for kind in IDS)] for name in names]
    title = (
        f"pooled lookups, million ids a second (of torch's float32): {config['bags']:,} bags of "
        f"{config['pooling_factor']} ids, every row in memory"
    )
    return Table(title=title, columns=columns, rows=shown)


def _rate(by_kind: dict[str, dict[str, Spread]], kind: str, name: str) -> str:
    rate = by_kind[kind][name].median
    return f"{rate / 1e6:.1f} ({rate / by_kind[kind]['torch float32'].median:.2f})"


def _cold_rates(paths: dict[str, Path], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows a second out of a store just opened, its file out of the page cache; and pages read for a row."""
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    pages: dict[str, float] = {}
    generator = np.random.default_rng(config["seed"])
    for _ in range(config["cold_repetitions"]):
        ids = torch.from_numpy(generator.choice(config["rows"], config["cold_rows"], replace=False))
        for dtype, path in paths.items():
            with tierstore.open(path, mode="r", ddr="64MiB") as store:
                store["item"].read(ids[:1])
                page_cache.drop(path / "rows.lmdb")
                start = time.perf_counter()
                store["item"].read(ids)
                seconds[dtype].append(time.perf_counter() - start)
                pages[dtype] = store.stats().ssd.bytes_read / 4096 / len(ids)
    return {
        dtype: {"rows_per_s": asdict(per_second(config["cold_rows"], seconds[dtype])), "pages_a_row": pages[dtype]}
        for dtype in DTYPES
    }


def _cold_table(cold: dict[str, dict[str, Any]], config: dict[str, Any]) -> Table:
    first = cold["float32"]["rows_per_s"]["median"]
    shown = [
        [
            dtype,
            f"{each['rows_per_s']['median']:,.0f}",
            f"{each['rows_per_s']['median'] / first:.2f}",
            f"{each['pages_a_row']:.2f}",
        ]
        for dtype, each in cold.items()
    ]
    title = f"cold reads, {config['cold_rows']:,} random rows a batch, page cache dropped, every row verified"
    return Table(title=title, columns=["rows", "rows/s", "of float32's", "pages read for a row"], rows=shown)


def _goals(rates: dict[int, dict[str, dict[str, Spread]]], quality: list[Quality]) -> list[Goal]:
    goals, single = goals_of(quality), rates[1]["uniform"]
    for dtype in ("int8", "int4"):
        share = single[f"tierstore {dtype}"].median / single["tierstore float32"].median
        goals.append(
            Goal(name=f"{dtype}: pooled ids a second over our float32's, 1 thread", value=round(share, 3), at_least=1)
        )
    return goals


def run(request: Run) -> Report:
    config = request.config
    rows = Rows.of(config)
    quality = measure_quality(config, request.folder, DTYPES)
    folder = request.folder / "quantized"
    paths = _build(folder, rows)
    layout_table, layouts = _layout_table(paths, rows)
    cold = _cold_rates(paths, config)
    flat = torch.from_numpy(np.concatenate([chunk for _, chunk in rows.chunks()]) - np.float32(0.5))
    rates = {threads: _pooled_rates(paths, config, flat, threads) for threads in config["threads"]}
    shutil.rmtree(folder)
    return Report(
        question="What do rows of 16, 8 and 4 bits cost in bytes, time and AUC, beside float32?",
        tables=[layout_table, _pooled_table(rates, config), _cold_table(cold, config), table_of(quality, config)],
        figures={
            "layouts": layouts,
            "pooled_ids_per_s": {
                str(threads): {
                    kind: {name: asdict(rate) for name, rate in own.items()} for kind, own in by_kind.items()
                }
                for threads, by_kind in rates.items()
            },
            "cold": cold,
            "quality": [each._asdict() | {"evaluation": each.evaluation._asdict()} for each in quality],
        },
        goals=_goals(rates, quality),
        notes=[
            "Bytes in DDR without index and policy, 44 more with LRU; bytes on SSD with the row's checksum. Converted "
            "stores have no optimizer state.",
            f"{config['repetitions']} repetitions in turns, each on a batch not looked up shortly before; Zipf "
            f"with exponent {config['zipf']}. torch: embedding_bag, and torch.ops.quantized's row-wise lookups, which "
            "are given the rows' places, where tierstore finds each id in its cache first. The int8 and int4 sums of "
            "the two were compared, and are equal in every bit.",
            "Quality: the test rows follow the training rows in time. Bytes of trained rows are with Adagrad's state. "
            "A seed decides about first values, dense weights and random bits; the spread over seeds says which "
            "differences mean something.",
        ],
    )


if __name__ == "__main__":
    sys.exit(program("quantized", run))
