"""What the same work costs by other means, measured in the same run, if ``make peers`` has brought them."""

import importlib
import sys
import warnings
from typing import Any, Final

from ..data import ROOT

PEERS: Final = ROOT / ".peers"


def load(name: str) -> Any:
    """A peer's module; ImportError or OSError if it is not there."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def has(name: str) -> bool:
    try:
        load(name)
    except (ImportError, OSError):
        return False
    return True
