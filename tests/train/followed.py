"""A folder that grows, and runs that follow it: files of several formats; ``follow_through_kills`` kills the runs."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

import tierstore
from tests.children import fork
from tierstore.train import train, trainer
from tierstore.train.config import Override, RunConfig, load
from tierstore.train.readers import Schema

BEGIN = 1_700_000_000.0
SCHEMA = Schema(label="label", dense=("row",), sparse=("user", "item"), event_time="at")
ENDINGS = (".parquet", ".csv", ".csv.gz", "")


def rows_of(first: int, count: int) -> dict[str, Any]:
    rows = np.arange(first, first + count)
    ids = rows * 2_654_435_761 >> 7
    return {"label": rows % 2, "row": rows * 1.0, "user": ids % 97, "item": ids % 89, "at": BEGIN + rows}


def put(folder: Path, name: str, columns: dict[str, Any]) -> Path:
    """A file, or a folder of arrays where the name has no ending; made elsewhere, and renamed."""
    made, path = folder.parent / "made", folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pa.table(columns), made, row_group_size=20)
    elif ".csv" in name:
        with pa.output_stream(str(made), compression="gzip" if name.endswith(".gz") else None) as stream:
            pyarrow.csv.write_csv(pa.table(columns), stream)
    else:
        made.mkdir()
        arrays = {"label": columns["label"], "dense": columns["row"][:, None], "at": columns["at"]}
        for key, array in (arrays | {"sparse": np.stack([columns["user"], columns["item"]], axis=1)}).items():
            np.save(made / f"{key}.npy", array)
    made.rename(path)
    return path


def config_of(folder: Path, store: Path, **changes: Any) -> RunConfig:
    run_file = folder.parent / "run.toml"
    run_file.write_text("")
    keys = {
        "store__path": str(store), "store__ddr": "64MiB", "data__path": str(folder), "data__label_column": "label",
        "data__dense_columns": ["row"], "data__sparse_columns": ["user", "item"], "data__time_column": "at",
        "data__follow": True, "data__settle_seconds": 0.0, "embedding__dim": 4, "embedding__num_embeddings": 100,
        "model__bottom_mlp": [4], "model__top_mlp": [4], "train__batch_size": 16, "train__commit_every": 2,
    } | changes  # fmt: skip
    return load(run_file, [Override(*name.split("__"), value, name) for name, value in keys.items()])


def follow_through_kills(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """What comes of a run that is killed so often while files come, and read ones go, beside one that nobody kills."""
    draw, files, first = random.Random(seed), list[tuple[str, dict[str, Any]]](), 0
    trainer.warm_up = lambda _: None
    whole, live, store = folder / "whole/in", folder / "live/in", folder / "killed"
    live.mkdir(parents=True)
    for number in range(8 * (kills + 1)):
        count = draw.choice([0, 1, 16, draw.randrange(90)])
        name = f"{number // 10:03}/{number:05}{draw.choice(ENDINGS if count else ENDINGS[:2])}"
        files.append((name, rows_of(first, count)))
        put(whole, *files[-1])
        first += count
    (whole / "_END").touch()
    for name in ("loaded", "timed"):  # what is loaded here is there in every fork
        begun = time.monotonic()
        expected = train(config_of(whole, folder / name), bits=True)
    seconds, statuses, gone = min(1.0, time.monotonic() - begun), list[int](), 0

    def go_on(report: Any) -> None:
        with tierstore.open(
            store, ddr="64MiB"
        ) as opened:  # for writing: at what is durable, which a reader may be past
            position = opened.extra.get("tierstore.train", {}).get("position", {"reader": {"file": ""}})
        read = [live / name for name, _ in files if (live / name).exists() and name < position["reader"]["file"]]
        for path in read:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        report("gone", count=len(read))
        summary = train(config_of(live, store), resume=True, bits=True)
        report("ended", bits=summary.bits, step=summary.step)

    for kill in range(kills + 1):
        for each in files[8 * kill : 8 * kill + 8]:
            put(live, *each)
        if kill == kills:
            (live / "_END").touch()
        reports, status = fork(go_on, kill_after=None if kill == kills else draw.uniform(0, seconds))
        statuses.append(status)
        gone += sum(each["count"] for each in reports if each["label"] == "gone")
    assert (first, statuses) == (expected.rows, [-9] * kills + [0]), statuses
    return {
        "expected": [expected.bits, expected.step],
        "found": [reports[-1]["bits"], reports[-1]["step"]],
        "gone": gone,
    }
