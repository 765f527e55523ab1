"""Opening what a killed process left, and holding every version in it against what it must be."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tierstore
from tierstore.errors import DamagedError, TierstoreError

from .life import Report, other_boot
from .state import State

__all__ = ["inspect"]

_OPEN: Final[dict[str, Any]] = {"ddr": "2MiB", "threads": 1}
_NOTHING: Final[dict[str, Any]] = {"head": (), "numbers": (), "rows": 0, "bits": 0, "words": ""}


def inspect(directory: Path, states: Mapping[int, State], report: Report, *, boot: int, may_lack: bool) -> None:
    """Report as "shown" what the store is; run in a process of its own: "head" (positions of its versions, the oldest
    first), their "numbers", and "rows", "bits" and "words" (how they differ from what they must be, summed up).

    Where the machine has started again, a store can be read only after it was opened for writing: then a copy is.

    Args:
        may_lack: the process may have died before the store was whole.
    """
    copy = directory.with_name(f"{directory.name} copy")
    with other_boot(boot):
        try:
            found = _shown(directory, states, may_lack)
        except TierstoreError as error:
            if isinstance(error, DamagedError) and "the machine stopped" in str(error):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(directory, copy)
                tierstore.open(copy, **_OPEN).close()
                found = _shown(copy, states, may_lack)
                shutil.rmtree(copy)
            elif may_lack:
                found = _NOTHING
            else:
                raise
    report("shown", **found)


def _shown(directory: Path, states: Mapping[int, State], may_lack: bool) -> dict[str, Any]:
    with tierstore.open(directory, mode="r", **_OPEN) as store:
        numbers = store.versions
    head, rows, bits, words = [], 0, 0, []
    for number in numbers or (None,):
        with tierstore.open(directory, mode="r", version=number, **_OPEN) as store:
            store.verify()
            found = State.of(store)
        expected = states.get(found.position)
        if number is not None:
            head.append(found.position)
        if expected is None:
            words.append(f"version {number} was committed at {found.position}, where there is no commit")
            continue
        difference = (expected.only(found.rows) if may_lack else expected).difference(found)
        rows, bits = rows + difference.rows, bits + difference.bits
        if difference.words:
            words.append(f"version {number}: {difference.words}")
    return {"head": head, "numbers": numbers, "rows": rows, "bits": bits, "words": "; ".join(words)}
