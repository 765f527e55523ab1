"""A folder of Parquet files: for each change a folder, which appears when it is whole."""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import FormatError
from ..exchange.exporting import row_writer
from ..store.changes import Change, ChangedBatch
from ..system.checks import excerpt
from ..system.files import make_directory, output_errors, output_locked, sync_directory, write_text
from .base import Position, Sink

_MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial"  # a name that readers of data sets skip


class ParquetSink(Sink):
    """Folders in order of their names, numbers of 12 digits. docs/online.md says what is in each.
    TierstoreError: another feed writes there. ValueError: a URL. FormatError: as ``position``. OSError. ImportError, by
    ``apply``: no pyarrow."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self.name = Path(folder).absolute(), os.fspath(folder)
        make_directory(self._folder)
        refusal = "{} is written by another feed; end that one, or choose another folder"
        self._held = contextlib.ExitStack()
        self._held.enter_context(output_locked(self._folder, os.O_RDONLY | os.O_DIRECTORY, refusal))
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        self._last = self._folder / f"{max(numbers, default=0):012}"
        self.position()  # FormatError

    def position(self) -> Position | None:
        """That of the last folder. FormatError: no feed wrote it."""
        path = self._last / _MANIFEST
        try:
            return Position(*json.loads(path.read_text())["position"]) if int(self._last.name) else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is no commit of a feed ({excerpt(str(error))}): move its folder away") from error

    def apply(self, change: Change, batches: Iterator[ChangedBatch], position: Position) -> None:
        """Write the change's folder. DiskFullError, TierstoreError: the system has no space for it, or refuses it."""
        manifest: dict[str, Any] = {"format_version": 1, "position": position}
        manifest |= {name: getattr(change, name) for name in ("since", "is_full", "event_time", "dropped")}
        manifest["tables"] = [table.to_dict() for table in change.tables]
        partial, whole = self._folder / _PARTIAL, self._folder / f"{int(self._last.name) + 1:012}"
        with output_errors(whole):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            manifest["files"] = [*self._write(partial, change, batches)]
            write_text(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n", force=True)
            partial.rename(whole)
            self._last = whole
            sync_directory(self._folder)

    def _write(self, folder: Path, change: Change, batches: Iterator[ChangedBatch]) -> Iterator[dict[str, Any]]:
        """A file for each table with changes; what each holds."""
        places = {table.name: place for place, table in enumerate(change.tables)}
        for name, parts in itertools.groupby(batches, lambda batch: batch.table):
            rows, path = [0, 0], folder / f"{places[name]}.parquet"
            with row_writer(path, 0, change.tables[places[name]].embedding_dim, force=True) as write:
                for _, ids, values in parts:
                    write(ids, None if values is None else values.float().numpy())
                    rows[values is None] += len(ids)
            yield {"table": name, "file": path.name, "rows": rows[0], "deletes": rows[1]}

    def close(self) -> None:
        """Let other feeds write there."""
        self._held.close()
