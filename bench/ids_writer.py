"""The writer that a follower follows: a process with ``python -m bench.ids_writer FOLDER ROWS NEW DIM``.

It makes a store with dynamic ids for half of the rows. Asked, it admits NEW others, commits, and prints when the commit
began and when it was done, by the system's monotonic clock. It yields the processor to the follower.
"""

import sys
import time

import psutil
import torch

import tierstore


def main(folder: str, rows: int, new: int, dim: int) -> None:
    process = psutil.Process()
    process.nice(19)
    process.ionice(psutil.IOPRIO_CLASS_IDLE)
    ids = tierstore.DynamicIds(unseen="error")
    with tierstore.open(folder, ddr="2GiB") as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim, ids=ids))
        table.admit(torch.arange(rows // 2))
        store.commit()
        print("ready", flush=True)
        for number, _ in enumerate(sys.stdin):
            table.admit(torch.arange(new) + rows // 2 + number * new)
            began = time.monotonic()
            store.commit()
            print(began, time.monotonic(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
