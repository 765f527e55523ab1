"""Files of updates in ``incoming/`` of a replica's directory.

``ID-SIZE.partial`` is an update on its way in, named by what it will be, so that it goes on after an interruption.
``ID-SIZE-SINCE-COMMIT-VERSION-COMMIT.update`` was applied, and is kept for peers: each begins at the version of the one
before it, and the last one is of the version that is shown. ``ID-SIZE.urgent`` has urgent rows that were applied, for
peers, until the next update begins. ``peers`` has URLs, ``declined`` identities of commits, ``trial`` JSON: a commit
that no peer is to get from here yet, and what its publisher measured before.
"""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import DiskFullError, TierstoreError
from ...system.files import free_bytes, make_directory, read_plain_file, translate_os_error, write_all, write_text
from ...system.killpoints import reach
from ...system.sizes import format_size
from ...updates.client import Kept, parse_url
from ...updates.header import Origin, UpdateHeader

_ROOM_BYTES: Final = 64 << 20
"""Left free on the file system, by each part that arrives."""
_UPLOAD: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})\.(partial|urgent)")
_KEPT: Final = ".update"
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 1 << 30
"""Of updates before the last one, which is kept in any case, and the last one together."""
_MAX_PEERS: Final = 1024
_MAX_DECLINED: Final = 256
_MAX_TRIAL_BYTES: Final = 1 << 12
_MAX_TEXT_BYTES: Final = 1 << 20


class UpdateError(TierstoreError):
    """A call that cannot be done; ``kind``: name of the error's class in the process that writes the replica, or ""."""

    def __init__(self, http_status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.http_status = http_status
        self.kind = kind


class Upload(NamedTuple):
    """An update as far as it has come."""

    id: str
    path: Path
    received_bytes: int
    size_bytes: int
    modified_ns: int


class Incoming:
    def __init__(self, directory: Path) -> None:
        self.folder = directory / "incoming"

    def upload(self) -> Upload | None:
        """The one that there is; the last that grew, if somebody put more there."""
        return max(self.uploads("partial"), key=lambda each: each.modified_ns, default=None)

    def uploads(self, kind: str) -> list[Upload]:
        """Files of a kind, "partial" or "urgent"."""
        found = []
        for path in self._files():
            if (match := _UPLOAD.fullmatch(path.name)) and match[3] == kind:
                status = path.stat()
                found.append(Upload(match[1], path, status.st_size, int(match[2]), status.st_mtime_ns))
        return found

    def _files(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [path for path in self.folder.iterdir() if path.is_file() and not path.is_symlink()]
        return []

    def begin(self, update_id: str, size_bytes: int) -> Upload:
        """A new one in place of what is on its way. It must fit into what is free now; those that are kept give way.
        OSError, DiskFullError."""
        make_directory(self.folder)
        for each in self.uploads("partial") + self.uploads("urgent"):
            each.path.unlink()
        try:
            _require_room(self.folder, size_bytes)
        except DiskFullError:
            self.drop_kept()
            _require_room(self.folder, size_bytes)
        path = self.folder / f"{update_id}-{size_bytes}.partial"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return Upload(update_id, path, 0, size_bytes, 0)

    def kept(self) -> list[tuple[Kept, Path]]:
        """Those that are kept, versions ascending."""
        found = []
        for path in self._files():
            with contextlib.suppress(ValueError):
                if path.suffix == _KEPT and path.stat().st_size == (kept := Kept.of_name(path.stem)).size_bytes:
                    found.append((kept, path))
        return sorted(found, key=lambda each: each[0].version)

    def keep(self, upload: Upload, header: UpdateHeader) -> None:
        """Keep what was applied, and what it follows as far as there is place for it."""
        if header.is_urgent:
            os.replace(upload.path, upload.path.with_suffix(".urgent"))
            return
        ends = header.since, header.since_commit_id, header.origin.version, header.origin.commit_id
        kept = Kept(upload.id, upload.size_bytes, *ends)
        os.replace(upload.path, upload.path.with_name(kept.name + _KEPT))
        reach("update: file kept")
        self.settle(header.origin)

    def settle(self, shown: Origin) -> None:
        """Keep what leads to the commit that is shown, as far as there is place for it, and have that not declined: the
        process before may have been killed between two of these."""
        end = wanted = shown.version, shown.commit_id
        total = place = 0
        for each, path in reversed(self.kept()):
            total, place = total + each.size_bytes, place + 1
            if each[4:] == wanted and (wanted == end or (total <= _MAX_KEPT_BYTES and place <= _MAX_KEPT)):
                wanted = each[2:4]
            else:
                path.unlink()
        if (left := [each for each in self.declined if each not in shown[2:]]) != self.declined:
            self.set_declined(left)

    def find(self, update_id: str) -> Upload | None:
        """An update on its way in, or kept, and so whole."""
        upload = self.upload()
        if upload is not None and upload.id == update_id:
            return upload
        whole = (Upload(update_id, path, each[1], each[1], 0) for each, path in self.kept() if each.id == update_id)
        return next((each for each in self.uploads("urgent") if each.id == update_id), next(whole, None))

    def drop_kept(self) -> None:
        for _, path in self.kept():
            path.unlink()

    # Small texts

    @property
    def peers(self) -> list[str]:
        """URLs of the last publisher's other servers."""
        return self._words("peers")

    @property
    def declined(self) -> list[str]:
        """Identities of commits that are not taken, as they were gone back from."""
        return self._words("declined")

    def _words(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError, TierstoreError):
            return read_plain_file(self.folder / name, _MAX_TEXT_BYTES).decode(errors="replace").split()
        return []

    def set_peers(self, peers: Any) -> None:
        """UpdateError unless they are a list of URLs."""
        require_urls(peers)
        if peers and peers != self.peers:
            make_directory(self.folder)
            write_text(self.folder / "peers", "\n".join(peers[:_MAX_PEERS]), force=True)

    def trial_of(self, commit_id: str) -> dict[str, Any] | None:
        """What was measured before this commit, while its publisher watches the server; None if none does."""
        with contextlib.suppress(FileNotFoundError, TierstoreError, ValueError):
            trial: dict[str, Any] = json.loads(read_plain_file(self.folder / "trial", _MAX_TEXT_BYTES))
            return trial["before"] if trial.get("commit_id") == commit_id != "" else None
        return None

    def set_trial(self, trial: Any) -> None:
        """UpdateError unless it is small, as {"commit_id": "...", "before": {"seconds_p99": 0.01}}."""
        if not isinstance(trial.get("before"), dict) or len(text := json.dumps(trial)) > _MAX_TRIAL_BYTES:
            raise UpdateError(400, 'a trial is like {"commit_id": "...", "before": {"seconds_p99": 0.01}}')
        make_directory(self.folder)
        write_text(self.folder / "trial", text, force=True)

    def set_declined(self, commit_ids: list[str]) -> None:
        make_directory(self.folder)
        write_text(self.folder / "declined", "\n".join(commit_ids[-_MAX_DECLINED:]), force=True)


def _require_room(folder: Path, size_bytes: int) -> None:
    free = free_bytes(folder)
    if free < size_bytes + _ROOM_BYTES:
        raise DiskFullError(
            f"{folder}: {format_size(size_bytes)} more, and {format_size(free)} free, of which "
            f"{format_size(_ROOM_BYTES)} stay so. Free some space, and publish again, which goes on where this stopped"
        )


def require_urls(peers: Any) -> None:
    """UpdateError unless they are a list of URLs of admin ports."""
    try:
        for each in peers[:_MAX_PEERS]:
            parse_url(each)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UpdateError(400, f"peers must be a list of URLs: {error}") from None


def append(path: Path, data: bytes, offset: int) -> None:
    """Write to an upload, at its end or over the same bytes. DiskFullError; UpdateError: it became shorter."""
    _require_room(path.parent, len(data))
    try:
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < offset:
                raise UpdateError(409, f"{path.name} was damaged, and begins anew")
            write_all(file.fileno(), data, offset)
    except OSError as error:
        raise translate_os_error(error, path) from error
