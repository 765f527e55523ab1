"""Training runs of the checkout's run files, as ``tierstore train`` makes them, and what their models score."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch

import tierstore
from tierstore.metrics import Evaluation, Predictions
from tierstore.train import RunConfig, train
from tierstore.train.build import Run, build_model, open_data
from tierstore.train.checkpoint import load_model
from tierstore.train.config import load, parse_override
from tierstore.train.trainer import feed

from .data import ROOT, require_criteo

DDR: Final = "200% of tables"


def run_config(file: str | Path, store: Path, *overrides: str, data: Path | None = None) -> RunConfig:
    """A run file with all rows in memory and some settings its own, on Criteo's rows or those of ``data``."""
    given = [f'data.path="{data or require_criteo()}"', f'store.path="{store}"', f'store.ddr="{DDR}"', *overrides]
    return load(ROOT / file, [parse_override(text) for text in given])


def trained(config: RunConfig) -> Evaluation:
    """Of its test rows, after a training from the first step."""
    shutil.rmtree(config.store.path, ignore_errors=True)
    found = train(config).test
    if found is None:
        raise ValueError(f"a run on {config.data.path} has no test rows to evaluate on")
    return found


class Scored(NamedTuple):
    """``row_bytes``: of a row in memory, with its optimizer state."""

    evaluation: Evaluation
    row_bytes: int


@torch.no_grad()
def scored(config: RunConfig, path: Path, *, prepare: Callable[[torch.nn.Module], object] = lambda _: None) -> Scored:
    """The test rows as training evaluates them, by what the store holds; ``prepare`` may change the model."""
    predictions, (reader, hasher), first = Predictions(), open_data(config), config.data.train_rows
    stop, size = first + config.data.test_rows, config.train.batch_size
    rows = reader.batches(hasher, batch_size=size, start_row=first, stop_row=stop, log_dense=config.data.log_dense)
    with tierstore.open(path, mode="r", ddr=DDR) as store:
        embeddings = tierstore.TieredEmbeddingBagCollection(store)
        model = build_model(config, embeddings).eval()
        load_model(model, store.tensors())
        prepare(model)
        run = Run(store, model, embeddings, torch.optim.SGD(model.parameters()))
        with contextlib.closing(feed(run, rows, depth=2)) as ahead:
            for batch in ahead:
                predictions.add(batch.labels, model(batch.dense, batch.sparse))
        return Scored(predictions.evaluate(), embeddings.tables[0].layout.row_bytes)
