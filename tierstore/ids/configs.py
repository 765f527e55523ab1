"""What a table of dynamic ids goes by: which ids get a row, and which lose it. Frozen, hashable, JSON-able."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, Literal, get_args

from ..system.checks import by_kind, require_choice, require_int

Unseen = Literal["zeros", "error", "init"]
MAX_SEEN: Final = 255


def _require(part: Any, name: str, low: int, high: int) -> None:
    """Have the number as Python's."""
    object.__setattr__(part, name, require_int(getattr(part, name), name, low, high))


@dataclass(frozen=True)
class Admission:
    """Base: which ids get a row."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Frequency(Admission):
    """An id gets a row with the batch in which it has been seen ``times`` times.

    Counts are exact for ``candidates`` ids that have none yet; when there are more, the count of those not seen for
    longest begins again.

    Attributes:
        times: 2 to 255; an id counts as often as it stands in a batch.
        candidates: ids that are counted, 20 bytes each; default: as many as the table has rows.
    """

    times: int
    candidates: int | None = None
    kind: ClassVar[str] = "frequency"

    def __post_init__(self) -> None:
        _require(self, "times", 2, MAX_SEEN)
        if self.candidates is not None:
            _require(self, "candidates", 1, 2**31 - 1)


@dataclass(frozen=True)
class Probability(Admission):
    """An id gets a row with probability ``share`` in each batch that has it, by a function of seed, id and batch.

    Attributes:
        share: in (0, 1).
        seed: of the random numbers.
    """

    share: float
    seed: int = 0
    kind: ClassVar[str] = "probability"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share={self.share} must be in (0, 1); leave admission out to admit every id")


@dataclass(frozen=True)
class Eviction:
    """Base: which ids lose their rows when there are no more: those with the lowest scores, of equal scores the lowest
    ids; as many as new ones need."""

    kind: ClassVar[str] = ""

    @property
    def scores(self) -> str:
        """What scores are: uses, or when the last was: in batches or in minutes."""
        return "batches"


@dataclass(frozen=True)
class LRU(Eviction):
    """Those whose last use is longest ago."""

    kind: ClassVar[str] = "lru"


@dataclass(frozen=True)
class LFU(Eviction):
    """Those used least often, a sixteenth of all at once.

    Attributes:
        half_life_steps: all counts are halved after each so many batches; None: never.
    """

    half_life_steps: int | None = None
    kind: ClassVar[str] = "lfu"

    def __post_init__(self) -> None:
        if self.half_life_steps is not None:
            _require(self, "half_life_steps", 1, 2**31)

    @property
    def scores(self) -> str:
        return "uses"


@dataclass(frozen=True)
class TTL(Eviction):
    """Those not used for so many batches, or minutes, whether or not there are rows left; and as LRU.

    They go within a sixteenth of that time after it.

    Attributes:
        steps: batches.
        minutes: by the time that ``Store.set_time`` gives with batches. Exactly one of the two is given.
    """

    steps: int | None = None
    minutes: int | None = None
    kind: ClassVar[str] = "ttl"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("TTL takes either steps or minutes")
        _require(self, "steps" if self.minutes is None else "minutes", 1, 2**30)

    @property
    def scores(self) -> str:
        return "batches" if self.minutes is None else "minutes"

    @property
    def span(self) -> Any:
        return self.steps if self.minutes is None else self.minutes


_ADMISSIONS: Final[dict[str, type[Admission]]] = {each.kind: each for each in (Frequency, Probability)}
_EVICTIONS: Final[dict[str, type[Eviction]]] = {each.kind: each for each in (LRU, LFU, TTL)}


def _to_dict(part: Admission | Eviction) -> dict[str, Any]:
    return {"kind": part.kind, **asdict(part)}


@dataclass(frozen=True, kw_only=True)
class DynamicIds:
    """Any int64 is an id of the table; ``TableConfig.num_embeddings`` is how many have rows at a time.

    A forward pass that trains admits ids, in the order of the batches, and evicts others when rows run out, but none
    that an in-flight batch uses. The first value of a row is a function of the initializer's seed and the id.
    Prefetching and lookups without gradients admit and evict nothing.

    Attributes:
        admission: which ids get a row; None: all.
        eviction: which lose theirs.
        unseen: what a lookup makes of an id without a row: "zeros", where it is left out of its bag, as torch's
            ``padding_idx`` is; "error", an IdError; or "init", where it counts as the row that it would get: one of its
            first value, in ``Table.read`` too. Nothing is trained for it.
        owners, owned: set by ``tierstore.dist``: how many ranks own ids, by a hash; and which of them are in this
            store, a range.
    """

    admission: Admission | None = None
    eviction: Eviction = field(default_factory=LRU)
    unseen: Unseen = "zeros"
    owners: int = field(default=1, compare=False, repr=False)
    owned: tuple[int, int] = field(default=(0, 1), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.admission, Admission | None):
            raise TypeError(f"admission must be Frequency, Probability or None, not {type(self.admission).__name__}")
        if not isinstance(self.eviction, Eviction):
            raise TypeError(f"eviction must be LRU(), LFU() or TTL(), not {type(self.eviction).__name__}")
        require_choice(self.unseen, get_args(Unseen), "unseen")

    def num_candidates(self, num_rows: int) -> int:
        """How many ids without a row are counted."""
        if not isinstance(self.admission, Frequency):
            return 0
        return num_rows if self.admission.candidates is None else self.admission.candidates

    def share(self, count: int) -> int:
        """For how many of so many ids an owner has rows: a hash divides them evenly within eight standard
        deviations."""
        mean = count / self.owners
        return count if self.owners == 1 else min(count, math.ceil(mean + 8 * math.sqrt(mean) + 64))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back."""
        admission = None if self.admission is None else _to_dict(self.admission)
        fields = {"admission": admission, "eviction": _to_dict(self.eviction), "unseen": self.unseen}
        return fields if self.owners == self.owned[1] == 1 else fields | {"owners": self.owners, "owned": self.owned}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "DynamicIds":
        """Inverse of ``to_dict``. ValueError, TypeError or KeyError for anything it did not write."""
        admission = fields["admission"]
        return cls(
            admission=None if admission is None else by_kind(admission, _ADMISSIONS, "admission"),
            eviction=by_kind(fields["eviction"], _EVICTIONS, "eviction"),
            unseen=fields["unseen"],
            owners=fields.get("owners", 1),
            owned=tuple(fields.get("owned", (0, 1))),
        )
