"""Where the checkout and, when it is there, the real data are; examples of the documentation."""

import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["CRITEO_NAME", "ROOT", "criteo_batches", "criteo_keys", "examples", "find_criteo", "require_criteo"]

ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout."""
CRITEO_NAME: Final = "criteo_80k.tsv.gz"
_FIRST_CATEGORY: Final = 14
_KEY_ROW_BITS: Final = 40


def examples(page: str) -> list[str]:
    """The Python blocks of a page of the checkout, as of "README.md"."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def find_criteo() -> Path | None:
    """The file of 80,000 consecutive Criteo rows: $TIERSTORE_CRITEO, else shared/data in or above the checkout.

    Raises:
        FileNotFoundError: TIERSTORE_CRITEO names no file.
    """
    named = os.environ.get("TIERSTORE_CRITEO")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"TIERSTORE_CRITEO={named} is not a file; unset it or name the Criteo rows")
        return Path(named)
    places = (folder / "shared" / "data" / CRITEO_NAME for folder in (ROOT, *ROOT.parents))
    return next((path for path in places if path.is_file()), None)


def require_criteo() -> Path:
    """``find_criteo``, or SystemExit with the way out."""
    path = find_criteo()
    if path is None:
        raise SystemExit(
            f"This benchmark needs {CRITEO_NAME}, 80,000 rows of the Criteo Kaggle set, no part of the project; "
            "set TIERSTORE_CRITEO to the file."
        )
    return path


def _criteo_rows(path: Path) -> Iterator[list[int]]:
    with gzip.open(path, "rt") as lines:
        for line in lines:
            values = line.rstrip("\n").split("\t")[_FIRST_CATEGORY:]
            yield [column << _KEY_ROW_BITS | int(value, 16) for column, value in enumerate(values) if value]


def criteo_keys(path: Path) -> NDArray[np.int64]:
    """int64 [lookups]: the rows looked up, in row order and column by column within a row; missing values look up none.

    A key is ``column << 40 | value``, so that all 26 columns share one key space.
    """
    return np.array([key for row in _criteo_rows(path) for key in row], np.int64)


def criteo_batches(path: Path, samples: int) -> list[NDArray[np.int64]]:
    """``criteo_keys``, in batches of so many rows of the file."""
    rows = list(_criteo_rows(path))
    parts = [rows[start : start + samples] for start in range(0, len(rows), samples)]
    return [np.array([key for row in part for key in row], np.int64) for part in parts]
