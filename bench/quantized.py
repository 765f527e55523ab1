"""What do rows of 16, 8 and 4 bits cost in bytes, time and AUC, beside float32?

One table is converted by ``tierstore.quantize`` to each dtype. Pooled lookups run with every row in memory, torch's own
operators on the same rows in turns with them. Quality is that of
examples/criteo.toml, trained in float32 and converted, or trained in rows of 16 bits.
"""

import contextlib
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tierstore

from .common import Goal, Report, Run, Spread, Table, fresh_folder, measure, per_second, start
from .quality import goals_of, measure_quality, table_of
from .rowdata import Rows
from .workload import ids_of, read_every_row

__all__ = ["run"]

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
IDS = ("uniform", "Zipf")
Rates = dict[str, dict[str, Spread]]
"""Ids a second, by kind of ids and by lookup."""


class Batch(NamedTuple):
    ids: Tensor
    offsets: Tensor
    """With the last one included."""


Lookup = Callable[[Batch], Tensor]


def _build(folder: Path, rows: Rows) -> dict[str, Path]:
    """A store of each dtype, all of the same rows."""
    paths = {dtype: folder / dtype for dtype in DTYPES}
    config = tierstore.TableConfig(name="item", num_embeddings=rows.count, embedding_dim=rows.dim)
    with tierstore.open(paths["float32"], ddr="256MiB") as store:
        table = store.create_table(config)
        for start_row, chunk in rows.chunks():
            table.write(torch.arange(start_row, start_row + len(chunk)), torch.from_numpy(chunk - np.float32(0.5)))
        store.commit()
    for dtype in DTYPES[1:]:
        tierstore.quantize(paths["float32"], paths[dtype], dtype=dtype)  # type: ignore[arg-type]
    return paths


def _layout(path: Path) -> dict[str, int]:
    with tierstore.open(path, mode="r") as store:
        layout = store["item"].layout
    return {
        "cached_row_bytes": layout.row_bytes,
        "stored_row_bytes": layout.stored_row_words * 8,
        "rows_per_block": layout.rows_per_block,
        "row_file_bytes": (path / "rows.lmdb").stat().st_blocks * 512,
    }


def _layout_table(layouts: dict[str, dict[str, int]], rows: Rows) -> Table:
    first, shown = layouts["float32"]["row_file_bytes"], []
    for dtype, (*each, size) in ((dtype, own.values()) for dtype, own in layouts.items()):
        shown.append([dtype, *map(str, each), f"{size / 2**20:,.0f} MiB", f"{size / first:.2f}"])
    columns = ["rows", "bytes in DDR", "bytes on SSD", "rows a block of 4 KiB", "row file", "of float32's"]
    return Table(f"{rows.count:,} rows of {rows.dim}", columns, shown)


def _torch_lookups(flat: Tensor) -> dict[str, Lookup]:
    """What torch has for the same rows, all of them in memory."""
    own = torch.ops.quantized
    bytes_, nibbles = own.embedding_bag_byte_prepack(flat), own.embedding_bag_4bit_prepack(flat)

    def by(lookup: Any, rows: Any) -> Lookup:
        return lambda batch: torch.as_tensor(lookup(rows, batch.ids, batch.offsets, include_last_offset=True))

    def by_float(rows: Tensor, ids: Tensor, offsets: Tensor, **how: Any) -> Tensor:
        return torch.nn.functional.embedding_bag(ids, rows, offsets, mode="sum", **how)

    return {
        "torch float32": by(by_float, flat),
        "torch int8": by(own.embedding_bag_byte_rowwise_offsets, bytes_),
        "torch int4": by(own.embedding_bag_4bit_rowwise_offsets, nibbles),
    }


def _draw(config: dict[str, Any], kind: str, seed: int) -> Batch:
    generator = np.random.default_rng((config["seed"], seed))
    count, rows = config["bags"] * config["pooling_factor"], config["rows"]
    ids = ids_of(generator, rows, count, 0.0 if kind == "uniform" else config["zipf"])
    return Batch(torch.from_numpy(ids), torch.arange(0, count + 1, config["pooling_factor"]))


def _pooled_rates(paths: dict[str, Path], config: dict[str, Any], flat: Tensor, threads: int) -> Rates:
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        lookups = _torch_lookups(flat)
        for dtype in DTYPES:
            store = stack.enter_context(tierstore.open(paths[dtype], mode="r", ddr="200% of tables", threads=threads))
            read_every_row(store["item"])
            lookups[f"tierstore {dtype}"] = lambda batch, table=store["item"]: table.pooled(*batch)  # type: ignore[misc]
        _require_same(lookups, _draw(config, "uniform", 0))
        rates = {}
        for kind in IDS:
            # No two lookups in a row are of one batch: the second would find its rows in the processor's caches. An odd
            # number, so that nobody's turn comes back to the same few.
            turns = cycle([_draw(config, kind, seed) for seed in range(13)])
            actions = {name: (lambda lookup=lookup: lookup(next(turns))) for name, lookup in lookups.items()}  # noqa: B023
            seconds = measure(actions, repetitions=config["repetitions"], warm_up=2)
            count = config["bags"] * config["pooling_factor"]
            rates[kind] = {name: per_second(count, values) for name, values in seconds.items()}
        return rates


def _require_same(lookups: dict[str, Lookup], batch: Batch) -> None:
    for dtype in ("int8", "int4"):
        if not torch.equal(lookups[f"tierstore {dtype}"](batch), lookups[f"torch {dtype}"](batch)):
            raise RuntimeError(f"{dtype}: not the bits of torch's operator")
    if not torch.allclose(lookups["tierstore float32"](batch), lookups["torch float32"](batch), atol=1e-4):
        raise RuntimeError("float32: not the sums of torch's embedding_bag")


def _pooled_table(rates: dict[int, Rates], config: dict[str, Any]) -> Table:
    columns = ["pooled by"]
    columns += [f"{kind}, {threads} thread{'s' if threads > 1 else ''}" for threads in rates for kind in IDS]
    kinds = [by_kind[kind] for by_kind in rates.values() for kind in IDS]
    rows = [
        [
            name,
            *(f"{own[name].median / 1e6:.1f} ({own[name].median / own['torch float32'].median:.2f})" for own in kinds),
        ]
        for name in kinds[0]
    ]
    title = (
        f"pooled lookups, million ids a second (of torch's float32): {config['bags']:,} bags of "
        f"{config['pooling_factor']} ids, every row in memory"
    )
    return Table(title, columns, rows)


def run(request: Run) -> Report:
    config = request.config
    rows = Rows.of(config)
    quality = measure_quality(config, request.folder, DTYPES)
    with fresh_folder(request.folder / "quantized") as folder:
        paths = _build(folder, rows)
        layouts = {dtype: _layout(path) for dtype, path in paths.items()}
        flat = torch.from_numpy(np.concatenate([chunk for _, chunk in rows.chunks()]) - np.float32(0.5))
        rates = {threads: _pooled_rates(paths, config, flat, threads) for threads in config["threads"]}
    single = {name: rate.median for name, rate in rates[1]["uniform"].items()}
    shares = {dtype: single[f"tierstore {dtype}"] / single["tierstore float32"] for dtype in ("int8", "int4")}
    return Report(
        [
            _layout_table(layouts, rows),
            _pooled_table(rates, config),
            table_of(quality, config),
        ],
        [
            *goals_of(quality),
            *(
                Goal(f"{dtype}: pooled ids a second over our float32's, 1 thread", round(share, 3), at_least=1)
                for dtype, share in shares.items()
            ),
        ],
        [
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
        {"layouts": layouts, "pooled_ids_per_s": rates, "quality": quality},
    )


if __name__ == "__main__":
    start("quantized")
