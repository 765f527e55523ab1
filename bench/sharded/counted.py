"""``tierstore``, whose rank 0 notes each step that it did, and after how many restarts, in a file that outlives it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["FILE", "Counts", "counts_in", "noting"]

FILE: Final = "steps"


class Counts(NamedTuple):
    """Of a whole run; ``steps`` counts those anew that were done before a kill and not yet committed."""

    steps: int
    restarts: int


def noting(step: Callable[..., Any], path: Path, restart: int) -> Callable[..., Any]:
    """The step, which adds a line to the file whenever it was done."""

    def noted(*arguments: Any) -> Any:
        found = step(*arguments)
        with path.open("a") as file:
            file.write(f"{restart}\n")
        return found

    return noted


def counts_in(path: Path) -> Counts:
    restarts = [int(line) for line in path.read_text().splitlines()]
    return Counts(len(restarts), restarts[-1])


def main() -> int:
    from tierstore.cli import main
    from tierstore.train import trainer

    if os.environ["RANK"] == "0":
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        patched: Any = trainer
        patched.train_step = noting(patched.train_step, Path(FILE), restart)
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
