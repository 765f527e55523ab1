"""rows.anchor after the machine has stopped: damaged, or forged with the right checksum."""

from contextlib import closing
from pathlib import Path

from tierstore.errors import TierstoreError
from tierstore.io import anchor, opened
from tierstore.io.checksum import bytes_checksum
from tierstore.io.pins import Pins
from tierstore.store.manifest import Manifest

from .image import build_store, edited
from .target import FindingError, Target, scratch_folder

_FOLDER = scratch_folder()
build_store(_FOLDER / "store")
_STORE_ID = bytes.fromhex(Manifest.read(_FOLDER / "store").store_id)
_ROWS = _FOLDER / "store" / "rows.lmdb"
_ANCHOR = _FOLDER / "store" / "rows.anchor"
_CONTENT, _ANCHORED = _ROWS.read_bytes(), _ANCHOR.read_bytes()
_BODY = anchor._BODY_BYTES
_HEADS = 2 * 4096
anchor._BOOT_ID = Path("/nonexistent")  # the boot id is all zero, as after a restart of another machine


def _recover(path: Path, store_id: bytes) -> None:
    with closing(Pins(path, writable=True)) as pins:
        opened.recover(path, store_id, pins)


def run(data: bytes) -> None:
    """The first byte: whether checksums are made right again (1), the rest is edits, or (2) the file itself."""
    if not data:
        return
    mode, rest = data[0] % 3, data[1:]
    image = bytearray(rest) if mode == 2 else edited(_ANCHORED, [0, 0, 0, 1], rest)
    if mode == 1:
        for start in (0, 4096):
            body = bytes(image[start : start + _BODY])
            image[start + _BODY : start + _BODY + 8] = bytes_checksum(body).to_bytes(8, "little")
    _ANCHOR.write_bytes(image)
    for check in (anchor.require_sound, _recover):
        try:
            check(_ROWS, _STORE_ID)
        except TierstoreError as error:
            if "/rows." not in str(error):
                raise FindingError("an error that names no file") from error
    with _ROWS.open("r+b") as file:
        if file.seek(0, 2) != len(_CONTENT):
            raise FindingError("the row file was lengthened")
        file.seek(_HEADS)
        if file.read() != _CONTENT[_HEADS:]:
            raise FindingError("more than the meta pages was written to")
        file.seek(0)
        file.write(_CONTENT[:_HEADS])


def seeds() -> list[bytes]:
    edits = [bytes([2, page, offset, 0, 1, 0, 0, 0]) for page in (0, 3) for offset in (0, 8, 24, 40, 48, 56, 72, 144)]
    return [b"\2" + _ANCHORED, *[bytes([mode]) + edit for edit in edits for mode in (0, 1)]]


TARGET = Target(run=run, seeds=seeds)
