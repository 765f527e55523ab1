"""Opening what a killed process left, and holding every version in it against what it must be."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import tierstore
from tierstore.errors import DamagedError, TierstoreError

from .life import Report, other_boot
from .state import State

__all__ = ["Shown", "inspect"]

_DDR = "2MiB"


class Shown(NamedTuple):
    """What a store shows.

    Attributes:
        was_there: whether it could be opened for reading at all.
        head: positions of its versions, the oldest first; numbers: their numbers.
        rows, bits, words: how the versions differ from what they must be, summed up.
    """

    was_there: bool
    head: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    rows: int = 0
    bits: int = 0
    words: str = ""


def inspect(directory: Path, states: Mapping[int, State], report: Report, *, boot: int, may_lack: bool) -> None:
    """Report as "shown" what the store is; run in a process of its own.

    Where the machine has started again, a store can be read only after it was opened for writing: then a copy is.

    Args:
        may_lack: the process may have died before the store was whole.
    """
    copy = directory.with_name(f"{directory.name} copy")
    with other_boot(boot):
        try:
            found = _shown(directory, states, may_lack)
        except DamagedError as error:
            if "the machine stopped" in str(error):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(directory, copy)
                tierstore.open(copy, ddr=_DDR, threads=1).close()
                found = _shown(copy, states, may_lack)
                shutil.rmtree(copy)
            elif may_lack:
                found = Shown(was_there=False)
            else:
                raise
        except TierstoreError:
            if not may_lack:
                raise
            found = Shown(was_there=False)
    report("shown", **found._asdict())


def _shown(directory: Path, states: Mapping[int, State], may_lack: bool) -> Shown:
    with tierstore.open(directory, mode="r", ddr=_DDR, threads=1) as store:
        numbers = store.versions
    head, rows, bits, words = [], 0, 0, []
    for number in numbers or (None,):
        with tierstore.open(directory, mode="r", version=number, ddr=_DDR, threads=1) as store:
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
    return Shown(True, tuple(head), numbers, rows, bits, "; ".join(words))
