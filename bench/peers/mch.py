"""TorchRec's managed collision module on the CPU: a process with ``python -m bench.peers.mch FOLDER``.

It gives ids.npy of the folder slots. Asked for a number, it looks up that batch of wanted.npy, and prints how many of
its ids have slots.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from .torchrec import module


def main(folder: Path) -> None:
    ids, wanted = (torch.from_numpy(np.load(folder / name)) for name in ("ids.npy", "wanted.npy"))
    modules, jagged = module("torchrec.modules.mc_modules"), module("torchrec.sparse.jagged_tensor").JaggedTensor
    collisions = modules.MCHManagedCollisionModule(
        zch_size=len(ids) + 1,  # the last slot is for ids without one
        device=torch.device("cpu"), eviction_policy=modules.LRU_EvictionPolicy(), eviction_interval=1,
    )  # fmt: skip
    collisions.profile({"item": jagged(ids, lengths=torch.ones_like(ids))})
    collisions.eval()
    for line in sys.stdin:
        batch = wanted[int(line)]
        slots = collisions.remap({"item": jagged(batch, lengths=torch.ones_like(batch))})["item"].values()
        print(int((slots < len(ids)).sum()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
