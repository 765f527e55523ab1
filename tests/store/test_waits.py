"""No call waits for something that only its own caller can do: each is made amid everything that a caller may have
begun and not ended. And what waits for others ends by Ctrl-C.
"""

import contextlib
import faulthandler
import itertools
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import tierstore
from tierstore.errors import TierstoreError
from tierstore.nn.prefetch import Prefetched
from tierstore.store.commits import PendingCommit
from tierstore.store.optimizer import TieredOptimizer
from tierstore.store.recording import Recorder
from tierstore.store.refresh import Newer

SECONDS: Final = 5.0
ROWS, DIM = 5000, 8
IDS = torch.arange(0, ROWS, 2)
Act = Callable[[], None]


class Scene:
    def __init__(self, folder: Path, kind: str, made: Path | None = None) -> None:
        options: dict[str, Any] = {"ddr": "1MiB", "threads": 1, "keep": 2}
        self.folder, self.count = folder, 0
        if made is not None and kind != "memory":
            shutil.copytree(made, folder / "store")
        where = {"cold": "memory"} if kind == "memory" else {"directory": folder / "store"}
        self.store = writer = tierstore.open(**where, **options)  # type: ignore[arg-type]
        if not writer.tables:
            writer.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
            ids = tierstore.DynamicIds()
            writer.create_table(tierstore.TableConfig(name="d", num_embeddings=4, embedding_dim=DIM, ids=ids))
            writer["t"].write(IDS, torch.ones(len(IDS), DIM))
            writer["d"].admit(torch.arange(4))
            writer.commit()
        self.newer: Newer | None = None
        self.readers: list[tierstore.Store] = []
        if kind == "reader":
            self.store = tierstore.open(folder / "store", mode="r", ddr="1MiB", threads=1)
            self.readers = [writer]
            writer["t"].write(IDS[:9], torch.zeros(9, DIM))
            writer.commit()
            self.newer = self.store.find_newer()
        self.table, self.dynamic = self.store["t"], self.store["d"]
        self.bag = tierstore.TieredEmbeddingBag(self.table)
        self.pending: PendingCommit | None = None

    @cached_property
    def pipeline(self) -> Prefetched[torch.Tensor]:
        return tierstore.prefetch([IDS[:8].view(2, 4)] * 4, self.bag, depth=1)

    @cached_property
    def recorder(self) -> Recorder:
        return self.store.record(self.new("trace.npz"), rate=1.0)

    @cached_property
    def optimizer(self) -> TieredOptimizer:
        return self.store.optimizer()

    def new(self, name: str) -> Path:
        self.count += 1
        return self.folder / f"{self.count}-{name}"

    def train(self, bag: tierstore.TieredEmbeddingBag, ids: torch.Tensor) -> None:
        with torch.enable_grad():  # there are none within a backward pass
            out = bag(ids.view(1, -1)).sum()
            if out.requires_grad:
                out.backward()

    def end(self) -> None:
        self.pipeline.close()
        for each in (self.store, *self.readers):
            each.close()


def _step(scene: Scene) -> None:
    optimizer = scene.optimizer
    scene.train(scene.bag, IDS[:30])
    optimizer.step()


NEW = tierstore.TableConfig(name="new", num_embeddings=50, embedding_dim=DIM)
CALLS: Final[dict[str, Callable[[Scene], object]]] = {
    "Store.stats": lambda scene: scene.store.stats(),
    "Store's properties": lambda scene: [
        getattr(scene.store, name) for name in ("tables", "version", "versions", "extra", "changed_tables")
    ],
    "Store.tensors": lambda scene: scene.store.tensors(),
    "Store.commit_id": lambda scene: scene.store.commit_id(1),
    "Store.set_time": lambda scene: scene.store.set_time(60.0),
    "Store.verify": lambda scene: scene.store.verify(),
    "Store.written_rows": lambda scene: [*scene.store.written_rows(scene.table)],
    "Table.written": lambda scene: [*scene.table.written(), *scene.dynamic.written()],
    "Table.read": lambda scene: scene.table.read(IDS[:40]),
    "Table.read_state": lambda scene: scene.table.read_state(IDS[:40]),
    "Table.rows_in_memory": lambda scene: scene.table.rows_in_memory(IDS[:40].numpy()),
    "Table.are_in_memory": lambda scene: scene.table.are_in_memory(IDS[:40]),
    "Table.first_values": lambda scene: scene.table.first_values(IDS[:40]),
    "Table.pooled": lambda scene: scene.table.pooled(IDS[:4], torch.tensor([0, 2, 4])),
    "Table.write": lambda scene: scene.table.write(IDS, torch.zeros(len(IDS), DIM)),
    "Table.learning_rate": lambda scene: setattr(scene.table, "learning_rate", 0.5),
    "Table.admit": lambda scene: scene.dynamic.admit(torch.arange(70, 72)),
    "Table.evict": lambda scene: scene.dynamic.evict(torch.arange(70, 72)),
    "Table.id_stats": lambda scene: scene.dynamic.id_stats(),
    "TieredEmbeddingBag.forward": lambda scene: scene.train(scene.bag, IDS[:30]),
    "Store.commit_async": lambda scene: setattr(scene, "pending", scene.store.commit_async()),
    "PendingCommit.result": lambda scene: scene.pending and scene.pending.result(),
    "PendingCommit.exception": lambda scene: scene.pending and scene.pending.exception(),
    "PendingCommit.cancel": lambda scene: scene.pending and scene.pending.cancel(),
    "Store.commit": lambda scene: scene.store.commit(),
    "Recorder.describe": lambda scene: scene.recorder.describe(),
    "Recorder.rate": lambda scene: scene.recorder.rate,
    "Store.backup": lambda scene: scene.store.backup(scene.new("backup")),
    "Prefetched.send": lambda scene: next(scene.pipeline),
    "Prefetched.state_dict": lambda scene: scene.pipeline.state_dict(),
    "Prefetched.throw": lambda scene: scene.pipeline.throw(KeyError),
    "Recorder.stop": lambda scene: scene.recorder.stop(),
    "Store.record": lambda scene: scene.store.record(scene.new("trace.npz")),
    "Newer.tensors": lambda scene: scene.newer and scene.newer.tensors(),
    "Store.rehearse_newer": lambda scene: scene.store.rehearse_newer(),
    "Store.find_newer": lambda scene: scene.store.find_newer(),
    "Store.consumers": lambda scene: scene.store.consumers(),
    "Store.forget_consumer": lambda scene: scene.store.forget_consumer("copy"),
    "Newer.close": lambda scene: scene.newer and scene.newer.close(),
}
"""Each after the other, amid one holder."""

ENDING: Final[dict[str, tuple[str, Callable[[Scene], object]]]] = {
    "Store.close": ("disk memory reader", lambda scene: scene.store.close()),
    "Store.create_table": ("disk", lambda scene: scene.store.create_table(NEW)),
    "Store.change_table": ("disk", lambda scene: scene.store.change_table("t", num_embeddings=ROWS + 1)),
    "Store.drop_table": ("disk memory", lambda scene: scene.store.drop_table("t")),
    "Store.rollback": ("disk memory", lambda scene: scene.store.rollback(1)),
    "Store.refresh": ("reader", lambda scene: scene.store.refresh()),
    "Store.changes": ("disk reader", lambda scene: [len([*each.rows()]) for each in scene.store.changes("copy")]),
    "Newer.show": ("reader", lambda scene: scene.newer and scene.newer.show()),
    "Prefetched.close": ("disk reader", lambda scene: scene.pipeline.close()),
    "Store.optimizer": ("disk", lambda scene: scene.optimizer),
    "TieredOptimizer.step": ("disk", _step),
}
"""Each in a scene of its own, as others may then have nothing left to do."""

OF_OTHERS: Final = {
    "Store": "find_or_require has_rows_of note_partly_trained pool_of require_whole_steps use_optimizer "
    "tables version versions extra changed_tables",
    "Table": "columns converted follows give_rows go_on_at id_error ids in_pool is_whole jagged keys_of local "
    "lookup name next_hyper note_change pool pooled_directly require_float require_whole restore rounding_seed "
    "size_bytes state",
    "Recorder": "add_table note_bags note_lookups note_rows",
    "Newer": "found manifest rows show_ids version",
    "PendingCommit": "end",
    "TieredOptimizer": "add_param_group load_state_dict has_grad collect zero_grad clip_grad_norm_ "
    "of_own_tables param_groups state_dict",
}
"""Public names that users do not call, that only look at what others above do, or that one of these has."""


def _half_listed(scene: Scene, act: Act) -> None:
    parts = [scene.table.written(), scene.store.written_rows(scene.table), scene.dynamic.written()]
    for each in parts:
        next(each, None)
    act()
    for each in parts:
        with contextlib.suppress(TierstoreError):
            list(each)


def _half_used(scene: Scene, act: Act) -> None:
    out = scene.bag(IDS[:64].view(2, -1))
    act()
    del out


def _backward(scene: Scene, act: Act) -> None:
    out = scene.bag(IDS[:64].view(2, -1))
    out.register_hook(lambda _: act())
    with contextlib.suppress(RuntimeError, TierstoreError):
        out.sum().backward()


def _once(act: Act) -> Act:
    left = [act]

    def once() -> None:
        while left:
            left.pop()()

    return once


def _prefetching(depth: int, where: str) -> Callable[[Scene, Act], None]:
    """Amid a pass: in its source, in ``features``, or in a step."""

    def hold(scene: Scene, act: Act) -> None:
        acts = {name: _once(act if name == where else lambda: None) for name in ("source", "features", "step")}

        def batches() -> Iterator[torch.Tensor]:
            for _ in range(4):
                acts["source"]()
                yield IDS[:8].view(2, 4)

        def features(batch: torch.Tensor) -> torch.Tensor:
            acts["features"]()
            return batch

        scene.pipeline = tierstore.prefetch(batches(), scene.bag, depth=depth, features=features)
        with contextlib.suppress(TierstoreError, ValueError, RuntimeError):
            for place, _ in enumerate(scene.pipeline):
                if place == 1:
                    acts["step"]()

    return hold


def _verify(scene: Scene, act: Act) -> None:
    once = _once(act)
    with contextlib.suppress(TierstoreError):
        scene.store.verify(progress=lambda _done, _total: once())


def _backup(scene: Scene, act: Act) -> None:
    once = _once(act)
    with contextlib.suppress(TierstoreError):
        scene.store.backup(scene.new("backup"), progress=lambda _done, _total: once())


def _callback_of_a_commit(scene: Scene, act: Act) -> None:
    done = threading.Event()
    scene.pending = scene.store.commit_async()
    scene.pending.add_done_callback(lambda _: (act(), done.set()))
    done.wait()


def _closure(scene: Scene, act: Act) -> None:
    def closure() -> torch.Tensor:
        act()
        scene.optimizer.zero_grad()
        loss = scene.bag(IDS[:8].view(2, 4)).sum()
        loss.backward()
        return loss

    with contextlib.suppress(TierstoreError, RuntimeError):
        scene.optimizer.step(closure)


HOLDERS: Final[dict[str, tuple[str, Callable[[Scene, Act], None]]]] = {
    "nothing": ("disk memory reader", lambda _, act: act()),
    "half listed": ("disk memory reader", _half_listed),
    "half used": ("disk reader", _half_used),
    "backward": ("disk", _backward),
    "prefetch": ("disk memory reader", _prefetching(2, "step")),
    "plain prefetch": ("disk", _prefetching(0, "step")),
    "source": ("disk reader", _prefetching(2, "source")),
    "plain source": ("disk", _prefetching(0, "source")),
    "features": ("disk", _prefetching(2, "features")),
    "verify": ("disk reader", _verify),
    "backup": ("disk reader", _backup),
    "callback of a commit": ("disk memory", _callback_of_a_commit),
    "closure": ("disk", _closure),
}
ERRORS = (TierstoreError, ValueError, TypeError, RuntimeError, KeyError, StopIteration, FileExistsError)


def _use(scene: Scene, amid: str, calls: dict[str, Callable[[Scene], object]], slow: list[str]) -> None:
    for name, call in calls.items():
        since = time.monotonic()
        with contextlib.suppress(*ERRORS):
            call(scene)
        if time.monotonic() - since > SECONDS:
            slow.append(f"{name} amid {amid}")


@pytest.mark.timeout(240)  # a call that waits for ever ends here, with the stacks of all threads
def test_no_call_waits_for_its_own_caller(tmp_path: Path) -> None:
    made, slow = tmp_path / "made", list[str]()
    for kind in ("disk", "memory", "reader"):  # kernels are compiled
        (tmp_path / kind).mkdir()
        scene = Scene(tmp_path / kind, kind)
        if kind == "disk":
            scene.store.backup(made)
        _use(scene, "", CALLS | {name: call for name, (_, call) in ENDING.items()}, [])
        scene.end()
    for (holder, (kinds, hold)), kind in itertools.product(HOLDERS.items(), ("disk", "memory", "reader")):
        ending = [{name: call} for name, (where, call) in ENDING.items() if kind in where]
        for number, calls in enumerate([CALLS, *ending] if kind in kinds else []):
            path = tmp_path / f"{holder}-{kind}-{number}"
            path.mkdir()
            scene = Scene(path, kind, made)
            hold(scene, partial(_use, scene, f"{holder} ({kind})", calls, slow))
            scene.end()
    assert not slow


def test_every_public_call_is_made() -> None:
    for kind in (tierstore.Store, tierstore.Table, Recorder, Newer, PendingCommit, Prefetched, TieredOptimizer):
        own = {name for base in kind.__mro__ if "tierstore" in base.__module__ for name in vars(base) if name[0] != "_"}
        made = {name.partition(".")[2] for name in (*CALLS, *ENDING) if name.startswith(f"{kind.__name__}.")}
        assert own == made | {*OF_OTHERS.get(kind.__name__, "").split()}, f"CALLS or ENDING of {kind.__name__}"


def test_locks_can_be_taken_again_by_the_thread_that_has_them() -> None:
    """A signal's handler, or a callback, uses the store in a thread that may be amid any call."""
    package = Path(tierstore.__file__).parent
    rooms = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "serve"]
    found = [path for path in rooms if re.search(r"threading\.(Lock|Condition|Semaphore)\(\)", path.read_text())]
    assert found == [package / "kernels" / "threads.py"]  # which runs nobody else's code under it


def _interrupted(call: Callable[[], object]) -> None:
    """Ctrl-C ends it, though what it waits for does not come."""
    faulthandler.dump_traceback_later(60, exit=True)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    faulthandler.cancel_dump_traceback_later()


def test_ctrl_c_while_close_waits_for_a_backup(tmp_path: Path) -> None:
    goes_on, begun = threading.Event(), threading.Event()
    scene = Scene(tmp_path, "disk")

    def progress(_done: int, _total: int) -> None:
        begun.set()
        goes_on.wait(30)

    thread = threading.Thread(target=scene.store.backup, args=[tmp_path / "b"], kwargs={"progress": progress})
    thread.start()
    assert begun.wait(10)
    _interrupted(scene.store.close)
    assert scene.store.commit() == 2, "the store goes on"
    goes_on.set()
    scene.end()
    thread.join()
    assert tierstore.open(tmp_path / "b", mode="r", ddr="1MiB").version == 1


@pytest.mark.parametrize("name", ["commit", "close", "rollback"])
def test_ctrl_c_while_a_commit_is_written(tmp_path: Path, gate: Any, name: str) -> None:
    scene = Scene(tmp_path, "disk")
    scene.table.write(IDS, torch.zeros(len(IDS), DIM))
    gate.close("commit: frozen rows written")
    if name != "commit":
        scene.store.commit_async()
    _interrupted({"commit": scene.store.commit, "close": scene.store.close}.get(name, lambda: scene.store.rollback(1)))
    gate.open()
    assert scene.store.commit() == 3
    scene.end()
