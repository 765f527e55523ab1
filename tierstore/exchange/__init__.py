"""Tables to and from files that others read, in chunks. See docs/exchange.md."""

from .exporting import ExportReport, export_store
from .importing import ImportReport, TableImport, import_files
from .tensor_files import DEFAULT_KEY

__all__ = ["DEFAULT_KEY", "ExportReport", "ImportReport", "TableImport", "export_store", "import_files"]
