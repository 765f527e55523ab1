"""How few bytes does a model need within a bound of its log loss, and does it hold on later rows?

Trains examples/criteo.toml with Criteo-Kaggle's layers, makes it small by ``tierstore quantize --loss`` on the rows
that follow, and scores the rows after those, which no search has seen, by the served model.
"""

import gzip
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tierstore.precision.held_out import LAYER, ROWS
from tierstore.precision.search import quantize_run, size_of
from tierstore.serve.models import Models
from tierstore.serve.models.dense import lowered
from tierstore.serve.watch import LabelledRows, read_labelled
from tierstore.train import RunConfig
from tierstore.train.metrics import log_loss, roc_auc

from .common import Goal, Report, Run, Table, fresh_folder, start
from .data import require_criteo
from .runs import DDR, run_config, trained

__all__ = ["run"]


def _trained(config: Mapping[str, Any], store: Path) -> RunConfig:
    sizes = (f"data.train_rows={config['train_rows']}", f"data.test_rows={config['held_out_rows']}")
    made = run_config(config["run_file"], store, *config["layers"], f"train.seed={config['seed']}", *sizes)
    trained(made)
    return made


def _untouched(config: Mapping[str, Any], run: RunConfig, folder: Path) -> list[LabelledRows]:
    first, path = config["train_rows"] + config["held_out_rows"], folder / "untouched.tsv"
    with gzip.open(require_criteo(), "rb") as lines, path.open("wb") as file:
        file.writelines(islice(lines, first, first + config["untouched_rows"]))
    return read_labelled(run, str(path), max_rows=config["untouched_rows"], batch_rows=4096)


def _served(store_folder: Path, rows: Sequence[LabelledRows]) -> dict[str, float]:
    """What a store's ranking model gives for rows that no search has seen, and its bytes: of rows that were written,
    as they lie in memory without optimizer state, and of dense weights as the commit has them."""
    with tierstore.open(store_folder, mode="r", ddr=DDR) as store:
        model: Any = Models(store).by_name["ranking"]
        answers = [model.run([model.parse(each.inputs)])[0]["probabilities"].data for each in rows]
        tables = store.tables.values()
        row_bytes = sum(len(each) * own.layout.weight_bytes for own in tables for each in store.written_rows(own))
        weights = sum(each.nbytes for name, each in store.tensors().items() if name.startswith("model."))
    labels = np.concatenate([each.labels for each in rows])
    given = np.concatenate(answers).astype(np.float64).clip(2.0**-24, 1 - 2.0**-24)
    logits = np.log(given / (1 - given))
    scores = {"log_loss": log_loss(labels, logits), "auc": roc_auc(labels, logits)}
    return {"rows_bytes": row_bytes, "weights_bytes": weights, **scores}


def _by_loss(run: RunConfig, folder: Path, bound: float, later: Sequence[LabelledRows]) -> dict[str, Any]:
    begun = time.perf_counter()
    made = quantize_run(run.store.path, folder, loss=bound)
    seconds = time.perf_counter() - begun
    rows, layers = ([each for each in made.units if each.name.startswith(kind)] for kind in (ROWS, LAYER))
    tables_by_type, layers_by_type = (
        Counter(made.found.choice.get(each.name, each.own) for each in units) for units in (rows, layers)
    )
    served = _served(folder, later)
    assert served["rows_bytes"] == size_of(rows, made.found.choice)
    return served | {
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
        sizes = [f"{each['rows_bytes'] / 2**20:.2f} MiB", f"{each['weights_bytes'] / 2**10:,.0f} KiB", f"{whole:.3f}"]
        searched = [f"{100 * each[key]:+.4f} %" if key in each else "" for key in ("added_on_search", "added_on_check")]
        later = [f"{each['log_loss']:.6f}", f"{100 * added:+.4f} %", f"{each['auc']:.6f}"]
        rows.append([name, *sizes, *by_type, *searched, *later, f"{each['seconds']:.0f}" if "seconds" in each else ""])
    columns = ["types", "rows", "dense weights", "of float32's bytes", "tables", "layers", "loss added, searched rows"]
    columns += ["checked rows", "log loss, later rows", "added", "AUC, later rows", "seconds"]
    title = (
        f"{config['run_file']} with Criteo-Kaggle's layers, {config['train_rows']:,} rows trained, "
        f"{config['held_out_rows']:,} held out, {config['untouched_rows']:,} later"
    )
    return Table(title, columns, rows)


def _goals(found: Mapping[str, Any]) -> list[Goal]:
    first = found["float32"]["log_loss"]
    goals = [
        Goal(f"log loss added on later rows, {name}", each["log_loss"] / first - 1, at_most=each["bound"])
        for name, each in found.items()
        if "bound" in each
    ]
    whole = {name: each["rows_bytes"] + each["weights_bytes"] for name, each in found.items()}
    share = min(whole.values()) / whole["int8 everywhere"]
    return [*goals, Goal("bytes at the widest bound, of int8 everywhere's", round(share, 3), at_most=1)]


def run(request: Run) -> Report:
    config = request.config
    with fresh_folder(request.folder / "quantize") as folder:
        folder.mkdir()
        made, small = _trained(config, folder / "run"), folder / "int8"
        later = _untouched(config, made, folder)
        by_loss = {
            f"within {bound:g}": _by_loss(made, folder / f"{bound:g}", bound, later) for bound in config["bounds"]
        }
        types = dict.fromkeys(next(iter(by_loss.values()))["layer_names"], "int8")
        tierstore.quantize(made.store.path, small, dtype="int8", tensors=lambda tensors: lowered(tensors, types))
        found = {"float32": _served(folder / "run", later), "int8 everywhere": _served(small, later)} | by_loss
    note = (
        "Bytes: rows that were written, as they lie in memory, without optimizer state; dense weights as they are "
        "stored. The held-out rows are searched and checked by turns; the later rows follow them in the file, and "
        "are scored by the model that is served. Seconds are of the whole command, the copy included."
    )
    return Report([_table(config, found)], _goals(found), [note], found)


if __name__ == "__main__":
    start("quantize")
