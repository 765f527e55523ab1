"""One life of the process under test: open the store, take up its last version, go on to the end of the plan."""

import contextlib
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

import tierstore
from tierstore.io import row_file, superblock
from tierstore.io.files import ROW_FILE_NAME
from tierstore.store.manifest import MANIFEST_NAME
from tierstore.system import killpoints

from .plan import Action, configs, make_batch, stretch
from .state import State

__all__ = ["Dense", "Report", "Settings", "expected_states", "live", "other_boot", "train", "watch_names"]

_NOISE = 0.1
_POINTS_A_STALL: Final = 4
_RATE_DECAY: Final = 0.995
"""Each step multiplies the tables' learning rates by it."""
Report = Callable[..., None]
"""``report(label, **values)`` tells whoever watches; in one write, so that a kill loses it whole or not at all."""


class Dense:
    """All of it is committed beside the rows: weights, and the state of the random numbers."""

    def __init__(self, columns: int) -> None:
        torch.manual_seed(5)
        self._layer = torch.nn.Linear(columns, 1)
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=0.01)

    def step(self, pooled: Tensor, target: Tensor) -> None:
        """One step on float32 [samples, columns]; the gradient goes on to where ``pooled`` came from."""
        noisy = pooled + _NOISE * torch.rand(pooled.shape)
        loss = (self._layer(noisy).squeeze(1) - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Copies."""
        found = {name: tensor.clone() for name, tensor in self._layer.state_dict().items()}
        return found | {"random": torch.get_rng_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        self._layer.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "random"})
        torch.set_rng_state(tensors["random"])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the store is used; no bit of what it holds depends on it.

    Attributes:
        growth_bytes: written between two anchors in the background.
        depth: batches prefetched.
        stall_seconds: at some of the named points, now one and now another, the thread that reaches it waits so long.
    """

    policy: Literal["lru", "lfu"] = "lru"
    keep: int = 2
    ddr: str = "448KiB"
    hbm: str = "0"
    growth_bytes: int = 256 * 2**10
    depth: int = 2
    stall_seconds: float = 0


@contextlib.contextmanager
def other_boot(number: int) -> Iterator[None]:
    """As if the machine had started again so many times."""
    real = superblock.boot_id
    superblock.boot_id = lambda: b"start" + number.to_bytes(11, "little")
    try:
        yield
    finally:
        superblock.boot_id = real


def live(
    directory: Path, plan: Sequence[Action], settings: Settings, report: Report, *, boot: int, kill_at: tuple[str, int]
) -> None:
    """Run in a process of its own, which it ends at the ``kill_at[1]``-th time the point ``kill_at[0]`` is reached.

    Reports "opened", "begin" and "durable" (of commits), "going back" and "back" (of rollbacks), "closing", "closed"
    with how often each point was reached, and "failed".
    """
    reached = _watch(kill_at, settings.stall_seconds)
    row_file.GROWTH_BYTES = settings.growth_bytes  # type: ignore[misc]
    with other_boot(boot):
        train(directory, plan, settings, report)
    report("closed", reached=dict(reached))


def train(directory: Path, plan: Sequence[Action], settings: Settings, report: Report) -> None:
    """Go on from the store's version to the end of the plan; reports as ``live``, up to "closing"."""
    with tierstore.open(
        directory, ddr=settings.ddr, hbm=settings.hbm, policy=settings.policy, keep=settings.keep, threads=1
    ) as store:
        _Life(store, plan, settings.depth, report).run()
        report("closing")


def expected_states(directory: Path, plan: Sequence[Action]) -> dict[int, State]:
    """Of each version by its position, what it holds in a run that nobody kills: all rows in memory, each commit waited
    for. At 0, what there is before the first."""
    with tierstore.open(directory, ddr="8MiB", keep=2, threads=1) as store:
        states: dict[int, State] = {}

        def look(position: int) -> None:
            states[position] = State.of(store)

        _Life(store, plan, 0, lambda *_, **__: None, look).run()
    return states


def _watch(kill_at: tuple[str, int], stall_seconds: float) -> Counter[str]:
    """Count the points, and end the process at one of them."""
    reached: Counter[str] = Counter()
    point, count = kill_at

    def hook(name: str) -> None:
        reached[name] += 1
        if name == point and reached[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        if stall_seconds and zlib.crc32(f"{name} {reached[name]}".encode()) % _POINTS_A_STALL == 0:
            time.sleep(stall_seconds)

    killpoints.hook = hook
    watch_names(hook)
    return reached


def watch_names(hook: Callable[[str], None]) -> None:
    """Have the hook called before and after a file of the store gets its name."""
    points = {
        MANIFEST_NAME: ("manifest: written beside", "manifest: replaced"),
        ROW_FILE_NAME: ("rows file: made under another name", "rows file: in place"),
    }

    def watched(call: Callable[..., None]) -> Callable[..., None]:
        def named(source: Any, target: Any) -> None:
            before, after = points.get(Path(target).name, (None, None))
            if before:
                hook(before)
            call(source, target)
            if after:
                hook(after)

        return named

    for name in ("link", "rename", "replace"):
        setattr(os, name, watched(getattr(os, name)))


class _Life:
    """Args:
    look: given each position that was committed, and the first, while nothing else goes on.
    """

    def __init__(
        self,
        store: "tierstore.Store",
        plan: Sequence[Action],
        depth: int,
        report: Report,
        look: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._depth = depth
        self._report = report
        self._look = look
        for config in configs():
            store.create_table(config)
        self._collection = tierstore.TieredEmbeddingBagCollection(store)
        self._dense = Dense(sum(c.embedding_dim * len(c.feature_names) for c in configs()))
        self._position = self._committed = self._take_up()
        self._last: Future[int] | None = None
        if look is not None:
            look(self._position)
        report("opened", version=store.version, position=self._position, numbers=list(store.versions))

    def _take_up(self) -> int:
        """Have the dense part be as the store's version says; its position."""
        if self._store.version:
            self._dense.load(self._store.tensors())
        return int(self._store.extra.get("position", 0))

    def run(self) -> None:
        while actions := stretch(self._plan, self._position):
            if actions[0].kind == "rollback":
                self._go_back(actions[0].number)
            else:
                self._go_on(actions)

    def _go_on(self, actions: Sequence[Action]) -> None:
        batches = (make_batch(action.number) for action in actions if action.kind == "train")
        with contextlib.closing(tierstore.prefetch(batches, self._collection, depth=self._depth)) as ready:
            for action in actions:
                if action.kind == "train":
                    batch = next(ready)
                    self._dense.step(self._collection(batch.sparse).values(), batch.target)
                    for table in self._store.tables.values():
                        table.learning_rate *= _RATE_DECAY
                self._position += 1
                if action.kind == "commit":
                    self._commit(self._position)

    def _commit(self, position: int) -> None:
        self._report("begin", position=position)
        self._last = self._store.commit_async(extra={"position": position}, tensors=self._dense.tensors())
        self._last.add_done_callback(lambda done: self._tell(done, position))
        self._committed = position
        if self._look is not None:
            self._last.result()
            self._look(position)

    def _tell(self, done: "Future[Any]", position: int) -> None:
        error = done.exception()
        if error is None:
            self._report("durable", position=position, version=done.result())
        else:
            self._report("failed", words=f"the commit at {position}: {error!r}")

    def _go_back(self, position: int) -> None:
        """To the version of that position, one of the last two."""
        if self._last is not None:
            self._last.result()
        self._report("going back", position=position)
        self._store.rollback(self._store.versions[-2 if position < self._committed else -1])
        if self._store.extra["position"] != position:
            raise AssertionError(f"gone back to {self._store.extra}, instead of position {position}")
        self._take_up()
        self._committed = position
        self._position += 1
        self._report("back", position=position)
