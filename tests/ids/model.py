"""What ids a table has, by a dict and the rules of DynamicIds read literally. Shares no code with the package."""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.recordings import hashed as mixed
from tierstore.ids import LFU, TTL, DynamicIds, Frequency, Probability

WORD = 2**64


@dataclass
class Row:
    score: int
    number: int
    """Of the row in the oracle's table, where no row is given twice."""


@dataclass
class Model:
    rules: DynamicIds
    capacity: int
    rows: dict[int, Row] = field(default_factory=dict)
    candidates: dict[int, tuple[int, int]] = field(default_factory=dict)  # times seen, last batch
    step: int = 0
    minute: int = 1
    clock: int = 0
    """Of the last batch: its number, or the minute."""
    next_number: int = 0
    evicted: int = 0

    def copy(self) -> "Model":
        return copy.deepcopy(self)

    def train(self, ids: list[int], in_use: frozenset[int] = frozenset()) -> list[int]:
        """Returns the ids that got rows, in order."""
        self.step += 1
        rule = self.rules.eviction
        if isinstance(rule, LFU) and rule.half_life_steps and self.step % rule.half_life_steps == 0:
            for row in self.rows.values():
                row.score = max(1, row.score // 2)
        before = self.clock
        self.clock = self.minute if isinstance(rule, TTL) and rule.minutes else self.step
        if isinstance(rule, TTL):
            every = max(1, (rule.steps or rule.minutes) // 16)
            if self.clock > (rule.steps or rule.minutes) and self.clock // every > before // every:
                oldest = self.clock - (rule.steps or rule.minutes)
                self.evict({key for key, row in self.rows.items() if row.score < oldest} - in_use)
        counts = Counter(ids)
        had = {key for key in counts if key in self.rows}
        new = {key: times for key, times in counts.items() if key not in had}
        rule_of_admission = self.rules.admission
        seen = {key: times + self.candidates.get(key, (0, 0))[0] for key, times in new.items()}
        chosen = list(new)
        if isinstance(rule_of_admission, Frequency):
            chosen = [key for key in new if seen[key] >= rule_of_admission.times]
        elif isinstance(rule_of_admission, Probability):
            words = mixed(rule_of_admission.seed % WORD ^ mixed(self.step))
            draws = {key: (mixed(words ^ mixed(key % WORD)) >> 11) / 2**53 for key in new}
            chosen = [key for key in new if draws[key] < rule_of_admission.share]
        free = self.capacity - len(self.rows)
        if len(chosen) > free:
            wanted = max(len(chosen) - free, self.capacity // 16 if isinstance(rule, LFU) else 0)
            victims = sorted((row.score, key) for key, row in self.rows.items() if key not in had | in_use)
            self.evict({key for _, key in victims[:wanted]})
        given = chosen[: self.capacity - len(self.rows)]
        for key in given:
            self.rows[key] = Row(counts[key] if isinstance(rule, LFU) else self.clock, self.next_number)
            self.next_number += 1
        if isinstance(rule_of_admission, Frequency):
            self._count({key: times for key, times in seen.items() if key not in given}, given)
        for key in had:
            row = self.rows[key]
            row.score = row.score + counts[key] if isinstance(rule, LFU) else self.clock
        return given

    def evict(self, ids: Iterable[int]) -> None:
        for key in ids:
            if self.rows.pop(key, None):
                self.evicted += 1

    def _count(self, seen: dict[int, int], given: list[int]) -> None:
        """Those of this batch that have no row yet, by how often they were seen."""
        for key in given:
            self.candidates.pop(key, None)
        most = self.rules.num_candidates(self.capacity)
        entering = [key for key in seen if key not in self.candidates][-most:]
        for key in seen:
            if key in self.candidates:
                self.candidates[key] = (seen[key], self.step)
        lacking = len(self.candidates) + len(entering) - most
        if lacking > 0:
            oldest = sorted((last, key) for key, (_, last) in self.candidates.items())
            for _, key in oldest[: max(lacking, most // 16)]:
                del self.candidates[key]
        self.candidates |= {key: (seen[key], self.step) for key in entering}
