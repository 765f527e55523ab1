"""Which files of a folder are a data set's: those that pyarrow, pandas and Spark would take."""

import logging
import os
from pathlib import Path
from typing import Final

from ...system.excerpt import excerpt_names

_LOG: Final = logging.getLogger("tierstore")
_HIDDEN: Final = (".", "_")
"""How names begin that Hadoop, Spark and pyarrow pass over: half-written files, checksums, notes."""


def names_below(folder: Path) -> list[str]:
    """The files below the folder, but for hidden folders, by their relative paths, in order. Links to folders count
    as files."""
    found = []
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN) and name not in linked]
        found += [str(Path(place, name).relative_to(folder)) for name in names + linked]
    return sorted(found)


def is_data(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the file is not hidden and ends in one of these, in letters of any size."""
    return name.lower().endswith(endings) and not Path(name).name.startswith(_HIDDEN)


def files_of(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """The folder's data files that have the endings. A warning names the others, but for marks such as _SUCCESS."""
    names = names_below(folder)
    taken = [name for name in names if is_data(name, endings)]
    left = [name for name in names if is_data(name, ("",)) != name.lower().endswith(endings)]
    if taken and left:
        _LOG.warning("%s: %d files are read; left out: %s", folder, len(taken), excerpt_names(left))
    return [folder / name for name in taken]
