"""What converting the rows of a trained model to another dtype does to its predictions on real data."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tierstore
from tierstore.train import RunConfig, train
from tierstore.train.build import Run, build_model, open_data
from tierstore.train.config_file import load, parse_override
from tierstore.train.feed import feed
from tierstore.train.metrics import Evaluation, Predictions
from tierstore.train.readers import Batch

from .data import ROOT, require_criteo

__all__ = ["Quality", "measure_quality"]

_DDR = "200% of tables"


class Quality(NamedTuple):
    """One training, evaluated with its rows in one dtype.

    Attributes:
        seed: of the training.
        cached_row_bytes: of a row in memory, with its optimizer state.
    """

    seed: int
    dtype: str
    evaluation: Evaluation
    cached_row_bytes: int


def measure_quality(config: dict[str, Any], folder: Path, dtypes: tuple[str, ...]) -> list[Quality]:
    """Train in float32 with each seed, convert, and evaluate each store on the rows after the training rows."""
    found = []
    path = folder / "quality-store"
    for seed in config["train_seeds"]:
        overrides = [f'data.path="{require_criteo()}"', f'store.ddr="{_DDR}"', f"train.seed={seed}", *config["set"]]
        overrides.append(f'store.path="{path}"')
        shutil.rmtree(path, ignore_errors=True)
        run = load(str(ROOT / config["run_file"]), [parse_override(text) for text in overrides])
        trained = train(run).test
        found += [_converted(run, path, seed, dtype) for dtype in dtypes]
        again = found[-len(dtypes)].evaluation
        if again != trained:
            raise RuntimeError(f"evaluated anew, the trained store gives {again}, not {trained}")
    shutil.rmtree(path)
    return found


def _converted(run: RunConfig, path: Path, seed: int, dtype: str) -> Quality:
    if dtype == "float32":
        return _evaluate(run, path, seed, dtype)
    target = path.with_name(f"{path.name}-{dtype}")
    shutil.rmtree(target, ignore_errors=True)
    tierstore.quantize(path, target, dtype=dtype)  # type: ignore[arg-type]
    found = _evaluate(run, target, seed, dtype)
    shutil.rmtree(target)
    return found


@torch.no_grad()
def _evaluate(config: RunConfig, path: Path, seed: int, dtype: str) -> Quality:
    """As training evaluates, from what the store holds."""
    predictions = Predictions()
    with _opened(config, path) as run, contextlib.closing(feed(run, _test_batches(config), depth=2)) as ahead:
        for batch in ahead:
            predictions.add(batch.labels, run.model(batch.dense, batch.sparse))
        row_bytes = run.embeddings.tables[0].layout.row_bytes
    return Quality(seed, dtype, predictions.evaluate(), row_bytes)


def _test_batches(config: RunConfig) -> Iterator[Batch]:
    reader, hasher = open_data(config)
    first, count = config.data.train_rows, config.data.test_rows
    return reader.batches(
        hasher,
        batch_size=config.train.batch_size,
        start_row=first,
        stop_row=first + count,
        log_dense=config.data.log_dense,
    )


@contextlib.contextmanager
def _opened(config: RunConfig, path: Path) -> Iterator[Run]:
    """A trained model over its store, opened for reading."""
    with tierstore.open(path, mode="r", ddr=_DDR) as store:
        embeddings = tierstore.TieredEmbeddingBagCollection(store)
        model = build_model(config, embeddings).eval()
        tensors = store.tensors()
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
        yield Run(store, model, embeddings, torch.optim.SGD(model.parameters()))
