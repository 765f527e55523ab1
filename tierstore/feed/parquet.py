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
from ..store.changes import Change, ChangedBatch
from ..system.checks import excerpt
from ..system.files import make_directory, output_errors, output_locked, sync_directory
from .base import Position, Sink, needed

_MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial"  # a name that readers of data sets skip


class ParquetSink(Sink):
    """Folders in order of their names, numbers of 12 digits. All but the last may be moved away.

    ``PLACE.parquet`` has ``id``, int64, and ``vector``, float32 of the table's dim; null: the id is deleted.
    ``manifest.json`` has what else a ``Change`` says; ``files`` names their tables.

    Raises:
        ImportError: pyarrow is not installed. TierstoreError: another feed writes there. OSError. ValueError: a URL.
        FormatError: the last folder is not a feed's.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._pyarrow, self._writer = needed("pyarrow", str(folder)), needed("pyarrow.parquet", "").ParquetWriter
        self._folder = Path(folder).absolute()
        make_directory(self._folder)
        with contextlib.ExitStack() as held:
            refusal = "{} is written by another feed; end that one, or choose another folder"
            held.enter_context(output_locked(self._folder, os.O_RDONLY | os.O_DIRECTORY, refusal))
            self._number = max((int(each.name) for each in self._folder.iterdir() if each.name.isdecimal()), default=0)
            self._head = self._found() if self._number else {}
            self._held = held.pop_all()

    def _found(self) -> dict[str, Any]:
        """The manifest of the last folder, but for ``files``. FormatError."""
        path = self._named(self._number) / _MANIFEST
        try:
            head = json.loads(path.read_text())
            Position(*head["position"])
            return {key: head[key] for key in head.keys() - {"files"}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is no commit of a feed ({excerpt(str(error))}): move its folder away") from error

    def _named(self, number: int) -> Path:
        return self._folder / f"{number:012}"

    def position(self) -> Position | None:
        """That of the last folder."""
        return Position(*self._head["position"]) if self._head else None

    def apply(self, change: Change, batches: Iterator[ChangedBatch], position: Position) -> None:
        """Write the change's folder, unless it is the last one. DiskFullError, TierstoreError: the system has no space
        for it, or refuses it."""
        head: dict[str, Any] = {"format_version": 1, "position": position}
        head |= {name: getattr(change, name) for name in ("since", "is_full", "event_time", "dropped")}
        head["tables"] = [table.to_dict() for table in change.tables]
        if (head := json.loads(json.dumps(head))) == self._head:
            return
        partial, whole = self._folder / _PARTIAL, self._named(self._number + 1)
        with output_errors(whole):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            files = [*self._write(partial, change, batches)]
            (partial / _MANIFEST).write_text(json.dumps(head | {"files": files}, indent=1) + "\n")
            for path in partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            sync_directory(partial)
            partial.rename(whole)
            sync_directory(self._folder)
        self._number, self._head = self._number + 1, head

    def _write(self, folder: Path, change: Change, batches: Iterator[ChangedBatch]) -> Iterator[dict[str, Any]]:
        """A file for each table with changes; what each holds."""
        pa, places = self._pyarrow, {table.name: place for place, table in enumerate(change.tables)}
        for table, parts in itertools.groupby(batches, lambda batch: batch.table):
            dim, name = change.tables[places[table]].embedding_dim, f"{places[table]}.parquet"
            rows, kind = [0, 0], pa.list_(pa.float32(), dim)
            schema = pa.schema({"id": pa.int64(), "vector": kind})
            with self._writer(folder / name, schema) as writer:
                for _, ids, values in parts:
                    vectors = pa.nulls(len(ids), kind)
                    if values is not None:
                        flat = pa.array(values.float().numpy().ravel())
                        vectors = pa.FixedSizeListArray.from_arrays(flat, dim)
                    writer.write_table(pa.table([ids, vectors], schema=schema))
                    rows[values is None] += len(ids)
            yield {"table": table, "file": name, "rows": rows[0], "deletes": rows[1]}

    def close(self) -> None:
        """Let other feeds write there."""
        self._held.close()
