"""The items nearest to one, of a table that is being trained: python index.py STORE TABLE, then ids, one a line.

The index is in memory. It begins with all rows, and takes what each commit changed or deleted. Needs usearch.
"""

import contextlib
import sys
import threading
from functools import partial

import numpy as np
from usearch.index import Index

import tierstore
from tierstore.errors import ClosedError
from tierstore.feed import Feed, Sink


class ItemIndex(Sink):
    """Rows by inner product, while other threads search."""

    def __init__(self, dim):
        self.make = partial(Index, ndim=dim, metric="ip", dtype="f32", expansion_add=128, expansion_search=400)
        self.index, self.lock, self.held = self.make(), threading.Lock(), None

    def position(self):
        return self.held

    def apply(self, change, batches, position):
        self.held = None  # should it fail half way, all rows come again
        is_new = change.is_full or {*change.dropped} & {*position.tables}
        index = self.make() if is_new else self.index
        for _, ids, rows in batches:
            with self.lock:
                index.remove(ids.view(np.uint64))
                if rows is not None:
                    index.add(ids.view(np.uint64), rows.float().numpy())
        self.index, self.held = index, position

    def nearest(self, item, count):
        """Ids, best first; none if this one has no row."""
        with self.lock:
            row = self.index[item % 2**64]
            return [] if row is None else self.index.search(row, count).keys.view(np.int64).tolist()


def follow(feed):
    with contextlib.suppress(ClosedError):  # the store is closed at the end
        feed.follow()


if __name__ == "__main__":
    with tierstore.open(sys.argv[1], mode="r", ddr="64MiB") as store:
        table = store[sys.argv[2]]
        sink = ItemIndex(table.config.embedding_dim)
        say = partial(print, file=sys.stderr)
        feed = Feed(store, sink, consumer="index", tables=[table.name], say=say)
        feed.step()
        threading.Thread(target=follow, args=[feed], daemon=True).start()
        for line in sys.stdin:
            print(*sink.nearest(int(line), 10), flush=True)
