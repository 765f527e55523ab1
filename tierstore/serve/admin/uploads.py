"""Updates on their way in: each a file that grows, named by what it will be, so that it goes on after an interruption.

They lie in ``incoming/`` of the replica's directory, as ``ID-SIZE.partial``.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from ...durable import make_directory, write_all
from ...errors import DiskFullError, TierstoreError
from ...oserrors import translate_os_error
from ...sizes import format_size

__all__ = ["MAX_UPLOADS", "Upload", "UploadError", "Uploads", "append", "is_update_id"]

MAX_UPLOADS: Final = 2
"""Updates that are kept in part; the one that grew last stays longest."""
_ROOM_BYTES: Final = 64 << 20
"""Left free on the file system."""
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})\.partial")
_ID: Final = re.compile("[0-9a-f]{16}")


class UploadError(TierstoreError):
    """What was sent cannot be added to what is there."""


class Upload(NamedTuple):
    """One update as far as it has come."""

    id: str
    path: Path
    received_bytes: int
    size_bytes: int

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

    def all(self) -> list[Upload]:
        """Those that there are, the one that grew last first."""
        try:
            entries = [(entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        found = []
        for entry, status in sorted(entries, key=lambda pair: -pair[1].st_mtime_ns):
            match = _NAME.fullmatch(entry.name)
            if match is not None and entry.is_file(follow_symlinks=False):
                found.append(Upload(match[1], Path(entry.path), status.st_size, int(match[2])))
        return found

    def find(self, update_id: str) -> Upload | None:
        return next((upload for upload in self.all() if upload.id == update_id), None)

    def begin(self, update_id: str, size_bytes: int, *, busy: Collection[str] = ()) -> Upload:
        """The upload to add to; a new one drops the oldest ones, and has room for all of it beside all of the others.

        Args:
            busy: ids that are not dropped.

        Raises:
            UploadError: it is too large, or of another size than before. DiskFullError. TierstoreError.
        """
        if not 0 < size_bytes <= self._max_bytes:
            raise UploadError(f"an update of {size_bytes} bytes; at most {format_size(self._max_bytes)} are taken")
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
            for upload in others[MAX_UPLOADS - 1 :]:
                upload.path.unlink(missing_ok=True)
            to_come = sum(upload.size_bytes - upload.received_bytes for upload in self.all())
            self._require_room(size_bytes, to_come)
            path = self._folder / f"{update_id}-{size_bytes}.partial"
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise translate_os_error(error, self._folder) from error
        return Upload(update_id, path, 0, size_bytes)

    def _require_room(self, size_bytes: int, others_bytes: int) -> None:
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        if free < size_bytes + others_bytes + _ROOM_BYTES:
            raise DiskFullError(
                f"{self._folder}: an update of {format_size(size_bytes)} and {format_size(free)} free, of which others "
                f"still need {format_size(others_bytes)}; nothing was written. Free some space"
            )

    def drop(self, update_id: str) -> None:
        """Delete an upload, if there is one."""
        for upload in self.all():
            if upload.id == update_id:
                upload.path.unlink(missing_ok=True)


def append(upload: Upload, data: bytes, offset: int) -> None:
    """Write what came to where it belongs.

    Raises:
        DiskFullError, TierstoreError: the system refused.
    """
    try:
        descriptor = os.open(upload.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            write_all(descriptor, data, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise translate_os_error(error, upload.path) from error
