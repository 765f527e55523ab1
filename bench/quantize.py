"""How few bytes does a trained model need within a bound of its log loss, and does the bound hold on later rows?

Trains examples/criteo.toml with Criteo-Kaggle's layers, makes it small by ``tierstore quantize --loss`` on the rows
that follow, and scores the rows after those, which no search has seen, by the served model.
"""

import gzip
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tierstore
from tierstore.precision import quantize_run
from tierstore.precision.held_out import LAYER, ROWS
from tierstore.precision.search import size_of
from tierstore.serve.models import Models
from tierstore.serve.models.dense import lowered
from tierstore.serve.watch import LabelledRows, read_labelled
from tierstore.train import RunConfig, train
from tierstore.train.config import load, parse_override
from tierstore.train.metrics import log_loss, roc_auc

from .common import Goal, Report, Run, Table, program
from .data import ROOT, require_criteo

__all__ = ["run"]

_DDR = "200% of tables"


class Served(NamedTuple):
    """What a store's ranking model gives for the rows that no search has seen."""

    log_loss: float
    auc: float


def _trained(config: Mapping[str, Any], folder: Path) -> RunConfig:
    shutil.rmtree(folder, ignore_errors=True)
    given = [f'data.path="{require_criteo()}"', f'store.ddr="{_DDR}"', f'store.path="{folder}"', *config["layers"]]
    given += [f"train.seed={config['seed']}", f"data.train_rows={config['train_rows']}"]
    given += [f"data.test_rows={config['held_out_rows']}"]
    made = load(str(ROOT / config["run_file"]), [parse_override(text) for text in given])
    train(made)
    return made


def _untouched(config: Mapping[str, Any], run: RunConfig, folder: Path) -> list[LabelledRows]:
    first, path = config["train_rows"] + config["held_out_rows"], folder / "untouched.tsv"
    with gzip.open(require_criteo(), "rb") as lines, path.open("wb") as file:
        file.writelines(islice(lines, first, first + config["untouched_rows"]))
    return read_labelled(run, str(path), max_rows=config["untouched_rows"], batch_rows=4096)


def _served(store_folder: Path, rows: Sequence[LabelledRows]) -> Served:
    with tierstore.open(store_folder, mode="r", ddr=_DDR) as store:
        model: Any = Models(store).by_name["ranking"]
        answers = [model.run([model.parse(each.inputs)])[0]["probabilities"].data for each in rows]
    labels = np.concatenate([each.labels for each in rows])
    given = np.concatenate(answers).astype(np.float64).clip(2.0**-24, 1 - 2.0**-24)
    logits = np.log(given / (1 - given))
    return Served(log_loss(labels, logits), roc_auc(labels, logits))


def _bytes_of(store_folder: Path) -> dict[str, int]:
    """As ``quantize.json`` counts them: rows that were written, as they lie in memory without optimizer state; dense
    weights as the commit has them."""
    with tierstore.open(store_folder, mode="r", ddr=_DDR) as store:
        rows = sum(
            len(each) * table.layout.weight_bytes
            for table in store.tables.values()
            for each in store.written_rows(table)
        )
        weights = sum(each.nbytes for name, each in store.tensors().items() if name.startswith("model."))
    return {"rows_bytes": rows, "weights_bytes": weights}


def _in_int8(run: RunConfig, folder: Path, layers: Sequence[str]) -> Path:
    """The run with all its rows and all its large layers in int8."""
    shutil.rmtree(folder, ignore_errors=True)
    types = dict.fromkeys(layers, "int8")
    tierstore.quantize(run.store.path, folder, dtype="int8", tensors=lambda tensors: lowered(tensors, types))
    return folder


def _by_loss(run: RunConfig, folder: Path, bound: float) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + ".points").unlink(missing_ok=True)
    begun = time.perf_counter()
    made = quantize_run(run.store.path, folder, loss=bound)
    seconds = time.perf_counter() - begun
    rows, layers = ([each for each in made.units if each.name.startswith(kind)] for kind in (ROWS, LAYER))
    tables_by_type, layers_by_type = (
        Counter(made.found.choice.get(each.name, each.own) for each in units) for units in (rows, layers)
    )
    assert _bytes_of(folder)["rows_bytes"] == size_of(rows, made.found.choice)
    return {
        "bound": bound,
        "seconds": seconds,
        "measured": made.measured,
        "tables": dict(tables_by_type),
        "layers": dict(layers_by_type),
        "layer_names": [each.name.removeprefix(LAYER) for each in layers],
        "added_on_search": made.found.added["search"],
        "added_on_check": made.found.added["check"],
        "undone": sum(each.became == "undone" for each in made.found.steps),
    }


def _table(config: Mapping[str, Any], found: Mapping[str, Any]) -> Table:
    first, rows = found["float32"], []
    for name, each in found.items():
        added = each["log_loss"] / first["log_loss"] - 1
        by_type = [
            ", ".join(f"{count} {dtype}" for dtype, count in sorted(each.get(units, {}).items()))
            for units in ("tables", "layers")
        ]
        whole = (each["rows_bytes"] + each["weights_bytes"]) / (first["rows_bytes"] + first["weights_bytes"])
        rows.append(
            [
                name,
                f"{each['rows_bytes'] / 2**20:.2f} MiB",
                f"{each['weights_bytes'] / 2**10:,.0f} KiB",
                f"{whole:.3f}",
                *by_type,
                *(f"{100 * each[key]:+.4f} %" if key in each else "" for key in ("added_on_search", "added_on_check")),
                f"{each['log_loss']:.6f}",
                f"{100 * added:+.4f} %",
                f"{each['auc']:.6f}",
                f"{each['seconds']:.0f}" if "seconds" in each else "",
            ]
        )
    columns = ["types", "rows", "dense weights", "of float32's bytes", "tables", "layers"]
    columns += [
        "loss added, searched rows",
        "checked rows",
        "log loss, later rows",
        "added",
        "AUC, later rows",
        "seconds",
    ]
    title = (
        f"{config['run_file']} with Criteo-Kaggle's layers, {config['train_rows']:,} rows trained, "
        f"{config['held_out_rows']:,} held out, {config['untouched_rows']:,} later"
    )
    return Table(title=title, columns=columns, rows=rows)


def _goals(found: Mapping[str, Any]) -> list[Goal]:
    first, goals = found["float32"]["log_loss"], []
    for name, each in found.items():
        if "bound" in each:
            added = each["log_loss"] / first - 1
            goals.append(Goal(name=f"log loss added on later rows, {name}", value=added, at_most=each["bound"]))
    whole = {name: each["rows_bytes"] + each["weights_bytes"] for name, each in found.items()}
    share = min(whole.values()) / whole["int8 everywhere"]
    goals.append(Goal(name="bytes at the widest bound, of int8 everywhere's", value=round(share, 3), at_most=1))
    return goals


def run(request: Run) -> Report:
    config, folder = request.config, request.folder / "quantize"
    folder.mkdir(exist_ok=True)
    trained = _trained(config, folder / "run")
    later = _untouched(config, trained, folder)
    by_loss = {f"within {bound:g}": _by_loss(trained, folder / f"{bound:g}", bound) for bound in config["bounds"]}
    layers = next(iter(by_loss.values()))["layer_names"]
    stores = {"float32": folder / "run", "int8 everywhere": _in_int8(trained, folder / "int8", layers)}
    stores |= {name: folder / f"{each['bound']:g}" for name, each in by_loss.items()}
    found = {
        name: by_loss.get(name, {}) | _bytes_of(path) | _served(path, later)._asdict() for name, path in stores.items()
    }
    shutil.rmtree(folder)
    return Report(
        question="How few bytes does a model need within a bound of its log loss, and does it hold on later rows?",
        tables=[_table(config, found)],
        figures=found,
        goals=_goals(found),
        notes=[
            "Bytes: rows that were written, as they lie in memory, without optimizer state; dense weights as they are "
            "stored. The held-out rows are searched and checked by turns; the later rows follow them in the file, and "
            "are scored by the model that is served. Seconds are of the whole command, the copy included."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("quantize", run))
