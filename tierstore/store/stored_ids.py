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

_HALF: Final = np.uint64(32)
_HAS_ID: Final = np.uint64(1)


def shares(config: TableConfig) -> tuple[int, int]:
    """How many rows and candidates an owner has."""
    rules, most = config.ids, config.num_embeddings
    return (0, 0) if rules is None else (rules.share(most), rules.share(rules.num_candidates(most)))


def section_rows(config: TableConfig) -> int:
    """Of the table of ids, for each owner."""
    return 1 if config.ids is None else config.table_of_ids(0).num_embeddings // config.ids.owners


def ids_bytes(config: TableConfig) -> int:
    """Memory for a table's ids, once they are looked at; 0 if they are not dynamic."""
    if config.ids is None:
        return 0
    return sum(map_bytes(len(range(*config.ids.owned)) * share) for share in shares(config))


class Section(NamedTuple):
    """Rows of a map, all of one owner; theirs in the table of ids are each ``step``-th from ``start`` on."""

    part: IdMap
    rows: range
    start: int
    step: int


def own_rows(config: TableConfig, places: Int64s) -> tuple[Bools, Int64s]:
    """Which of its table of ids' rows, int64 [n], have ids of the table's own rows, bool [n], and of which."""
    assert config.ids is not None
    share, candidates = shares(config)
    owners, rest = np.divmod(places, section_rows(config))
    rows, is_candidate = np.divmod(rest - 1, 2 if candidates else 1)
    own = (rest > 0) & (is_candidate == 0) & (rows < share)
    return own, (owners * share + rows)[own]


class Changed(NamedTuple):
    """Rows of the table of ids, int64 [n], and what they hold, uint64 [n, 2]: id; if the row has it 1 << 32 | score."""

    rows: Int64s
    words: Words

    @classmethod
    def of(cls, section: Section, rows: Int64s) -> "Changed":
        """What these rows of a section, the only one of its map, hold."""
        words, scores = np.empty((len(rows), 2), np.uint64), section.part.scores(rows)
        words[:, 0] = section.part.ids_of(rows).view(np.uint64)
        words[:, 1] = (scores != 0).astype(np.uint64) << _HALF | scores
        return cls(rows * section.step + section.start, words)

    def within(self, section: Section) -> "Changed":
        """What is of a section, in terms of its map's rows."""
        rows, rest = np.divmod(self.rows - section.start, section.step)
        own = (rest == 0) & (rows >= 0) & (rows < len(section.rows))
        return Changed(rows[own] + section.rows.start, self.words[own])

    def enter(self, section: Section) -> None:
        """Have its map hold what this says of a section, as it is stored. DamagedError: nobody wrote this."""
        part, (rows, words) = section.part, self.within(section)
        part.remove(rows[part.scores(rows) != 0])
        used = words[:, 1] >> _HALF & _HAS_ID != 0
        ids, scores = words[used, 0].view(np.int64), words[used, 1].astype(np.uint32)
        is_sound = are_scores(scores)
        if is_sound:
            part.put(rows[used], ids, scores)
        if not is_sound or not np.array_equal(part.find(ids), rows[used]):
            raise DamagedError(
                "two rows have one id, or a wrong score: restore the store from a copy, or publish all of it again"
            )
        part.clean(rows)
