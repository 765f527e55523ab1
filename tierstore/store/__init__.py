"""The store: tables, versions, commits, following, its directory and its statistics; ``open_store`` opens one."""

from .opening import open_store
from .store import Store
from .table import Table

__all__ = ["Store", "Table", "open_store"]
