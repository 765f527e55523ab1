"""A small training that passes through every kernel, for compute-sanitizer to watch: ``sanitized FOLDER [DEVICE]``."""

import sys
from pathlib import Path

from tests.gpu.support import TINY, assert_same, make_batches, train
from tierstore import optim


def main(folder: Path, device: str) -> None:
    for number, rule in enumerate((optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.1))):
        for pooling in ("sum", "max"):
            batches, config = make_batches(3, scaled=pooling == "sum"), {"optimizer": rule, "pooling": pooling}
            expected = train(folder / f"{number} {pooling} plain", batches, config=config)
            for depth in (0, 2):
                place = folder / f"{number} {pooling} {depth}"
                assert_same(train(place, batches, config=config, hbm=TINY, depth=depth, device=device), expected)
    print("the same bits")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda")
