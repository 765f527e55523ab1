"""Whether this process is one of several that were started together."""

import os
from typing import Final

_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> int | None:
    """Its rank, if torchrun, or what gives torchrun's environment, started it; else None."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _ENVIRONMENT) else None
