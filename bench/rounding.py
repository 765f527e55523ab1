"""What does training in rows of 16 bits cost in AUC, rounded to nearest and stochastically, beside float32?

The run file is trained with rows of each kind, every row in memory, and evaluated on the rows after the training rows.
Rows are rounded at each update; everything else, optimizer state included, is float32.
"""

import mmap
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.train import train
from tierstore.train.build import table_configs
from tierstore.train.config_file import load, parse_override
from tierstore.train.metrics import Evaluation

from .common import Report, Run, Table, program
from .data import ROOT, require_criteo

__all__ = ["run"]


class Kind(NamedTuple):
    """How the rows of a training are stored."""

    dtype: str
    rounding: str


KINDS = (
    Kind("float32", "nearest"),
    Kind("bfloat16", "nearest"),
    Kind("bfloat16", "stochastic"),
    Kind("float16", "nearest"),
    Kind("float16", "stochastic"),
)


class Outcome(NamedTuple):
    """One training.

    Attributes:
        cached_row_bytes: of a row in memory, with its optimizer state.
    """

    kind: Kind
    seed: int
    evaluation: Evaluation
    cached_row_bytes: int


def _train(config: dict[str, Any], path: Path, kind: Kind, seed: int) -> Outcome:
    shutil.rmtree(path, ignore_errors=True)
    overrides = [f'data.path="{require_criteo()}"', f'store.path="{path}"', f'store.ddr="{config["ddr"]}"']
    overrides += [f"train.seed={seed}", f'embedding.dtype="{kind.dtype}"', f'embedding.rounding="{kind.rounding}"']
    chosen = load(str(ROOT / config["run_file"]), [parse_override(text) for text in (*overrides, *config["set"])])
    found = train(chosen).test
    shutil.rmtree(path)
    if found is None:
        raise ValueError(f"{config['run_file']} has no test rows to evaluate on")
    return Outcome(kind, seed, found, table_configs(chosen)[0].layout(mmap.PAGESIZE).row_bytes)


def _row(own: list[Outcome], first: list[Outcome]) -> list[str]:
    """Of the trainings of one kind, beside those in float32 with the same seeds."""
    aucs, losses = [each.evaluation.auc for each in own], [each.evaluation.log_loss for each in own]
    auc, loss = statistics.mean(aucs), statistics.mean(losses)
    auc_lost = statistics.mean(each.evaluation.auc for each in first) - auc
    worse = loss - statistics.mean(each.evaluation.log_loss for each in first)
    kind = own[0].kind
    return [
        kind.dtype,
        "" if kind.dtype == "float32" else kind.rounding,
        str(own[0].cached_row_bytes),
        f"{auc:.6f}",
        f"{min(aucs):.6f} - {max(aucs):.6f}",
        f"{auc_lost:+.6f}",
        f"{loss:.6f}",
        f"{worse:+.6f}",
    ]


def run(request: Run) -> Report:
    config = request.config
    path = request.folder / "rounding-store"
    # Seed by seed, so that a run cut short has compared something.
    found = [_train(config, path, kind, seed) for seed in config["train_seeds"] for kind in KINDS]
    by_kind = [[each for each in found if each.kind == kind] for kind in KINDS]
    columns = ["rows", "rounded", "bytes in DDR", "test AUC", "lowest - highest", "AUC lost", "log loss", "worse by"]
    return Report(
        question="What does training in rows of 16 bits cost in AUC, rounded to nearest and stochastically, beside "
        "float32?",
        tables=[
            Table(
                title=f"{config['run_file']}, trained in rows of each kind: mean of {len(by_kind[0])} trainings",
                columns=columns,
                rows=[_row(own, by_kind[0]) for own in by_kind],
            )
        ],
        figures={
            "trainings": [
                each.kind._asdict()
                | {"seed": each.seed, "cached_row_bytes": each.cached_row_bytes}
                | each.evaluation._asdict()
                for each in found
            ]
        },
        notes=[
            "Bytes of a row with its optimizer state, without index and policy. A seed decides about first values, "
            "dense weights and random bits; the spread over seeds says which differences mean something.",
        ],
    )


if __name__ == "__main__":
    sys.exit(program("rounding", run))
