"""How the ids of a table lie in its table of ids: row r + 1 has the id and score of row r, but if there are candidates,
they and rows come in turn, so that the table may grow; row 0 has the count of batches, the time of the last, and where
rows without ids are looked for next. Where ids have several owners, there is a section of this form for each.
"""

from typing import Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import DamagedError
from ..ids.id_map import IdMap, are_scores, map_bytes
from ..kernels.arrays import Bools, Int64s, Words
from ..layout import ROW_MASK
from ..pool.converting import RowSource

_HALF: Final = np.uint64(32)
_HAS_ID: Final = np.uint64(1)


class Changed(NamedTuple):
    """Rows of the table of ids, int64 [n], and what they hold, uint64 [n, 2]: id; if the row has it 1 << 32 | score."""

    rows: Int64s
    words: Words

    @classmethod
    def read(cls, read: RowSource, keys: Int64s) -> "Changed":
        words, state = np.zeros((len(keys), 2), np.uint64), np.empty((len(keys), 0), np.uint64)
        read(keys, np.arange(len(keys), dtype=np.int32), words, state, np.empty(len(keys), np.bool_))
        return cls(keys & ROW_MASK, words)


class TableOfIds:
    """Of a table, some of whose owners are here. Part 0 are its rows, part 1 the candidates for rows. ``shares``: how
    many rows and candidates an owner has. ``owned``: the owners here. ``section_rows``: of each."""

    def __init__(self, config: TableConfig) -> None:
        assert config.ids is not None
        rules, most = config.ids, config.num_embeddings
        self.shares = rules.share(most), rules.share(rules.num_candidates(most))
        self.owned = range(*rules.owned)
        self.num_rows = config.table_of_ids(0).num_embeddings
        self.section_rows = self.num_rows // rules.owners
        self._step = 2 if self.shares[1] else 1

    def own_rows(self, stored: Int64s, part: int = 0) -> tuple[Bools, Int64s]:
        """Which rows of the table of ids, int64 [n], are of a part, and their numbers in that part of all owners."""
        owners, rest = np.divmod(stored, self.section_rows)
        rows, parts = np.divmod(rest - 1, self._step)
        own = (rest > 0) & (parts == part) & (rows < self.shares[part])
        return own, (owners * self.shares[part] + rows)[own]

    def within(self, stored: Int64s, part: int) -> tuple[Bools, Int64s]:
        """The same of owners here, numbered from the first one's."""
        own, rows = self.own_rows(stored, part)
        rows -= self.owned.start * self.shares[part]
        here = (rows >= 0) & (rows < len(self.owned) * self.shares[part])
        own[own] = here
        return own, rows[here]

    def of(self, known: IdMap, part: int, rows: Int64s) -> Changed:
        words, scores = np.empty((len(rows), 2), np.uint64), known.scores(rows)
        words[:, 0] = known.ids_of(rows).view(np.uint64)
        words[:, 1] = (scores != 0).astype(np.uint64) << _HALF | scores
        owners, places = np.divmod(rows, max(1, self.shares[part]))
        return Changed((owners + self.owned.start) * self.section_rows + 1 + part + places * self._step, words)

    def enter(self, changed: Changed, known: IdMap, part: int) -> None:
        """Have a part's map hold what is stored of it. DamagedError: nobody wrote this."""
        own, rows = self.within(changed.rows, part)
        words = changed.words[own]
        known.remove(rows[known.scores(rows) != 0])
        used = words[:, 1] >> _HALF & _HAS_ID != 0
        ids, scores = words[used, 0].view(np.int64), words[used, 1].astype(np.uint32)
        is_sound = are_scores(scores)
        if is_sound:
            known.put(rows[used], ids, scores)
        if not is_sound or not np.array_equal(known.find(ids), rows[used]):
            raise DamagedError(
                "two rows have one id, or a wrong score: restore the store from a copy, or publish all of it again"
            )
        known.clean(rows)


def ids_bytes(config: TableConfig) -> int:
    """Memory for a table's ids, once they are looked at; 0 if they are not dynamic."""
    if config.ids is None:
        return 0
    stored = TableOfIds(config)
    return sum(map_bytes(len(stored.owned) * share) for share in stored.shares)
