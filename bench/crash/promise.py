"""Which versions a store must show after a kill, by what the dead process had reported."""

from collections.abc import Sequence
from typing import Any

__all__ = ["Promise", "PromiseError"]

Head = tuple[int, ...]


class PromiseError(Exception):
    """A store showed what it may not."""


class Promise:
    """The heads that may be found: the last that is durable, and those that were begun since.

    A reader may see one that was begun, and the next process that writes go back to the one before: it builds only on
    what is known to be on the device.

    A head is the positions of all kept versions, the oldest first.

    Attributes:
        was_opened: whether the store was ever open, so that it must be there.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._heads: list[Head] = [()]
        self._numbers: dict[int, int] = {}
        self._highest = 0
        self.was_opened = False

    def hear(self, report: dict[str, Any]) -> None:
        """Take in what a process reported.

        Raises:
            PromiseError: it opened what may not be there.
        """
        label = report["label"]
        if label == "opened":
            self.was_opened = True
            self._open(report["position"], report["numbers"])
        elif label == "begin":
            self._heads.append((*self._heads[-1], report["position"])[-self._keep :])
            self._numbers.pop(report["position"], None)
        elif label == "going back":
            self._heads.append(tuple(kept for kept in self._heads[-1] if kept <= report["position"]))
        elif label in ("durable", "back"):
            ended = next(i for i, head in enumerate(self._heads) if head and head[-1] == report["position"])
            # Going back to the newest version leaves the head as it is: both are this one.
            del self._heads[:ended]
            if label == "durable":
                self._number(report["position"], report["version"])

    def _number(self, position: int, number: int) -> None:
        if number <= self._highest:
            raise PromiseError(f"the commit at {position} has the number {number}, and {self._highest} was used before")
        self._highest = self._numbers[position] = number

    def check(self, head: Head, numbers: Sequence[int]) -> None:
        """PromiseError if a store may not show these versions after a kill."""
        if head not in self._heads:
            raise PromiseError(f"the positions kept are {head}, and may be one of {self._heads}")
        if sorted(set(numbers)) != list(numbers):
            raise PromiseError(f"the versions' numbers do not rise: {numbers}")
        told = [self._numbers.get(position, number) for position, number in zip(head, numbers, strict=True)]
        if told != list(numbers):
            raise PromiseError(f"the versions at {head} have the numbers {numbers}, and were committed as {told}")

    def _open(self, position: int, numbers: Sequence[int]) -> None:
        """A process that writes has taken up a version; from now on it is durable."""
        fitting = [head for head in self._heads if (head or (0,))[-1] == position and len(head) == len(numbers)]
        if not fitting:
            raise PromiseError(f"opened at {position} with the versions {numbers}; could be one of {self._heads}")
        self._heads = fitting[-1:]
        self._numbers = dict(zip(fitting[-1], numbers, strict=True))
