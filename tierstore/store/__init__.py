"""The store: tables, versions, commits, following, its directory and its statistics; ``open_store`` opens one."""

from typing import TYPE_CHECKING

from .. import system as _system

if TYPE_CHECKING:
    from .opening import open_store
    from .store import Store
    from .table import Table
else:
    __getattr__, __dir__ = _system.late(globals(), {"Store": "store", "Table": "table", "open_store": "opening"})

__all__ = ["Store", "Table", "open_store"]
