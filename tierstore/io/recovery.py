"""Back to the anchored tree, before an open for writing.

It is done only if the anchored tree is whole, and nobody reads another one: going back would let its pages be reused,
so while a reader of the same start of the machine (boot id) has the file open, the tree that it sees stays. The meta
pages that the anchored ones take the place of are saved first, in ``rows.before``. So a recovery that should not have
been leaves all that there was; and whatever step it is cut short at, the next one does the same again.
"""

import os
from pathlib import Path

from ..errors import DamagedError, StoreLockedError
from ..system.durable import write_all
from ..system.killpoints import reach
from ..system.oserrors import RESTORE
from .anchor import Anchor, is_sound, keep_aside, load_anchor, read_metas, renew_anchor
from .btree import Meta, parse_meta
from .files import are_successive
from .mapped import FileMap
from .pins import Pins
from .snapshot import Tree
from .stored_records import check_store, read_head, read_payload, read_record


def recover(path: Path, store_id: bytes, pins: Pins) -> None:
    """Have the device hold the anchor, and put the anchored meta pages back.

    Args:
        pins: of the row file, open for writing; no tree is read through it.

    Raises:
        ChecksumError, FormatError: the anchor is damaged, or the row file older than it.
        DamagedError: the anchored tree is not whole; nothing was changed.
        StoreLockedError: others read a tree that a failed write has left.
        OSError: the device refused.
    """
    anchor = load_anchor(path, store_id)
    if anchor is None:
        return
    if read_metas(path, anchor.page_bytes) == anchor.metas:
        renew_anchor(path, anchor)
        return
    _require_whole(path, store_id, anchor, pins)
    renew_anchor(path, anchor)
    with pins.readers_kept_out() as is_alone:
        if is_alone:
            _put_back(path, pins.descriptor, anchor)
        elif not is_sound(path, anchor):
            raise StoreLockedError(
                f"{path}: a write failed while the store was open for writing, and others read it; end them, then "
                "open it again."
            )


def _put_back(path: Path, descriptor: int, anchor: Anchor) -> None:
    keep_aside(path, anchor, read_metas(path, anchor.page_bytes))
    reach("recovery: present meta pages kept aside")
    for number, meta in enumerate(anchor.metas):
        write_all(descriptor, meta, number * anchor.page_bytes)
    reach("recovery: anchored meta pages put back")
    os.fdatasync(descriptor)


def _require_whole(path: Path, store_id: bytes, anchor: Anchor, pins: Pins) -> None:
    """DamagedError unless the anchored tree holds all that an open looks at: both trees, records and payload."""
    found = [meta for meta in map(parse_meta, anchor.metas) if isinstance(meta, Meta)]
    file_map = FileMap(path, path.stat().st_size, pins)
    try:
        sizes = [meta.page_bytes for meta in found]
        if sizes != [anchor.page_bytes] * 2 or not are_successive(*(meta.txn_id for meta in found)):
            raise DamagedError("its meta pages are none")
        tree = Tree(path, file_map, max(found, key=lambda meta: meta.txn_id))
        tree.check_free_pages()
        check_store(tree, store_id)
        read_payload(tree, read_record(tree, read_head(tree).current))
    except DamagedError as error:
        said = str(error).removesuffix(RESTORE).removeprefix(f"{path}: ").strip()
        look = ' mode="r" shows what can still be read.' if is_sound(path, anchor) else ""
        raise DamagedError(
            f"{path}: the last writer was cut short, and the state that it would go back to is damaged ({said}). "
            f"Nothing was changed.{look} {RESTORE}"
        ) from error
    finally:
        file_map.close()
