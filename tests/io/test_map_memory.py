"""The map of rows takes memory where rows are stored, however large its tables; huge pages where it is dense."""

import subprocess
import sys
import textwrap
from pathlib import Path

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
