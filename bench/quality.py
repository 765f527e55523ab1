"""What rows of 16, 8 and 4 bits do to the predictions of a model on real data: converted, or trained in them."""

import mmap
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tierstore
from tierstore.train.build import table_configs
from tierstore.train.metrics import Evaluation

from .common import Goal, Table, fresh_folder
from .runs import run_config, scored, trained

__all__ = ["Quality", "goals_of", "measure_quality", "table_of"]

_WORSE_MAX: Final = {"float16": 0.0001, "bfloat16": 0.0001, "int8": 0.0001, "int4": 0.001}
_TRAINED: Final = ("bfloat16", "float16")
CONVERTED: Final = "converted"


class Quality(NamedTuple):
    """One training and its evaluation on the rows after the training rows.

    Attributes:
        made: "converted" after training in float32, or how rows were rounded at each update.
        cached_row_bytes: of a row in memory, with its optimizer state.
    """

    seed: int
    dtype: str
    made: str
    evaluation: Evaluation
    cached_row_bytes: int


def measure_quality(config: dict[str, Any], folder: Path, dtypes: Sequence[str]) -> list[Quality]:
    """With each seed: trained in float32 and converted to each of ``dtypes``; then trained in rows of 16 bits."""
    found, target = [], folder / "quality-converted"
    with fresh_folder(folder / "quality-store") as path:
        for seed in config["train_seeds"]:
            run = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"])
            exact = trained(run)
            for dtype in dtypes:
                shutil.rmtree(target, ignore_errors=True)
                if dtype != "float32":
                    tierstore.quantize(path, target, dtype=dtype)  # type: ignore[arg-type]
                own = scored(run, path if dtype == "float32" else target)
                if dtype == "float32" and own.evaluation != exact:
                    raise RuntimeError(f"evaluated again, the trained store gives {own.evaluation}, not {exact}")
                found.append(Quality(seed, dtype, CONVERTED, *own))
            for dtype, rounding in ((dtype, how) for dtype in _TRAINED for how in ("nearest", "stochastic")):
                own_set = (f'embedding.dtype="{dtype}"', f'embedding.rounding="{rounding}"')
                run = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"], *own_set)
                row_bytes = table_configs(run)[0].layout(mmap.PAGESIZE).row_bytes
                found.append(Quality(seed, dtype, rounding, trained(run), row_bytes))
    shutil.rmtree(target, ignore_errors=True)
    return found


class _Means:
    """Of the trainings of one kind."""

    def __init__(self, found: Sequence[Quality], dtype: str, made: str) -> None:
        own = [each for each in found if (each.dtype, each.made) == (dtype, made)]
        self.aucs = [each.evaluation.auc for each in own]
        self.auc = statistics.mean(self.aucs)
        self.log_loss = statistics.mean(each.evaluation.log_loss for each in own)
        self.cached_row_bytes = own[-1].cached_row_bytes


def table_of(found: Sequence[Quality], config: dict[str, Any]) -> Table:
    first, rows = _Means(found, "float32", CONVERTED), []
    for dtype, made in dict.fromkeys((each.dtype, each.made) for each in found):
        own = _Means(found, dtype, made)
        how = "" if dtype == "float32" else made if made == CONVERTED else f"trained, {made}"
        spread = f"{min(own.aucs):.6f} - {max(own.aucs):.6f}"
        losses = [f"{first.auc - own.auc:+.6f}", f"{own.log_loss:.6f}", f"{own.log_loss - first.log_loss:+.6f}"]
        rows.append([dtype, how, str(own.cached_row_bytes), f"{own.auc:.6f}", spread, *losses])
    title = (
        f"{config['run_file']}, trained in float32 and converted, or trained in rows of 16 bits that are rounded "
        f"at each update: mean of {len(config['train_seeds'])} trainings"
    )
    columns = ["rows", "made", "bytes in DDR", "test AUC", "lowest - highest", "AUC lost", "log loss", "worse by"]
    return Table(title, columns, rows)


def goals_of(found: Sequence[Quality]) -> list[Goal]:
    first = _Means(found, "float32", CONVERTED).auc
    lost = {dtype: round(first - _Means(found, dtype, CONVERTED).auc, 6) for dtype in _WORSE_MAX}
    return [Goal(f"test AUC lost by {dtype}", each, at_most=_WORSE_MAX[dtype]) for dtype, each in lost.items()]
