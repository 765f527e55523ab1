"""A training of a few steps in a temporary store, so that kernels are loaded or compiled before a run is measured."""

import contextlib
import dataclasses
import tempfile
from typing import Final

from ..errors import TierstoreError
from ..kernels.jit import JIT_ENABLED
from .build import build_run, open_data, open_run_store
from .checkpoint import Position, commit_run
from .config import RunConfig
from .steps import feed, train_step

_STEPS: Final = 4
_MAX_BATCH: Final = 64
_MAX_TABLE_ROWS: Final = 2048
_FIXED_BYTES: Final = 400 * 2**10
"""Write staging, and a little more."""
_CACHED_ROWS: Final = 256
"""At float32 with two more values of optimizer state for each: few enough that some are evicted."""
_HBM_ROWS: Final = 768
"""At as many bytes a row: space for a batch, not for those of all steps, also if a row needs half as many bytes."""
_warm: set[object] = set()


def warm_up(config: RunConfig) -> None:
    """Take the first steps of a run twice over in a store that is thrown away, whose small budget makes rows leave
    memory and come back; once a process for each kind of run. Changes torch's random state. Errors are left for
    the run to meet."""
    store, data = config.store, config.data
    kind = (
        *(store.policy, store.device, store.has_hbm, data.format, data.path),
        *(config.embedding, config.optimizer, config.model),
    )
    if not JIT_ENABLED or kind in _warm:
        return
    _warm.add(kind)
    with (
        contextlib.suppress(OSError, ValueError, TierstoreError),
        tempfile.TemporaryDirectory(prefix="tierstore-warm-up-", ignore_cleanup_errors=True) as folder,
    ):
        _take_steps(_small(config, folder))


def _small(config: RunConfig, folder: str) -> RunConfig:
    batch_size = min(config.train.batch_size, _MAX_BATCH)
    row_bytes = 12 * config.embedding.dim + 64
    ddr = _FIXED_BYTES + _CACHED_ROWS * row_bytes
    hbm = _HBM_ROWS * row_bytes if config.store.has_hbm else 0
    return dataclasses.replace(
        config,
        store=dataclasses.replace(config.store, path=folder, ddr=ddr, hbm=hbm, record=""),
        embedding=dataclasses.replace(
            config.embedding, num_embeddings=tuple(min(size, _MAX_TABLE_ROWS) for size in config.table_sizes)
        ),
        train=dataclasses.replace(config.train, batch_size=batch_size),
    )


def _take_steps(config: RunConfig) -> None:
    reader, hasher = open_data(config)
    limit = config.data.train_rows
    stop_row = min(limit, _STEPS * config.train.batch_size) if limit else None
    with open_run_store(config) as store:
        run = build_run(config, store)
        for epoch in range(2):
            batches = reader.batches(hasher, batch_size=config.train.batch_size, stop_row=stop_row)
            with contextlib.closing(feed(run, batches, depth=config.train.prefetch_depth)) as ahead:
                for step, batch in enumerate(ahead, start=1):
                    train_step(run, batch)
                    if step == _STEPS:
                        break
            commit_run(run, config, Position(epoch=epoch + 1)).result()
