"""A process that writes a replica for a server, which has it open for reading: a process may open a row file once.

Each line of its input is a list in JSON: ["apply", REPLACES, DIR, FILE, ...] or ["rollback", LEFT, DIR]. It answers
with a line: what ``apply_update`` or ``roll_back_replica`` gave, or an error and the files at fault. It ends with
the process ``TIERSTORE_PARENT``, which started it, however that ends.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import ChecksumError, DamagedError, DiskFullError, TierstoreError, UnreadableError
from ..store.version import unpack_tensors
from ..system.signals import end_with
from .apply import apply_update, roll_back_replica
from .update_file import UnfitError, UpdateFile


def answer(line: str) -> str:
    """Do what a line says; the line to answer."""
    action, commit_id, directory, *files = json.loads(line)
    outcome: dict[str, Any]
    try:
        if action == "rollback":
            outcome = roll_back_replica(directory, commit_id)._asdict()
        else:
            outcome = apply_update(directory, *files, replaces=commit_id)._asdict()
    except Exception as error:
        outcome = {
            "error": str(error) or type(error).__name__,
            "is_full": isinstance(error, DiskFullError),
            "is_refused": _is_of_content(error),
            "faults": _faults(error, files) if _is_of_content(error) else {},
        }
    return json.dumps(outcome)


def _is_of_content(error: Exception) -> bool:
    """Whether it is of what was read; else it passes, as a lock or a shortage does."""
    if isinstance(error, TierstoreError):
        return isinstance(error, UnfitError | DamagedError) and not isinstance(error, UnreadableError)
    return not isinstance(error, OSError | MemoryError)


def _faults(error: Exception, files: list[str]) -> dict[str, str]:
    """Of files: "refused" if one is wrong as it was offered, "damaged" if this disk made it so. Each is read again by
    itself, as the replica may be what is damaged."""
    found, unfit = dict[str, str](), str(error.path) if isinstance(error, UnfitError) else ""
    for name in files:
        is_whole, wrong = False, error if name == unfit else None
        try:
            with UpdateFile(Path(name), id=Path(name).name) as update:
                is_whole = True
                unpack_tensors(update.version())
                for table in range(0 if unfit else len(update.header.tables)):
                    for _ in update.rows(table):
                        pass
        except Exception as fault:
            wrong = fault
        if wrong is not None and _is_of_content(wrong):
            found[name] = "damaged" if isinstance(wrong, ChecksumError) and not is_whole else "refused"
    return found


if __name__ == "__main__":
    end_with(int(os.environ.get("TIERSTORE_PARENT", os.getppid())))
    for request in sys.stdin:
        print(answer(request), flush=True)
