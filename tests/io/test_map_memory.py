"""The map of rows takes memory where rows are stored, however large its tables; huge pages where it is dense."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.cold_tier import WIDE, keys_of, write_rows
from tests.io.support import open_tier
from tierstore.io import row_map

_SCATTERED = textwrap.dedent(
    """
    import sys, tierstore, torch

    def private_mib():
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private")) / 1024

    def touch(store):
        store["t"].write(ids, torch.ones(len(ids), 4))
        store.commit()

    ids = torch.randint(10**9, (3000,), generator=torch.Generator().manual_seed(0))
    with tierstore.open(sys.argv[1], ddr="8MiB") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=10**9, embedding_dim=4))
        store["t"].write(ids[:1], torch.ones(1, 4))
        store.commit()
        before = private_mib()
        touch(store)
        store.create_table(tierstore.TableConfig(name="other", num_embeddings=10**9, embedding_dim=4))
        trained = private_mib() - before
    with tierstore.open(sys.argv[1], ddr="8MiB") as store:
        touch(store)
        opened = private_mib() - before
    print(int(trained), int(opened))
    """
)


def test_scattered_rows_of_a_huge_table_take_little_memory(tmp_path: Path) -> None:
    """A page of 4 KiB for each of 3,000 rows, 12 MiB, and what the store itself takes; by huge pages it is 2.7 GiB."""
    command = [sys.executable, "-c", _SCATTERED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    trained, opened = map(int, done.stdout.split())
    assert max(trained, opened) < 100


def test_a_region_goes_to_huge_pages_once_it_is_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    region_rows, mib = 2**21 // 4, 2**20

    def note(_places: Any, start: int, stop: int) -> None:
        asked.append((start // mib, stop // mib))

    def keys(first: int, count: int) -> Any:
        return keys_of(0, first + np.arange(count))

    monkeypatch.setattr(row_map, "use_huge_pages", note)
    tier = open_tier(tmp_path)
    tier.add_table(0, WIDE, 3 * region_rows)
    write_rows(tier, WIDE, keys(region_rows, 2047), 1)
    tier.commit(b"", 1)
    assert asked == []
    write_rows(tier, WIDE, keys(region_rows, 2048), 2)  # 2,047 of them again
    tier.commit(b"", 2)
    assert asked == [(2, 4)]
    write_rows(tier, WIDE, keys(region_rows, 5000), 3)
    tier.commit(b"", 3)
    assert asked == [(2, 4)]
    tier.add_table(1, WIDE, region_rows)  # a new map
    tier.close()
    assert asked == [(2, 4)] * 2
    tier = open_tier(tmp_path)
    tier.add_table(0, WIDE, 3 * region_rows)
    tier.add_table(1, WIDE, region_rows)
    write_rows(tier, WIDE, keys(0, 2048), 4)
    tier.commit(b"", 4)
    tier.close()
    assert asked == [(2, 4)] * 3 + [(0, 2)]
