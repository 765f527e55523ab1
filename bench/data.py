"""Where the real data is, when it is there."""

import os
from pathlib import Path
from typing import Final

__all__ = ["CRITEO_NAME", "ROOT", "find_criteo"]

ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout."""
CRITEO_NAME: Final = "criteo_80k.tsv.gz"


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
