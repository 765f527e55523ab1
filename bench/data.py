"""Where the checkout and, when it is there, the real data are; examples of the documentation."""

import gzip
import os
import re
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
    FileNotFoundError: TIERSTORE_CRITEO names no file."""
    if named := os.environ.get("TIERSTORE_CRITEO"):
        if not Path(named).is_file():
            raise FileNotFoundError(f"TIERSTORE_CRITEO={named} is not a file; unset it or name the Criteo rows")
        return Path(named)
    places = (folder / "shared" / "data" / CRITEO_NAME for folder in (ROOT, *ROOT.parents))
    return next((path for path in places if path.is_file()), None)


def require_criteo() -> Path:
    """``find_criteo``, or SystemExit with the way out."""
    if path := find_criteo():
        return path
    raise SystemExit(
        f"This benchmark needs {CRITEO_NAME}, 80,000 rows of the Criteo Kaggle set, no part of the project; "
        "set TIERSTORE_CRITEO to the file."
    )


def criteo_keys(path: Path) -> NDArray[np.int64]:
    """int64 [lookups]: the rows looked up, in row order and column by column within a row; missing values look up none.
    A key is ``column << 40 | value``, so that all 26 columns share one key space."""
    with gzip.open(path, "rt") as lines:
        rows = (line.rstrip("\n").split("\t")[_FIRST_CATEGORY:] for line in lines)
        keys = [column << _KEY_ROW_BITS | int(value, 16) for row in rows for column, value in enumerate(row) if value]
    return np.array(keys, np.int64)
