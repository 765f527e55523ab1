"""A process that writes a replica: ``python -m tierstore.updates.child apply DIR FILE ID [REPLACES]``, or
``rollback DIR [COMMIT_ID]``. It ends with the process ``TIERSTORE_PARENT``, which started it, however
that ends.

A server has the replica open for reading, and a process may open a row file once. The last line of the output is the
outcome as JSON: what ``apply_update`` or ``roll_back_replica`` gave, or ``error`` and the name of its class.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import TierstoreError
from ..system.signals import end_with
from .apply import apply_update, roll_back_replica


def main(arguments: Sequence[str]) -> int:
    """Do it; the exit status: 0 done, 1 failed."""
    try:
        outcome = _run(*arguments)
    except (TierstoreError, OSError, ValueError, MemoryError) as error:
        outcome = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(outcome), flush=True)
    return 1 if "error" in outcome else 0


def _run(action: str, directory: str, *rest: str) -> dict[str, Any]:
    if action == "rollback":
        return roll_back_replica(directory, *rest)._asdict()
    file, checksum, *others = rest
    replaces = others[0] if others else ""
    return apply_update(directory, file, id=checksum, replaces=replaces)._asdict()


if __name__ == "__main__":
    end_with(int(os.environ.get("TIERSTORE_PARENT", os.getppid())))
    sys.exit(main(sys.argv[1:]))
