"""``Table.pooled`` where rows may be evicted: the same bits, counts and errors as by ``Lookup``."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from tests.io.support import flip, place_of
from tierstore.errors import ChecksumError
from tierstore.kernels.jit import JIT_ENABLED

ROWS, DIM = 20_000, 16

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="plain Python has no short way")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with tierstore.open(tmp_path / "store", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
        table.write(torch.arange(ROWS), torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)))
        store.commit()
        flip(tmp_path / "store", place_of(store._cold, 0, 7).row)
    return tmp_path / "store"


def _counts(store: tierstore.Store) -> tuple[int, int, int, int]:
    ddr = store.stats().ddr
    return ddr.lookups, ddr.hits, ddr.misses, ddr.evictions


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bits_and_counts(path: Path, mode: str) -> None:
    generator = np.random.default_rng(2)
    with (
        tierstore.open(path, mode="r", ddr="700KiB", threads=1) as short,
        tierstore.open(path, mode="r", ddr="700KiB", threads=1) as long,
    ):
        for _ in range(300):
            lengths = generator.integers(0, 9, generator.integers(1, 20))
            offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))
            ids = torch.from_numpy(8 + generator.zipf(1.1, lengths.sum()) % (ROWS - 8))
            expected = torch.empty((len(lengths), DIM))
            long["t"].lookup(long["t"].jagged(ids, offsets, mode=mode), mode=mode).forward(expected, keep=False)
            assert torch.equal(short["t"].pooled(ids, offsets, mode=mode), expected)
            assert _counts(short) == _counts(long)
        assert short.stats().ddr.evictions > 100


@pytest.mark.parametrize("offsets_type", [torch.int64, torch.int32], ids=["short", "long"])
def test_a_damaged_row_is_told_and_counted_once(path: Path, offsets_type: torch.dtype) -> None:
    with tierstore.open(path, mode="r", ddr="700KiB") as store:
        with pytest.raises(ChecksumError, match="row 7"):
            store["t"].pooled(torch.tensor([7]), torch.tensor([0, 1], dtype=offsets_type))
        assert _counts(store)[:3] == (1, 0, 1)
        assert torch.isfinite(store["t"].pooled(torch.tensor([8]), torch.tensor([0, 1]))).all()
