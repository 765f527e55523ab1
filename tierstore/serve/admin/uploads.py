"""Updates on their way in: each a file that grows, named by what it will be, so that it goes on after an interruption.

They lie in ``incoming/`` of the replica's directory, as ``ID-SIZE.partial``.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from ...errors import DiskFullError, TierstoreError
from ...system.durable import make_directory, write_all
from ...system.oserrors import translate_os_error
from ...system.sizes import format_size

__all__ = ["IDLE_SECONDS", "MAX_UPLOADS", "TooLargeError", "Upload", "UploadError", "Uploads", "append", "is_update_id"]

MAX_UPLOADS: Final = 2
"""Updates that are kept in part; the one that grew last stays longest."""
IDLE_SECONDS: Final = 60.0
"""After which an upload that has not grown gives way to one that needs its room: its publisher has given up by then."""
_ROOM_BYTES: Final = 64 << 20
"""Left free on the file system, by each part that arrives."""
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})\.partial")
_ID: Final = re.compile("[0-9a-f]{16}")


class UploadError(TierstoreError):
    """What was sent cannot be added to what is there."""


class TooLargeError(TierstoreError):
    """An update is larger than the server takes."""


class Upload(NamedTuple):
    """One update as far as it has come.

    Attributes:
        idle_seconds: since it was first seen to be as large as it is.
    """

    id: str
    path: Path
    received_bytes: int
    size_bytes: int
    idle_seconds: float

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.size_bytes


def is_update_id(text: str) -> bool:
    """Whether it can be the name of an update."""
    return _ID.fullmatch(text) is not None


class Uploads:
    """The files in ``incoming/``.

    Args:
        directory: of the replica.
        max_bytes: the largest update that is taken.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self._folder = directory / "incoming"
        self._max_bytes = max_bytes
        self._seen: dict[str, tuple[int, float]] = {}  # by id: a size, and since when it is that

    def all(self) -> list[Upload]:
        """Those that there are, the one that grew last first."""
        try:
            entries = [(entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        found, seen, now = [], {}, monotonic()
        for entry, status in sorted(entries, key=lambda pair: -pair[1].st_mtime_ns):
            match = _NAME.fullmatch(entry.name)
            if match is not None and entry.is_file(follow_symlinks=False):
                size, since = self._seen.get(match[1], (-1, now))
                seen[match[1]] = status.st_size, since if size == status.st_size else now
                idle_seconds = now - seen[match[1]][1]
                found.append(Upload(match[1], Path(entry.path), status.st_size, int(match[2]), idle_seconds))
        self._seen = seen
        return found

    def find(self, update_id: str) -> Upload | None:
        return next((upload for upload in self.all() if upload.id == update_id), None)

    def begin(self, update_id: str, size_bytes: int, *, busy: Collection[str] = ()) -> Upload:
        """The upload to add to. A new one must fit into what is free now, as the others are free to grow, too: what is
        declared keeps no room. It drops the oldest ones, and those that have not grown for long if it needs their room;
        one that is refused drops none.

        Args:
            busy: ids that are not dropped.

        Raises:
            TooLargeError. UploadError: it is of another size than before. DiskFullError. TierstoreError.
        """
        if not 0 < size_bytes <= self._max_bytes:
            raise TooLargeError(
                f"an update of {size_bytes} bytes; at most {format_size(self._max_bytes)} are taken. Publish more often"
            )
        known = self.find(update_id)
        if known is not None and known.received_bytes > known.size_bytes:
            self.drop(update_id)
            known = None
        if known is not None:
            if known.size_bytes != size_bytes:
                raise UploadError(f"update {update_id} was to have {known.size_bytes} bytes, and now {size_bytes}")
            return known
        try:
            make_directory(self._folder)
            others = [upload for upload in self.all() if upload.id not in busy]
            self._make_room(size_bytes, kept=others[: MAX_UPLOADS - 1], surplus=others[MAX_UPLOADS - 1 :])
            path = self._folder / f"{update_id}-{size_bytes}.partial"
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise translate_os_error(error, self._folder) from error
        return Upload(update_id, path, 0, size_bytes, 0.0)

    def _make_room(self, size_bytes: int, *, kept: list[Upload], surplus: list[Upload]) -> None:
        """Delete the surplus, and of the kept ones those that are idle, the oldest first, until there is room.

        Raises:
            DiskFullError: all of them were not enough; none is deleted.
        """
        idle = [upload for upload in kept if upload.idle_seconds > IDLE_SECONDS]
        free = _free_bytes(self._folder)
        if free + sum(upload.received_bytes for upload in [*surplus, *idle]) < size_bytes + _ROOM_BYTES:
            raise DiskFullError(
                f"{self._folder}: an update of {format_size(size_bytes)}, and {format_size(free)} free, of which "
                f"{format_size(_ROOM_BYTES)} stay so; nothing was written. Free some space, or try again after "
                f"{IDLE_SECONDS:.0f} s, when uploads that do not grow give way"
            )
        for upload in surplus:
            upload.path.unlink(missing_ok=True)
        while idle and _free_bytes(self._folder) < size_bytes + _ROOM_BYTES:
            idle.pop().path.unlink(missing_ok=True)

    def drop(self, update_id: str) -> None:
        """Delete an upload, if there is one."""
        for upload in self.all():
            if upload.id == update_id:
                upload.path.unlink(missing_ok=True)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def append(upload: Upload, data: bytes, offset: int) -> None:
    """Write what came to where it belongs.

    Raises:
        DiskFullError: it would take of the room that stays free. DiskFullError, TierstoreError: the system refused.
    """
    if _free_bytes(upload.path.parent) < len(data) + _ROOM_BYTES:
        raise DiskFullError(
            f"{upload.path}: {format_size(_ROOM_BYTES)} of the file system stay free, and there is no more. What came "
            "before is kept: free some space, and publish again"
        )
    try:
        descriptor = os.open(upload.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_all(descriptor, data, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise translate_os_error(error, upload.path) from error
