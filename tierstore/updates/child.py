"""A process that writes a replica for a server, which has it open for reading: a process may open a row file once.

Each line of its input is a list in JSON: ["apply", REPLACES, DIR, FILE, ...] or ["rollback", LEFT, DIR]. It answers
with a line: what ``apply_update`` or ``roll_back_replica`` gave, or ``error`` and the name of its class. It ends with
the process ``TIERSTORE_PARENT``, which started it, however that ends.
"""

import json
import os
import sys
from typing import Any

from ..errors import TierstoreError
from ..system.signals import end_with
from .apply import apply_update, roll_back_replica


def answer(line: str) -> str:
    """Do what a line says; the line to answer."""
    action, commit_id, directory, *files = json.loads(line)
    outcome: dict[str, Any]
    try:
        if action == "rollback":
            outcome = roll_back_replica(directory, commit_id)._asdict()
        else:
            outcome = apply_update(directory, *files, replaces=commit_id)._asdict()
    except (TierstoreError, OSError, ValueError, MemoryError) as error:
        outcome = {"error": str(error), "kind": type(error).__name__}
    return json.dumps(outcome)


if __name__ == "__main__":
    end_with(int(os.environ.get("TIERSTORE_PARENT", os.getppid())))
    for request in sys.stdin:
        print(answer(request), flush=True)
